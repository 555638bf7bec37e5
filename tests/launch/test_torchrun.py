"""Real launches through torchrun on the CPU, two ranks at most; the next is prepared while one ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from optuna_dsat.launch.launcher import TorchrunLauncher
from optuna_dsat.launch.machine.processes import find_marked, kill_leftovers
from optuna_dsat.launch.protocol import Finished, Settled, SlotsBusyError
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.agent.processes import ProcessKey
from optuna_dsat.runtime.events import EngineReady, RankFailed, RankFinished, StepMeasured
from tests.harness.launches import DS_CONFIG, STUB, events, reports, request, run, updates_until, updates_until_finished
from tests.harness.waits import wait_until

ROOT = Path(__file__).parents[2]
BASE_ENV = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR", str(ROOT / ".cache" / "torch_extensions")),
}

pytestmark = pytest.mark.torchrun


def assert_gone(pids: Sequence[int]) -> None:
    alive = [pid for pid in pids if ProcessKey.of(pid) is not None]
    assert alive == []


def own_processes(tuner_pid: int) -> list[int]:
    """Return the processes of all launches of a tuner."""
    return [process.key.pid for process in find_marked() if process.mark.split(":")[1] == str(tuner_pid)]


def test_a_launch_is_measured_and_leaves_its_directory(launcher: TorchrunLauncher, cwd: Path) -> None:
    launcher.start(request(cwd))
    assert launcher.free_slots == 0
    updates = updates_until_finished(launcher)
    report = reports(updates)["trial-0000"]
    assert report.outcome is Outcome.MEASURED, report
    assert report.exit_code in (0, None)  # torchrun was ended, or ended earlier
    assert report.devices == (0, 1)
    assert_gone(report.pids)
    assert len(report.pids) == 3
    assert {event.rank for event in events(updates, EngineReady)} == {0, 1}
    assert {event.observed_micro_batch for event in events(updates, StepMeasured)} == {4}
    assert {event.reason for event in events(updates, RankFinished)} == {"profile_done"}
    assert launcher.free_slots == 2
    directory = launcher.run_directory("trial-0000")
    assert json.loads(directory.report.read_text())["outcome"] == "measured"
    assert json.loads(directory.config.read_text()) == DS_CONFIG
    assert "training starts" in directory.stdout(0).read_text()
    assert "torch.distributed.run" in directory.command_text.read_text()


def test_one_rank_s_exception_ends_the_launch(warm_launcher: TorchrunLauncher, cwd: Path) -> None:
    before = own_processes(os.getpid())  # warm processes that other tests keep
    args = ("--end", "raise slowly", "--end-rank", "1", "--at", "3", "--step-s", "0.1", "--orphan")
    report, updates = run(warm_launcher, request(cwd, launch_id="raises", script=STUB, args=args, end_profile_step=900))
    assert report.outcome is Outcome.SCRIPT_ERROR, report
    assert "the script's own mistake" in report.message
    assert "ValueError: the script's own mistake" in report.error_excerpt
    failed = events(updates, RankFailed)[0]
    assert failed.rank == 1
    assert report.measured_s >= 1.0, "a step that fails counts"
    assert report.started_at + report.held_s >= failed.time
    assert_gone(report.pids)
    assert own_processes(os.getpid()) == before


def test_launches_side_by_side_do_not_clash_and_one_is_pruned_in_flight(
    warm_launcher: TorchrunLauncher, cwd: Path
) -> None:
    long = ("--step-s", "0.05")
    warm_launcher.start(request(cwd, launch_id="pruned", script=STUB, slots=1, args=long, end_profile_step=9000))
    warm_launcher.start(request(cwd, launch_id="measured", script=STUB, slots=1))
    updates = updates_until_finished(warm_launcher)
    updates += updates_until(warm_launcher, lambda seen: events([*updates, *seen], StepMeasured))
    warm_launcher.stop("pruned", message="cannot win")
    warm_launcher.stop("unknown")
    updates += updates_until_finished(warm_launcher)  # both may come at once
    told = {update.launch_id: update.report.message for update in updates if isinstance(update, Settled)}
    assert told["pruned"] == "cannot win"
    result = reports(updates)
    assert (result["pruned"].outcome, result["pruned"].message) == (Outcome.PRUNED, "cannot win")
    assert result["measured"].outcome is Outcome.MEASURED, result
    assert {report.devices for report in result.values()} == {(0,), (1,)}
    assert_gone([*result["pruned"].pids, *result["measured"].pids])


TUNER = """
import sys, time
from pathlib import Path
from tests.harness.launches import request
from optuna_dsat.launch.machine.devices import cpu_devices
from optuna_dsat.launch.{module} import {name}
{body}
"""
FOLLOW = """
from optuna_dsat.runtime.events import RankStarted, StepMeasured
launcher = local_launcher(Path({cwd!r}) / "out", devices=cpu_devices(2))
asked = request(Path({cwd!r}), script="{stub}", args=("--step-s", "0.05", "--orphan"), end_profile_step=900)
launcher.start(asked)
while True:
    for update in launcher.poll(1.0):
        if isinstance(getattr(update, "event", None), StepMeasured):
            print("running", flush=True)
