"""A launcher starts its helpers with its first launch; without launches, nothing is started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from optuna_dsat.launch.launcher import TorchrunLauncher, local_launcher
from optuna_dsat.launch.machine.devices import cpu_devices
from optuna_dsat.launch.places import here
from optuna_dsat.launch.protocol import LaunchRequest, ScriptCommand
from optuna_dsat.runtime.agent.preload import Preload


def test_operators_are_built_with_the_first_launch_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[object] = []

    def build(names: Sequence[str], _environ: Mapping[str, str], **_: object) -> dict[str, str]:
        order.append(tuple(names))
        return {}

    monkeypatch.setattr(here, "compile_operators", build)
    monkeypatch.setattr(TorchrunLauncher, "_begin", lambda _self, waiting: order.append(waiting.request.launch_id))
    launcher = local_launcher(tmp_path / "out", devices=cpu_devices(2))
    try:
        launcher.prepare(Preload(), operators=("CPUAdamBuilder",))
        assert order == []
        for name in ("first", "second"):
            launcher.start(_request(name, tmp_path))
        assert order == [("CPUAdamBuilder",), "first", "second"]
    finally:
        launcher.close()


def _request(name: str, folder: Path) -> LaunchRequest:
    command = ScriptCommand(script=str(folder / "train.py"), args=(), cwd=str(folder), config_path="")
    return LaunchRequest(launch_id=name, purpose="trial", command=command, ds_config={}, overlay={}, slots=1)
