"""Launches that offload to NVMe train as without offload, and leave nothing but the user's files in the folder."""

from __future__ import annotations

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from optuna_dsat.config import ds_config
from optuna_dsat.config.space_builder import SpaceRequest, build_space
from optuna_dsat.launch.agent.command import device_environment, write_run_directory
from optuna_dsat.launch.launcher import TorchrunLauncher
from optuna_dsat.launch.machine import nvme
from optuna_dsat.launch.machine.journal import TunerNotes, remove_leftovers, remove_noted
from optuna_dsat.launch.machine.operators import compile_operators
from optuna_dsat.launch.protocol import LaunchRequest
from optuna_dsat.launch.run_directory import OutputError
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.agent.operators import ASYNC_IO, is_built
from optuna_dsat.runtime.events import StepMeasured
from tests.harness.launches import STUB, events, request, run, updates_until, updates_until_finished
from tests.launch.test_torchrun import BASE_ENV

WIDTH = 1024
"""As in ``tests/scripts/swapped.py``."""
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 1_000_000},
    "steps_per_print": 10**6,
}
OFFLOADS = ("offload_optimizer", "offload_param")


@pytest.fixture(scope="module")
def async_io() -> None:
    """Skip without DeepSpeed's operator, which takes a compiler minutes: ``make test-nvme`` builds it."""
    environ = device_environment(BASE_ENV, kind="cpu", python=sys.executable)
    if is_built(ASYNC_IO, environ):
        return
    if "OPTUNA_DSAT_BUILD" not in os.environ:
        pytest.skip("async_io is not built: make test-nvme")
    if why := compile_operators([ASYNC_IO], environ, python=sys.executable):
        pytest.skip(f"async_io cannot be built: {why[ASYNC_IO]}")


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    """Return a user's folder with a file."""
    folder = tmp_path / "drive"
    folder.mkdir()
    (folder / "mine").write_text("not the tuner's", encoding="utf-8")
    return folder


def on_nvme(drive: Path, *, config: Mapping[str, Any] = CONFIG, **devices: str) -> dict[str, Any]:
    """Return the overlay of a search for ZeRO 3 with these devices of its offloads."""
    space = build_space(
        SpaceRequest(
            ds_config=config,
            zero_stages=(3,),
            fix={"offload_optimizer": "none", "offload_param": "none", **devices},
            nvme_path=str(drive),
            device="cpu",
            params=8 * WIDTH * (WIDTH + 1),
            largest_layer=WIDTH * (WIDTH + 1),
            ranks_per_node=2,
        )
    )
    return space.overlay({**space.completed({"zero_stage": 3}), ds_config.MICRO_BATCH: 4})


