"""Helpers shared by the tests of launches."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optuna_dsat.launch.agent.run import MachineLaunch
from optuna_dsat.launch.launch import Launch
from optuna_dsat.launch.machine.devices import cpu_devices
from optuna_dsat.launch.machine.slots import SlotPool
from optuna_dsat.launch.machine.tree import AgentHandle
from optuna_dsat.launch.protocol import (
    Finished,
    Launcher,
    LaunchReport,
    LaunchRequest,
    LaunchUpdate,
    Observed,
    ScriptCommand,
)
from optuna_dsat.launch.run_directory import RunDirectory
from optuna_dsat.runtime.agent.preload import Preload
from tests.harness.waits import HANG_S

if TYPE_CHECKING:
    import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
STUB = "stub_engine.py"
LIGHT = Preload(modules=("torch.distributed.run",))
"""All that launches of the stub engine need before a fork: without it each agent imports it, in two seconds."""
DS_CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 0},
}


def request(
    cwd: Path,
    *,
    launch_id: str = "trial-0000",
    script: str = "tiny_launch.py",
    args: Sequence[str] = (),
    slots: int = 2,
    **changes: Any,
) -> LaunchRequest:
    """Return a launch request for a script in ``tests/scripts``; ``STUB`` needs neither torch nor DeepSpeed."""
    config_path = cwd / "user_config.json"
    fields: dict[str, Any] = {
        "launch_id": launch_id,
        "purpose": "trial",
        "command": ScriptCommand(
            script=str(SCRIPTS / script),
            args=(str(config_path), *args),
            cwd=str(cwd),
            config_path=str(config_path),
        ),
        "ds_config": DS_CONFIG,
        "overlay": {"train_micro_batch_size_per_gpu": 4},
        "slots": slots,
        "start_profile_step": 2,
        "end_profile_step": 3,
    }
    return LaunchRequest(**{**fields, **changes})


def followed(
    folder: Path,
    agent: AgentHandle,
    mark: str,
    *,
    pool: SlotPool | None = None,
    leavings: Path | None = None,
    started: float = 0.0,
    started_unix: float = 0.0,
    **changes: Any,
) -> Launch:
    """Return a launch of one rank whose torchrun is a process that runs already."""
    pool = SlotPool(cpu_devices(1)) if pool is None else pool
    asked, lease = request(folder, slots=1, **changes), pool.take(1)
    directory = replace(RunDirectory.create(folder, asked.launch_id), leavings=leavings)
    processes = MachineLaunch(asked, directory, agent, lease=lease, pool=pool, mark=mark)
    return Launch(
        request=asked,
        directory=directory,
        processes=processes,
        devices=lease.indices,
        command=(),
        started=started,
        started_unix=started_unix,
    )


class AheadClock:
    """The clock of launchers, which a test sets ahead where it would wait for a time limit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead_s = 0.0
        monkeypatch.setattr("optuna_dsat.launch.launcher.time", self)

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


def processes_of(launch: Launch | None) -> MachineLaunch:
    """Return the processes of a launch on this machine."""
    assert isinstance(launch, Launch)
    assert isinstance(launch.processes, MachineLaunch)
    return launch.processes


def updates_until(launcher: Launcher, found: Callable[[list[LaunchUpdate]], object]) -> list[LaunchUpdate]:
    updates: list[LaunchUpdate] = []
    deadline = time.monotonic() + HANG_S
    while not found(updates):
        if time.monotonic() > deadline:
            raise TimeoutError(f"Not within {HANG_S:g} s: {updates}")
        updates += launcher.poll(1.0)
    return updates


def updates_until_finished(launcher: Launcher, count: int = 1) -> list[LaunchUpdate]:
    return updates_until(launcher, lambda seen: sum(isinstance(each, Finished) for each in seen) >= count)


def reports(updates: Sequence[LaunchUpdate]) -> dict[str, LaunchReport]:
    return {update.launch_id: update.report for update in updates if isinstance(update, Finished)}


def run(launcher: Launcher, asked: LaunchRequest) -> tuple[LaunchReport, list[LaunchUpdate]]:
    launcher.start(asked)
    updates = updates_until_finished(launcher)
    return reports(updates)[asked.launch_id], updates


def events(updates: Sequence[LaunchUpdate], kind: type) -> list[Any]:
    return [u.event for u in updates if isinstance(u, Observed) and isinstance(u.event, kind)]


PYTHON = sys.executable