"""
FULL = """
args = ("--steps", "3", "--end", {end!r}, "--at", "2")
full = request(Path({cwd!r}), script={script!r}, purpose="full", args=args)
sys.exit(run_full(full, devices=cpu_devices(2)))
"""


def tuner(cwd: Path, name: str, body: str) -> list[str]:
    code = TUNER.format(module="full_run" if name == "run_full" else "launcher", name=name, body=body)
    (cwd / "tuner.py").write_text(code, encoding="utf-8")
    return [sys.executable, str(cwd / "tuner.py")]


def test_a_tuner_that_is_killed_takes_its_launch_along(cwd: Path) -> None:
    environ = {**BASE_ENV, "PYTHONPATH": str(ROOT)}
    command = tuner(cwd, "local_launcher", FOLLOW.format(cwd=str(cwd), stub=STUB))
    process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True, cwd=cwd)
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    own = own_processes(process.pid)
    paths = (cwd / "out/trial-0000/events").glob("rank*.jsonl")
    ranks = [json.loads(path.read_text(encoding="utf-8").splitlines()[0])["pid"] for path in paths]
    assert set(ranks) < set(own)
    process.kill()
    process.wait()
    process.stdout.close()
    wait_until(lambda: not any(map(ProcessKey.of, ranks)), what="the ranks are gone")
    kill_leftovers()  # the orphans started by the script
    assert_gone(own)
    assert own_processes(process.pid) == []


def test_a_full_run_is_on_the_terminal_and_passes_its_exit_code_on(cwd: Path) -> None:
    environ = {**BASE_ENV, "PYTHONPATH": str(ROOT)}
    command = tuner(cwd, "run_full", FULL.format(cwd=str(cwd), script=STUB, end="exit"))
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, cwd=cwd)
    assert done.returncode == 7, done.stderr
    assert "training starts" in done.stdout
    assert not (cwd / "out").exists()


def settled(launcher: TorchrunLauncher) -> Settled:
    updates = updates_until(launcher, lambda seen: any(isinstance(update, Settled | Finished) for update in seen))
    result = [update for update in updates if isinstance(update, Settled)]
    assert result, "told before its processes are gone"
    return result[0]


def test_a_launch_follows_one_that_is_settled_and_a_waiting_one_can_be_stopped(
    warm_launcher: TorchrunLauncher, cwd: Path
) -> None:
    launcher = warm_launcher
    launcher.start(request(cwd, launch_id="first", script=STUB, args=("--exit-with", str(cwd / "exit"))))
    with pytest.raises(SlotsBusyError):
        launcher.start(request(cwd, launch_id="too-early", script=STUB))
    assert settled(launcher).report.outcome is Outcome.MEASURED
    assert launcher.free_slots == 2
    launcher.start(request(cwd, launch_id="stopped", script=STUB))
    assert launcher.holders()[0].own
    launcher.stop("stopped", message="not any more")
    assert not launcher.waiting
    launcher.start(request(cwd, launch_id="second", script=STUB))
    assert launcher.free_slots == 0
    assert tuple(launcher.waiting) == ("second",)
    assert launcher.run_directory("second").config.exists()
    with pytest.raises(SlotsBusyError):
        launcher.start(request(cwd, launch_id="third", script=STUB))
    (cwd / "exit").touch()
    ended = reports(updates_until_finished(launcher, 3))
    assert {name: report.outcome for name, report in ended.items()} == {
        "first": "measured",
        "stopped": "pruned",
        "second": "measured",
    }
    assert ended["stopped"].message == "not any more"
    gone = ended["first"].started_at + ended["first"].startup_s + ended["first"].measured_s
    assert ended["second"].started_at >= gone, "never side by side"


def test_a_launch_without_memory_is_settled_before_its_processes_are_gone(
    warm_launcher: TorchrunLauncher, cwd: Path
) -> None:
    name = f"{cwd.name}-full"
    warm_launcher.start(request(cwd, launch_id=name, args=("--batch", "4000000"), device_memory_bytes=150 * 2**20))
    assert settled(warm_launcher).report.outcome is Outcome.OUT_OF_MEMORY
    assert reports(updates_until_finished(warm_launcher))[name].outcome is Outcome.OUT_OF_MEMORY