def swapped(cwd: Path, overlay: Mapping[str, Any], **changes: Any) -> LaunchRequest:
    """Return a launch of the training script."""
    (cwd / "user_config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    config = ds_config.merge(CONFIG, overlay)
    given = {"script": "swapped.py", "ds_config": config, "overlay": overlay, "start_profile_step": 1}
    return request(cwd, **{**given, "end_profile_step": 4, **changes})


@pytest.mark.torchrun
@pytest.mark.usefixtures("async_io")
def test_states_on_nvme_train_alike_and_are_removed(
    warm_launcher: TorchrunLauncher, tmp_path: Path, drive: Path
) -> None:
    losses, printed = {}, {}
    for name, offloads in (("none", ()), ("both", OFFLOADS)):
        devices: dict[str, Any] = dict.fromkeys(offloads, "nvme")
        report, updates = run(warm_launcher, swapped(tmp_path, on_nvme(drive, **devices), launch_id=name))
        assert report.outcome is Outcome.MEASURED, report
        losses[name] = [event.loss for event in events(updates, StepMeasured) if event.rank == 0]
        printed[name] = warm_launcher.run_directory(name).stdout(0).read_text(encoding="utf-8").splitlines()[-1]
        assert [path.name for path in drive.iterdir()] == ["mine"]
    assert len(set(losses["none"])) == 4
    assert losses["both"] == losses["none"]
    assert printed["none"].endswith("files []")
    folders, files = (ast.literal_eval(part) for part in printed["both"].removeprefix("folders ").split(" files "))
    (folder,) = map(Path, folders)
    assert folder.parent == drive
    assert sum(name.startswith("exp_avg") for name in files) >= 2, files
    assert any("_param.tensor" in file for file in files), files


@pytest.mark.torchrun
@pytest.mark.usefixtures("async_io")
def test_a_launch_that_is_ended_leaves_nothing_on_nvme(
    warm_launcher: TorchrunLauncher, tmp_path: Path, drive: Path
) -> None:
    overlay = on_nvme(drive, offload_optimizer="nvme")
    warm_launcher.start(swapped(tmp_path, overlay, launch_id="ended", args=("--step-s", "0.2"), end_profile_step=90))
    updates_until(warm_launcher, lambda seen: events(seen, StepMeasured))
    (folder,) = (path for path in drive.iterdir() if path.is_dir())
    files = [path.name for path in folder.rglob("*.swp")]
    assert sum(name.startswith("exp_avg") for name in files) >= 2, files
    assert not any("_param.tensor" in name for name in files), files
    warm_launcher.stop("ended")
    updates_until_finished(warm_launcher)
    assert [path.name for path in drive.iterdir()] == ["mine"]


def test_each_launch_has_a_folder_and_full_runs_the_users(tmp_path: Path, drive: Path) -> None:
    overlay = on_nvme(drive, offload_optimizer="nvme", offload_param="nvme")
    journal = tmp_path / "journal"
    folders: list[str] = []
    for name in ("trial-0000", "trial-0001"):
        asked = swapped(tmp_path, overlay, launch_id=name, isolation="auto")
        directory = write_run_directory(asked, tmp_path / "out", leavings=journal)
        config, plan = (json.loads(path.read_text()) for path in (directory.config, directory.launch))
        for written in (config["zero_optimization"], plan["overlay"]["zero_optimization"]):
            paths = {written[key]["nvme_path"] for key in OFFLOADS}
            assert len(paths) == 1
        folders.append(*paths)
        assert folders[-1] in plan["world"]["passed"]
        assert str(drive) not in plan["world"]["passed"]
        assert asked.ds_config["zero_optimization"]["offload_param"]["nvme_path"] == str(drive)
    assert len(set(folders)) == 2
    assert [json.loads(line) for line in journal.read_text().splitlines() if "drive" in line] == folders
    full = write_run_directory(
        swapped(tmp_path, overlay, launch_id="full", purpose="full"), tmp_path / "out", leavings=journal
    )
    assert json.loads(full.config.read_text())["zero_optimization"]["offload_param"]["nvme_path"] == str(drive)
    assert len(list(drive.iterdir())) == 3


def test_the_users_config_keeps_its_own_folder_and_settings(tmp_path: Path, drive: Path) -> None:
    own = {"device": "nvme", "nvme_path": str(drive / "own"), "buffer_count": 7, "buffer_size": 123, "max_in_cpu": 9}
    config = ds_config.merge(CONFIG, {"zero_optimization": {"offload_param": own}})
    overlay = on_nvme(tmp_path, config=config, offload_param="nvme")
    assert ds_config.merge(config, overlay)["zero_optimization"]["offload_param"] == own
    asked = swapped(tmp_path, {}, ds_config=config)  # the baseline: its overlay does not name the folder
    directory = write_run_directory(asked, tmp_path / "out", leavings=tmp_path / "journal")
    written = json.loads(directory.launch.read_text())["overlay"]["zero_optimization"]["offload_param"]
    assert Path(written["nvme_path"]).parent == drive / "own"
    assert written.keys() == {"nvme_path"}
    remove_noted(tmp_path / "journal")
    assert [path.name for path in drive.iterdir()] == ["mine"]  # without the parents made for the folder


KILLED = """
import sys, time
from pathlib import Path
from optuna_dsat.launch.machine.journal import TunerNotes
from tests.launch.test_nvme import on_nvme, swapped, write_run_directory
here, drive = map(Path, sys.argv[1:])
record = TunerNotes(here).begin()
write_run_directory(swapped(here, on_nvme(drive, offload_optimizer="nvme")), here / "out", leavings=record)
for folder in drive.iterdir():
    if folder.is_dir():
        (folder / "exp_avg-0.tensor.swp").touch()
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.usefixtures("notes")
def test_what_a_killed_tuner_left_on_nvme_is_removed(tmp_path: Path, drive: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(drive)]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as tuner:
        assert tuner.stdout is not None
        assert tuner.stdout.readline() == "ready\n"
        assert len(list(drive.rglob("*.swp"))) == 1
        tuner.send_signal(signal.SIGKILL)
    remove_leftovers({"TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")})
    assert [path.name for path in drive.iterdir()] == ["mine"]


def test_a_launch_that_never_started_leaves_nothing_on_nvme(tmp_path: Path, drive: Path) -> None:
    journal = TunerNotes(tmp_path)
    asked = swapped(tmp_path, on_nvme(drive, offload_param="nvme"))
    write_run_directory(asked, tmp_path / "out", leavings=journal.begin())
    assert len(list(drive.iterdir())) == 2
    journal.close()
    assert [path.name for path in drive.iterdir()] == ["mine"]


def test_a_launch_without_room_is_refused(
    launcher: TorchrunLauncher, tmp_path: Path, drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = shutil.disk_usage(drive).free
    asked = swapped(tmp_path, on_nvme(drive, offload_optimizer="nvme"), script=STUB, swap_bytes=free * 2)
    with pytest.raises(OutputError, match=r"writes .* to .*drive, which has .* free\. Make room there"):
        launcher.start(asked)
    assert [path.name for path in drive.iterdir()] == ["mine"]
    monkeypatch.setattr(nvme, "lockable_bytes", lambda: 65536)
    with pytest.raises(OutputError, match=r"page-locks 1 MiB of memory in each rank, and 65536 bytes are allowed"):
        nvme.check_room(drive, swap_bytes=0, locked_bytes=2**20)
    nvme.check_room(drive / "not" / "made", swap_bytes=1, locked_bytes=65536)
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot write to"):
        launcher.start(swapped(tmp_path, on_nvme(tmp_path / "file", offload_optimizer="nvme"), script=STUB))
