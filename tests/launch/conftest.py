"""Launchers of plain and, shared by tests that are not about its start, forked launches; a machine with GPUs."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from optuna_dsat.launch.launcher import TorchrunLauncher, local_launcher
from optuna_dsat.launch.machine.devices import cpu_devices
from optuna_dsat.launch.machine.host import own_folder
from tests.harness.launches import DS_CONFIG, request, updates_until_finished
from tests.harness.nvml_machine import machine, nvml_libraries

from .test_torchrun import BASE_ENV

__all__ = ["machine", "nvml_libraries"]


@pytest.fixture(scope="session")
def notices() -> list[str]:
    return []


@pytest.fixture(scope="session")
def launch_tmp() -> Iterator[Path]:
    """Return the launches' folder for temporary files, with a name that is short enough for sockets."""
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of clean-up journals, which are those of this test and its child processes alone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return own_folder("launches")


@pytest.fixture
def cwd(tmp_path: Path) -> Path:
    """Return a folder with the user's config, whose micro-batch no trial has."""
    user_config = {**DS_CONFIG, "train_micro_batch_size_per_gpu": 2}
    (tmp_path / "user_config.json").write_text(json.dumps(user_config), encoding="utf-8")
    return tmp_path


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[TorchrunLauncher]:
    """Return a launcher whose launches are plain torchrun."""
    made = local_launcher(tmp_path / "out", devices=cpu_devices(2), base_env=BASE_ENV)
    yield made
    made.close()


@pytest.fixture(scope="session")
def warm_launcher(
    tmp_path_factory: pytest.TempPathFactory, notices: list[str], launch_tmp: Path
) -> Iterator[TorchrunLauncher]:
    """Return a launcher that has torch and DeepSpeed imported; one launch has trained already."""
    folder = tmp_path_factory.mktemp("warm")
    environment = {**BASE_ENV, "TMPDIR": str(launch_tmp)}
    made = local_launcher(folder, devices=cpu_devices(2), base_env=environment, warm=True, on_notice=notices.append)
    (folder / "user_config.json").write_text(json.dumps(DS_CONFIG), encoding="utf-8")
    made.start(request(folder, launch_id="warms", script="continued.py"))
    updates_until_finished(made)
    yield made
    made.close()
