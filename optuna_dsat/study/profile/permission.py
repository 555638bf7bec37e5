"""Knobs that need a permission (``--allow``): which of them a study may search, and why not the others."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from typing import TYPE_CHECKING

from optuna_dsat.config.knobs import COMPILE, DEEPCOMPILE, KNOBS, Knob
from optuna_dsat.script.interpreter import package_folders, script_versions
from optuna_dsat.study.spec import StudySpec

if TYPE_CHECKING:
    from optuna_dsat.study.profile.profiled import Profiled

_NEEDS_CUDA = "CUDA is needed"


def permitted_knobs(spec: StudySpec, profiled: Profiled | None) -> frozenset[str]:
    """Return the knobs that are searched by permission only, and that have it and can be searched."""
    refused = refused_knobs(spec, profiled)
    return frozenset(knob.name for knob in _allowed(spec) if knob.name not in refused)


def refused_knobs(spec: StudySpec, profiled: Profiled | None) -> dict[str, str]:
    """Return the knobs that have a permission and cannot be searched here, with the reason."""
    reasons = {knob.name: _too_old(knob, spec) or _reason(knob.name, spec, profiled) for knob in _allowed(spec)}
    return {name: reason for name, reason in reasons.items() if reason}


def refused_in_words(refused: Mapping[str, str]) -> str:
    """Return the knobs that are not searched despite their permission, in a sentence; empty for none."""
    names: dict[str, list[str]] = {}
    for name, reason in refused.items():
        names.setdefault(reason, []).append(name)
    groups = "; ".join(f"{', '.join(knobs)} ({reason})" for reason, knobs in names.items())
    return f"Allowed, and not searched: {groups}." if groups else ""


def _allowed(spec: StudySpec) -> list[Knob]:
    return [knob for knob in KNOBS if knob.permission in (spec.allow or ()) and knob.name not in spec.kept_knobs]


def _too_old(knob: Knob, spec: StudySpec) -> str:
    """Return whether the script's DeepSpeed lacks a knob, in words; empty if it has it or is unknown."""
    version = script_versions(spec.python, on=spec.on).get("deepspeed", "") if spec.on == "here" else ""
    numbers, needed = (tuple(map(int, re.findall(r"\d+", text)[:3])) for text in (version, knob.since))
    return f"it came with DeepSpeed {knob.since}, and the script's is {version}" if () < numbers < needed else ""


def _reason(name: str, spec: StudySpec, profiled: Profiled | None) -> str:
    """Return why a knob cannot be searched; empty if it can."""
    if name == DEEPCOMPILE and spec.device == "cpu":
        return _NEEDS_CUDA
    if name in (COMPILE, DEEPCOMPILE):
        return (profiled is not None and profiled.profile.no_compiling) or _no_compiler(spec)
    return ""


def _no_compiler(spec: StudySpec) -> str:
    """Return what torch's inductor lacks on this machine; empty for nothing, and where nodes of a cluster compile."""
    if spec.on != "here":
        return ""
    if spec.device == "cpu":
        return "" if shutil.which(os.environ.get("CXX", "g++")) else "inductor needs a C++ compiler: g++, or CXX"
    if not package_folders("triton", spec.python):
        return "inductor needs Triton, which the script's Python does not have"
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    return "" if any(map(shutil.which, compilers)) else "Triton needs a C compiler: gcc, clang, or CC"
