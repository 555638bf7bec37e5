"""Every installed version of DeepSpeed has the keys of every knob, with the defaults that the search assumes."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from optuna_dsat.config.ds_config import ZERO
from optuna_dsat.config.knobs import KNOBS, OFFLOAD_OPTIMIZER, OFFLOAD_PARAM
from optuna_dsat.script.interpreter import module_places
from tests.harness.commands import ROOT

HERE = Path(module_places("deepspeed")[0])
ELSEWHERE = sorted((ROOT / ".cache" / "environments").glob("deepspeed-*/lib/python3*/site-packages/deepspeed"))
CLASSES = {
    (ZERO,): "DeepSpeedZeroConfig",
    (ZERO, OFFLOAD_OPTIMIZER): "DeepSpeedZeroOffloadOptimizerConfig",
    (ZERO, OFFLOAD_PARAM): "DeepSpeedZeroOffloadParamConfig",
}
"""Section of a DeepSpeed config -> the class that reads it."""


def keys_of(deepspeed: Path) -> dict[tuple[str, str], str]:
    """Return class and key of each field of DeepSpeed's ZeRO configs, with its default; nothing is imported."""
    result = {}
    for path in (deepspeed / "runtime" / "zero").glob("*config.py"):
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
    installed, newest = keys_of(deepspeed), keys_of(HERE)
    for knob in (item for item in KNOBS if not item.is_of_model):
        key = (CLASSES[knob.path[:-1]], knob.path[-1])
        assert key in installed, f"{knob.name} is {key}, which this version does not read"
        assert installed[key] == newest[key], f"{knob.name} has another default"
