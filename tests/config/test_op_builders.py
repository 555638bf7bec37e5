from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from optuna_dsat.config.op_builders import operators_of
from optuna_dsat.config.space_builder import SpaceRequest, build_space
from optuna_dsat.launch.command import device_environment
from optuna_dsat.launch.operators import compile_operators


@pytest.mark.parametrize(
    ("optimizer", "stages", "changes", "expected"),
    [
        ({"type": "AdamW"}, (1, 2), {}, ("CPUAdamBuilder", "FusedAdamBuilder")),
        ({"type": "Adam", "params": {"torch_adam": True}}, (1, 2), {}, ()),
        ({"type": "AdamW"}, (0,), {}, ("FusedAdamBuilder",)),
        ({"type": "AdamW"}, (2,), {"fix": {"offload_optimizer": "cpu"}}, ("CPUAdamBuilder",)),
        ({"type": "SGD"}, (1, 2), {}, ()),
        ({"type": "Lion"}, (3,), {"nvme_path": "/nvme"}, ("AsyncIOBuilder", "CPULionBuilder", "FusedLionBuilder")),
        (None, (1, 2), {}, ()),
    ],
)
def test_operators_are_those_of_the_optimizer_where_it_may_lie(
    optimizer: dict[str, Any] | None, stages: tuple[int, ...], changes: dict[str, Any], expected: tuple[str, ...]
) -> None:
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1}
    if optimizer is not None:
        config["optimizer"] = optimizer
    space = build_space(SpaceRequest(ds_config=config, zero_stages=stages, **changes))
    assert operators_of(config, space) == expected


def test_what_cannot_be_compiled_is_said(tmp_path: Path) -> None:
    """Without a compiler on the path, and an empty folder of compiled operators."""
    environ = device_environment(os.environ, kind="cpu") | {"PATH": "/nowhere", "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    failed = compile_operators(["ShareMemCommBuilder", "FusedLambBuilder"], environ)
    assert list(failed) == ["ShareMemCommBuilder"]
    assert "ninja" in failed["ShareMemCommBuilder"].lower()
