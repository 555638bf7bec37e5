"""Every installed version of DeepSpeed has the keys of every knob since its first, with the table's defaults."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from optuna_dsat.config.conditions import BF16, NVME, OFFLOAD_OPTIMIZER, OFFLOAD_PARAM
from optuna_dsat.config.ds_config import ZERO
from optuna_dsat.config.knob_values import normalise
from optuna_dsat.config.knobs import COMPILE, KNOBS, MODEL, PIN_MEMORY
from optuna_dsat.errors import ConfigError
from optuna_dsat.script.interpreter import module_places
from tests.harness.commands import ROOT

HERE = Path(module_places("deepspeed")[0])
ELSEWHERE = sorted((ROOT / ".cache" / "environments").glob("deepspeed-*/lib/python3*/site-packages/deepspeed"))
CLASSES = {
    (ZERO,): "DeepSpeedZeroConfig",
    (ZERO, OFFLOAD_OPTIMIZER): "DeepSpeedZeroOffloadOptimizerConfig",
    (ZERO, OFFLOAD_PARAM): "DeepSpeedZeroOffloadParamConfig",
    (BF16,): "DeepSpeedBF16Config",
    (COMPILE,): "CompileConfig",
}
"""Section of a DeepSpeed config -> the class that reads it."""


OLDER_DEFAULTS = {PIN_MEMORY: False}


def keys_of(deepspeed: Path) -> dict[tuple[str, str], str]:
    """Return class and key of each field of DeepSpeed's configs, with its default; nothing is imported."""
    result = {}
    others = [deepspeed / "runtime" / "precision_config.py", deepspeed / "compile" / "config.py"]
    for path in [*(deepspeed / "runtime" / "zero").glob("*config.py"), *(path for path in others if path.exists())]:
        for owner in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(owner, ast.ClassDef):
                continue
            for field in owner.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    named: dict[str | None, Any] = {k.arg: k.value for k in getattr(field.value, "keywords", [])}
                    key = named["alias"].value if "alias" in named else field.target.id
                    default = field.value
                    if isinstance(default, ast.Call) and default.args:
                        default = default.args[0]
                    result[owner.name, key] = "" if default is None else ast.unparse(default)
    return result


@pytest.mark.parametrize("deepspeed", [HERE, *ELSEWHERE], ids=lambda path: path.parents[3].name)
def test_a_version_has_the_key_of_every_knob(deepspeed: Path) -> None:
    installed, version = keys_of(deepspeed), version_of(deepspeed)
    for knob in (item for item in KNOBS if item.path[0] != MODEL and version >= numbers_of(item.since)):
        if knob.path[0] == BF16 and not (deepspeed / "runtime" / "precision_config.py").exists():
            assert f'BFLOAT16 = "{BF16}"' in (deepspeed / "runtime" / "constants.py").read_text(encoding="utf-8")
            continue  # an older version reads it without a class
        key = (CLASSES[knob.path[:-1]], knob.path[-1])
        assert key in installed, f"{knob.name} is {key}, which this version does not read"
        if knob.default is not None and knob.name != NVME and knob.kind not in ("modules", "section"):
            read = normalise(knob.name, knob.kind, eval(installed[key], {"pp_int": int, "ZeroStageEnum": ZeroStage}))
            assert read in (knob.default, OLDER_DEFAULTS.get(knob.name, knob.default)), f"{knob.name}: another default"


class ZeroStage:
    """DeepSpeed's enumeration of the stages, as far as it is a default."""

    disabled = 0


def version_of(deepspeed: Path) -> tuple[int, ...]:
    """Return the version of an installed package."""
    names = [path.name for path in deepspeed.parent.glob("deepspeed-*.dist-info")]
    return numbers_of(names[0].removeprefix("deepspeed-").removesuffix(".dist-info"))


def numbers_of(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.partition("+")[0].split("."))


def test_every_row_of_the_table_is_complete() -> None:
    for knob in KNOBS:
        assert all((knob.used_by, knob.where, knob.source)), knob.name
        assert (f"--allow {knob.permission}" in knob.where) == bool(knob.permission), knob.name
        assert set(knob.live) <= set(knob.stages), knob.name
        assert knob.default is None or knob.default in knob.choices or knob.kind in ("size", "ranks"), knob.name


def test_flags_are_read_as_deepspeed_reads_them_and_the_message_on_a_stage_names_the_stages() -> None:
    for value in (1, "yes", "True", "on"):
        assert normalise("overlap_comm", "flag", value) is True
    with pytest.raises(ConfigError, match="zero_stage is 'two'; it must be one of 0, 1, 2 and 3"):
        normalise("zero_stage", "stage", "two")
