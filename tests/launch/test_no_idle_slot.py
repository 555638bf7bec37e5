"""The next launch is prepared while the previous launch ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from optuna_dsat.launch.launcher import TorchrunLauncher, local_launcher
from optuna_dsat.launch.machine.devices import cpu_devices
from optuna_dsat.launch.protocol import Finished, LaunchUpdate, Settled, SlotsBusyError
from optuna_dsat.outcome import Outcome
from tests.harness.launches import DS_CONFIG, STUB, reports, request, updates_until_finished

from .test_torchrun import BASE_ENV, until

pytestmark = pytest.mark.torchrun


@pytest.fixture
def cwd(tmp_path: Path) -> Path:
    (tmp_path / "user_config.json").write_text(json.dumps(DS_CONFIG), encoding="utf-8")
    return tmp_path


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[TorchrunLauncher]:
    made = local_launcher(tmp_path / "out", devices=cpu_devices(2), base_env=BASE_ENV)
    yield made
    made.close()


def settled(launcher: TorchrunLauncher) -> Settled:
    updates = until(launcher, lambda seen: any(isinstance(update, Settled | Finished) for update in seen))
    result = [update for update in updates if isinstance(update, Settled)]
    assert result, "told before its processes are gone"
    return result[0]


def test_a_launch_follows_one_that_is_settled(launcher: TorchrunLauncher, cwd: Path) -> None:
    launcher.start(request(cwd, launch_id="first", script=STUB))
    with pytest.raises(SlotsBusyError):
        launcher.start(request(cwd, launch_id="too-early", script=STUB))
    assert settled(launcher).report.outcome is Outcome.MEASURED
    assert launcher.free_slots == 2
    launcher.start(request(cwd, launch_id="second", script=STUB))
    assert launcher.free_slots == 0
    assert tuple(launcher.waiting) == ("second",)
    assert launcher.run_directory("second").config.exists()
    with pytest.raises(SlotsBusyError):
        launcher.start(request(cwd, launch_id="third", script=STUB))
    ended = reports(updates_until_finished(launcher, 2))
    assert {name: report.outcome for name, report in ended.items()} == dict.fromkeys(("first", "second"), "measured")
    gone = ended["first"].started_at + ended["first"].startup_s + ended["first"].measured_s
    assert ended["second"].started_at >= gone, "never side by side"


def test_a_waiting_launch_can_be_stopped(launcher: TorchrunLauncher, cwd: Path) -> None:
    launcher.start(request(cwd, launch_id="first", script=STUB))
    settled(launcher)
    launcher.start(request(cwd, launch_id="second", script=STUB))
    assert launcher.holders()[0].own
    launcher.stop("second", message="not any more")
    assert not launcher.waiting
    updates: list[LaunchUpdate] = updates_until_finished(launcher, 2)
    assert (reports(updates)["second"].outcome, reports(updates)["second"].message) == (
        Outcome.PRUNED,
        "not any more",
    )
    assert launcher.free_slots == 2


def test_a_stopped_launch_is_settled_at_once(launcher: TorchrunLauncher, cwd: Path) -> None:
    launcher.start(request(cwd, launch_id="first", script=STUB, args=("--end", "sleep")))
    launcher.poll(0.1)
    launcher.stop("first", message="enough")
    updates = updates_until_finished(launcher)  # both may come at once
    assert [update.report.message for update in updates if isinstance(update, Settled)] == ["enough"]
    assert reports(updates)["first"].outcome is Outcome.PRUNED


def test_a_launch_without_memory_is_settled_before_its_processes_are_gone(
    launcher: TorchrunLauncher, cwd: Path
) -> None:
    launcher.start(request(cwd, launch_id="first", device_memory_bytes=150 * 2**20, args=("--batch", "4000000")))
    assert settled(launcher).report.outcome is Outcome.OUT_OF_MEMORY
    launcher.start(request(cwd, launch_id="second", script=STUB))
    ended = reports(updates_until_finished(launcher, 2))
    assert [ended[name].outcome for name in ("first", "second")] == [Outcome.OUT_OF_MEMORY, Outcome.MEASURED]
