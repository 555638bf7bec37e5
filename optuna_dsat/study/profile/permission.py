"""Knobs that need a permission (``--allow``): which of them a study may search, and why not the others."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from typing import TYPE_CHECKING

from optuna_dsat.config.conditions import BF16, BF16_MASTER, BF16_STATES, Knob
from optuna_dsat.config.ds_config import batch_triangle, effective, leaves_precision, precision_of
from optuna_dsat.config.knobs import COMPILE, DEEPCOMPILE, KNOBS, QUANTIZED, QUANTIZED_FROZEN, ZENFLOW
from optuna_dsat.cost.gpus import gpu_of_device
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
    if name in (DEEPCOMPILE, *QUANTIZED, QUANTIZED_FROZEN, ZENFLOW) and spec.device == "cpu":
        return _NEEDS_CUDA
    if name in (COMPILE, DEEPCOMPILE):
        return (profiled is not None and profiled.profile.no_compiling) or _no_compiler(spec)
    if name in QUANTIZED and spec.ds_config.get("torch_autocast"):
        return "not with torch_autocast"
    if name == BF16:
        return _no_bf16(spec, profiled)
    if name in (BF16_STATES, BF16_MASTER) and precision_of(spec.ds_config) != "bf16":
        return "bf16 is not searched" if BF16 in spec.kept_knobs or _no_bf16(spec, profiled) else ""
    if name == QUANTIZED_FROZEN:
        frozen = profiled is None or profiled.profile.trainable_params < profiled.profile.params
        is_fp16 = precision_of(spec.ds_config) == "fp16"
        return "" if frozen and is_fp16 else "it is for frozen parameters in fp16"
    ranks = spec.data_parallel_ranks if profiled is None else profiled.data_parallel_size
    steps = batch_triangle(effective(spec.ds_config), world_size=ranks).gradient_accumulation_steps
    if name == ZENFLOW and (steps > 1 or spec.train_batch_size is not None or spec.batch == "keep"):
        return "it replaces gradient accumulation"
    return ""


def _no_bf16(spec: StudySpec, profiled: Profiled | None) -> str:
    """Return why bf16 cannot take the place of the config's precision; empty if it can."""
    if (precision_of(spec.ds_config) if profiled is None else profiled.precision_of(spec.ds_config)) == "bf16":
        return "the config trains in bf16 already"
    if profiled is not None and leaves_precision(spec.ds_config) and not (profiled.trainer and profiled.precision):
        return "the script sets the precision"
    if spec.ds_config.get("torch_autocast") or (spec.ds_config.get("data_types") or {}).get("grad_accum_dtype"):
        return "the config sets the types of autocast or gradients"
    gpu = None if profiled is None else gpu_of_device(profiled.profile.device_name)
    return "" if gpu is None or gpu.bf16 else "this GPU has no bf16"


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
