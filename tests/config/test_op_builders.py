from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from optuna_dsat.config.op_builders import operators_at_start, operators_of
from optuna_dsat.config.space_builder import SpaceRequest, build_space
from optuna_dsat.launch.agent.command import device_environment
from optuna_dsat.launch.machine import operators
from optuna_dsat.launch.machine.operators import compile_operators, remove_stale_locks
from tests.harness.waits import assert_within, ended, wait_until


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
        (None, (3,), {"nvme_path": "/nvme"}, ("AsyncIOBuilder",)),
        ({"type": "Adam", "params": {"torch_adam": True}}, (2, 3), {"nvme_path": "/nvme"}, ("AsyncIOBuilder",)),
        ({"type": "Adam", "params": {"torch_adam": True}}, (1, 2), {"nvme_path": "/nvme"}, ()),
        (None, (3,), {"nvme_path": "/nvme", "no_tune": ("offload_optimizer", "offload_param")}, ()),
        # The optimizer that was measured with: the script's own leaves the config's unused.
        ({"type": "AdamW"}, (1, 2), {"measured_with": "FusedAdam"}, ("CPUAdamBuilder", "FusedAdamBuilder")),
        ({"type": "AdamW"}, (1, 2), {"measured_with": "DeepSpeedCPUAdam"}, ("CPUAdamBuilder", "FusedAdamBuilder")),
        ({"type": "AdamW"}, (1, 2), {"measured_with": "AdamW"}, ()),
        # accelerate puts DeepSpeed's on the host, Adam by default.
        (None, (1, 2), {"replaced": "AdamW"}, ("CPUAdamBuilder",)),
        (None, (1, 2), {"replaced": "SGD"}, ("CPUAdamBuilder",)),
        (None, (1, 2), {"replaced": "Adagrad"}, ("CPUAdagradBuilder",)),
        (None, (0,), {"replaced": "AdamW"}, ()),
        (None, (1, 2), {"replaced": "AdamW", "config": {"zero_force_ds_cpu_optimizer": False}}, ()),
    ],
)
def test_operators_are_those_of_the_optimizer_that_is_used_where_it_may_lie(
    optimizer: dict[str, Any] | None, stages: tuple[int, ...], changes: dict[str, Any], expected: tuple[str, ...]
) -> None:
    changes = dict(changes)
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, **changes.pop("config", {})}
    if optimizer is not None:
        config["optimizer"] = optimizer
    replaced = changes.pop("replaced", "")
    measured_with = changes.pop("measured_with", replaced)
    space = build_space(SpaceRequest(ds_config=config, zero_stages=stages, **changes))
    assert operators_of(config, space, measured_with=measured_with, replaced_on_host=bool(replaced)) == expected


@pytest.mark.parametrize(
    ("zero", "params", "device", "expected"),
    [
        ({"stage": 2}, {}, "cuda", ("FusedAdamBuilder",)),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, {}, "cuda", ("CPUAdamBuilder",)),
        ({"stage": 3, "offload_optimizer": {"device": "nvme"}}, {}, "cuda", ("AsyncIOBuilder", "CPUAdamBuilder")),
        ({"stage": "auto"}, {}, "cuda", ("FusedAdamBuilder",)),
        ({"stage": "auto", "offload_optimizer": {"device": "cpu"}}, {}, "cuda", ("CPUAdamBuilder",)),
        ({"stage": 2}, {"torch_adam": True}, "cuda", ()),
        ({"stage": 2}, {"torch_adam": True}, "cpu", ("ShareMemCommBuilder",)),
        ({"stage": 3, "offload_param": {"device": "nvme"}}, {"torch_adam": True}, "cuda", ("AsyncIOBuilder",)),
        ({"stage": 2, "offload_optimizer": {"device": "nvme"}}, {"torch_adam": True}, "cuda", ()),
    ],
)
def test_before_the_profile_it_is_what_the_own_config_needs(
    zero: dict[str, Any], params: dict[str, Any], device: str, expected: tuple[str, ...]
) -> None:
    config = {"zero_optimization": zero, "optimizer": {"type": "AdamW", "params": params}}
    assert operators_at_start(config, device=device) == expected
    searched = operators_at_start(config, device=device, to_nvme=True)
    assert set(searched) == {*expected, "AsyncIOBuilder"}, "a search of NVMe needs its operator, too"


def without_success(folder: Path) -> dict[str, str]:
    """Return an environment whose ninja builds nothing, and an empty folder of compiled operators."""
    ninja = folder / "ninja"
    ninja.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\nexit 1\n')
    ninja.chmod(0o755)
    changes = {"PATH": f"{folder}:/usr/bin:/bin", "TORCH_EXTENSIONS_DIR": str(folder)}
    return device_environment(os.environ, kind="cpu", python=sys.executable) | changes


def test_what_cannot_be_compiled_is_said_and_a_lock_of_a_build_that_was_killed_is_not_waited_for(
    tmp_path: Path,
) -> None:
    environ = without_success(tmp_path)
    lock = tmp_path / "deepspeed_shm_comm" / "lock"  # as plain torch leaves it, a moment old and empty
    lock.parent.mkdir()
    lock.touch()
    began = time.monotonic()
    phases: list[str] = []
    failed = compile_operators(
        ["ShareMemCommBuilder", "FusedLambBuilder"], environ, on_phase=phases.append, python=sys.executable
    )
    assert phases[:2] == [
        "preparing DeepSpeed's operators", "building deepspeed_shm_comm (first use only, may take minutes)",
    ]  # fmt: skip
    assert phases[-1] == ""
    assert list(failed) == ["ShareMemCommBuilder"]
    assert "Error building extension" in failed["ShareMemCommBuilder"]
    assert_within(time.monotonic() - began, 60.0)
    assert not lock.exists()


def test_a_build_that_is_cut_short_leaves_neither_its_processes_nor_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    ninja = tools / "ninja"
    ninja.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho $$ > "$TORCH_EXTENSIONS_DIR/pid"\nexec sleep 600\n'
    )
    ninja.chmod(0o755)
    compiler = f"{tools}:/usr/bin:/bin"
    environ = device_environment(os.environ, kind="cpu", python=sys.executable) | {
        "PATH": compiler,
        "TORCH_EXTENSIONS_DIR": str(tmp_path),
    }
    monkeypatch.setattr(operators, "_LOCKS_S", 0.2)

    def one_look(*_: Any, **__: Any) -> None:
        if (tmp_path / "pid").exists():
            assert (tmp_path / "deepspeed_shm_comm" / "lock").read_text().startswith(platform.node())
            monkeypatch.setattr(operators, "remove_stale_locks", remove_stale_locks)
            raise KeyboardInterrupt

    monkeypatch.setattr(operators, "remove_stale_locks", one_look)
    with pytest.raises(KeyboardInterrupt):
        compile_operators(["ShareMemCommBuilder"], environ, python=sys.executable)
    assert not (tmp_path / "deepspeed_shm_comm" / "lock").exists()
    compiler_pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: ended(compiler_pid), what="the compiler has ended")
