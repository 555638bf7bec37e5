"""Launches forked from a warm process, on the CPU: indistinguishable from plain launches and from each other."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from optuna_dsat.launch.launcher import TorchrunLauncher, local_launcher
from optuna_dsat.launch.machine.devices import cpu_devices
from optuna_dsat.launch.protocol import LaunchReport, LaunchRequest, ScriptCommand
from optuna_dsat.launch.warm.forking import Forking
from optuna_dsat.launch.warm.server import WarmUnavailableError
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.adapt.journal import SHARED_MEMORY
from optuna_dsat.runtime.agent.preload import Preload
from optuna_dsat.runtime.agent.processes import ProcessKey
from optuna_dsat.runtime.events import ModulesImported, RankStarted, StepMeasured
from tests.harness.launches import (
    DS_CONFIG,
    LIGHT,
    SCRIPTS,
    STUB,
    events,
    reports,
    request,
    run,
    updates_until,
    updates_until_finished,
)
from tests.harness.waits import wait_until

from .test_torchrun import BASE_ENV, assert_gone

pytestmark = pytest.mark.torchrun

STATE = SCRIPTS / "state.py"
DRAWN = {"random", "torch_seed"}
MAY_DIFFER = {*DRAWN, "sockets"}


def state_request(folder: Path, launch_id: str, *more: str) -> LaunchRequest:
    config = folder / "user_config.json"
    return request(
        folder,
        launch_id=launch_id,
        command=ScriptCommand(
            script=str(STATE),
            args=(str(config), str(folder / launch_id), *more),
            cwd=str(folder),
            config_path=str(config),
        ),
    )


def states(folder: Path, launch_id: str) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{launch_id}.{rank}").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("warm")
    (made / "user_config.json").write_text(json.dumps({**DS_CONFIG, "train_micro_batch_size_per_gpu": 2}))
    return made


@pytest.fixture
def plain(folder: Path, launch_tmp: Path) -> Iterator[TorchrunLauncher]:
    environment = {**BASE_ENV, "TMPDIR": str(launch_tmp)}
    made = local_launcher(folder / "plain", devices=cpu_devices(2), base_env=environment)
    yield made
    made.close()


def test_a_forked_rank_finds_what_a_started_one_does(
    warm_launcher: TorchrunLauncher, plain: TorchrunLauncher, folder: Path
) -> None:
    report, updates = run(warm_launcher, state_request(folder, "first"))
    assert report.outcome is Outcome.MEASURED, report
    assert [event.forked for event in events(updates, RankStarted)] == [True, True]
    (folder / "argparse.py").write_text("raise SystemExit('a file of the working directory was imported')")
    report, _ = run(plain, state_request(folder, "started"))
    (folder / "argparse.py").unlink()
    assert report.outcome is Outcome.MEASURED, report
    assert "PYTHONSAFEPATH" not in states(folder, "started")[0]["environ"]
    for forked, started in zip(states(folder, "first"), states(folder, "started"), strict=True):
        differing = {
            key: (forked[key], started[key]) for key in started.keys() - MAY_DIFFER if forked[key] != started[key]
        }
        assert differing == {}
        assert forked["sockets"] <= started["sockets"]
    ctrl_c = states(folder, "first")[0]["signals"][str(int(signal.SIGINT))]
    assert ctrl_c.startswith("<built-in function default_int"), "ignored only where it was from the start"
    numbers = [number for s in states(folder, "first") for number in (*s["random"], s["torch_seed"])]
    assert len(set(numbers)) == len(numbers), "ranks that are not seeded draw different numbers"


def test_the_profile_launch_finds_deepspeed_imported(
    warm_launcher: TorchrunLauncher, folder: Path, tmp_path: Path
) -> None:
    """It also reports all modules it used, so that none is missing before the next fork."""
    script, result = tmp_path / "looks.py", tmp_path / "found"
    script.write_text(
        f"import sys\nopen({str(result)!r}, 'w').write(str('deepspeed' in sys.modules))\n"
        + (SCRIPTS / "tiny_launch.py").read_text().replace("from __future__ import annotations", "")
    )
    config = str(folder / "user_config.json")
    command = ScriptCommand(script=str(script), args=(config,), cwd=str(folder), config_path=config)
    asked = request(folder, launch_id="profile", purpose="profile", command=command, start_profile_step=1)
    report, updates = run(warm_launcher, asked)
    assert report.outcome is Outcome.MEASURED, report
    assert result.read_text() == "True"
    directory = warm_launcher.run_directory("profile")
    assert all("training starts" in directory.stdout(rank).read_text() for rank in range(2))
    assert "training starts" not in (directory.root.parent / "warm.log").read_text()
    (imported,) = events(updates, ModulesImported)
    assert {"torch", "deepspeed", "numpy"} <= set(imported.modules)


def test_a_launch_sees_and_measures_nothing_of_what_another_left_behind(
    warm_launcher: TorchrunLauncher, folder: Path
) -> None:
    def losses(name: str, stage: int, *more: str) -> list[str]:
        config = {**DS_CONFIG, "zero_optimization": {"stage": stage, "reduce_bucket_size": 10_000}}
        asked = replace(state_request(folder, name, *more), ds_config=config, overlay=config)
        report, updates = run(warm_launcher, asked)
        assert report.outcome is Outcome.MEASURED, report
        assert {event.step for event in events(updates, StepMeasured)} == {1, 2, 3}
        return sorted(str(event.loss) for event in events(updates, StepMeasured))

    first = losses("before", 1)
    losses("disturber", 3, "--disturb")
    assert losses("after", 1) == first
    for before, after in zip(states(folder, "before"), states(folder, "after"), strict=True):
        assert {k: before[k] for k in before.keys() - DRAWN} == {k: after[k] for k in after.keys() - DRAWN}
        assert after["neighbour"] == []
        assert after["attribute"] is None
        assert all(before[key] != after[key] for key in DRAWN)


def descendants() -> set[psutil.Process]:
    """Return the living descendants of this process."""
    result = psutil.Process().children(recursive=True)
    return {process for process in result if process.is_running() and process.status() != psutil.STATUS_ZOMBIE}


def test_processes_of_the_script_s_own_work_in_a_fork_and_leave_nothing(
    warm_launcher: TorchrunLauncher, folder: Path, launch_tmp: Path
) -> None:
    processes, files = descendants(), {*launch_tmp.iterdir()}
    report, updates = run(warm_launcher, request(folder, launch_id="helped", script="helped.py", end_profile_step=5))
    assert report.outcome is Outcome.MEASURED, report
    assert [event.forked for event in events(updates, RankStarted)] == [True, True]
    assert {*launch_tmp.iterdir()} == files
    assert descendants() == processes
    assert not [path for path in SHARED_MEMORY.glob("torch_*") if is_left(path, since=report.started_at)]


def is_left(path: Path, *, since: float) -> bool:
    """Return whether a file of torch was made by a process that is gone; tests beside this one make and remove some."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_mtime > since and ProcessKey.of(int(path.name.split("_")[1])) is None and path.exists()
    return False


def test_a_rank_that_dies_is_explained_by_torchrun(warm_launcher: TorchrunLauncher, folder: Path) -> None:
    report, _ = run(warm_launcher, request(folder, launch_id="dies", args=("--end", "segv", "--end-rank", "1")))
    assert report.outcome is Outcome.SCRIPT_ERROR, report
    assert "rank 1" in report.message
    assert_gone(report.pids)


def test_launches_whose_agent_or_parent_is_killed_are_told_so_and_the_next_is_forked_and_ends_with_its_launcher(
    folder: Path, tmp_path: Path
) -> None:
    notices: list[str] = []
    launcher = local_launcher(tmp_path, devices=cpu_devices(2), base_env=BASE_ENV, warm=True, on_notice=notices.append)
    launcher.prepare(LIGHT)

    def killed(victim: str) -> LaunchReport:
        launcher.start(request(folder, launch_id=victim, script=STUB, args=("--end", "sleep", "--at", "2")))
        updates_until(launcher, lambda seen: events(seen, StepMeasured))
        server = launcher._forking._server
        assert server is not None
        agent = launcher._running[victim].processes.pid
        os.kill({"agent": agent, "parent": server.process.pid}[victim], signal.SIGKILL)
        return reports(updates_until_finished(launcher))[victim]

    try:
        for victim in ("agent", "parent"):
            report = killed(victim)
            assert report.outcome in (Outcome.KILLED, Outcome.HOST_OUT_OF_MEMORY), report  # by the kernel's count
            assert "killed" in report.message
            assert_gone(report.pids)
        report, updates = run(launcher, request(folder, launch_id="again", script=STUB))
        assert report.outcome is Outcome.MEASURED
        assert all(event.forked for event in events(updates, RankStarted))
        assert notices == []
        launcher.start(request(folder, launch_id="open", script=STUB, args=("--end", "sleep")))
        updates = updates_until(launcher, lambda seen: len(events(seen, RankStarted)) >= 2)
    finally:
        launcher.close()
    pids = [event.pid for event in events(updates, RankStarted)]
    wait_until(lambda: not any(map(ProcessKey.of, pids)), what="the ranks are gone")


class TestWhatMustNotBeImported:
    """Packages whose import would make forks unusable; the test replaces them by small packages."""

    @pytest.fixture
    def warm(self, tmp_path: Path) -> Iterator[Forking]:
        made = Forking(tmp_path / "warm.log", enabled=True, on_notice=print)
        yield made
        made.close()

    def start(self, warm: Forking, tmp_path: Path, *modules: str) -> Preload:
        """Have the parent import, without torch, and return what it was left with."""
        warm.prepare(Preload(modules=modules))
        as_srun = {"SLURM_PROCID": "$RANK", "SLURM_CPUS_PER_TASK": "1"}
        environ = {**BASE_ENV, **as_srun, "PYTHONPATH": str(tmp_path), "DS_ACCELERATOR": "cpu"}
        warm._ready_server(environ, python=sys.executable)
        return warm.preload

    def test_a_parent_that_is_killed_is_started_again(self, warm: Forking, tmp_path: Path) -> None:
        """Between launches, and while it imports; not without end."""
        (tmp_path / "slow_package.py").write_text("import time\ntime.sleep(1.0)")
        self.start(warm, tmp_path, "slow_package")
        seen: list[int] = []
        for _ in range(2):
            assert warm._server is not None
            seen.append(warm._server.process.pid)
            warm._server.process.kill()
            warm._server.process.wait()
            warm._begin({**BASE_ENV, "PYTHONPATH": str(tmp_path), "DS_ACCELERATOR": "cpu"}, python=sys.executable)
        assert warm._server is not None
        warm._server.process.kill()  # before its imports are done
        warm._ready_server(warm._environ, python=sys.executable)
        assert warm._server.process.pid not in seen
        assert warm._server.process.poll() is None
        for _ in range(10):
            if warm._server is not None:
                warm._server.process.kill()
                warm._server.process.wait()
            with contextlib.suppress(WarmUnavailableError):
                warm._begin({**BASE_ENV, "PYTHONPATH": str(tmp_path)}, python=sys.executable)
        with pytest.raises(WarmUnavailableError, match="killed 6 times"):
            warm._begin({**BASE_ENV, "PYTHONPATH": str(tmp_path)}, python=sys.executable)

    def test_only_what_spoils_a_fork_is_left_to_the_ranks_and_what_imports_it(
        self, warm: Forking, tmp_path: Path
    ) -> None:
        thread = "import threading, time\nthread = threading.Thread(target=time.sleep, args=({},), daemon=True)\n"
        spoils = {
            "reads_the_rank": "import os\nRANK = os.environ.get('RANK', 0)",
            "imports_it": "import reads_the_rank",
            "reads_the_rank_of_srun": "import os\nRANK = os.environ.get('SLURM_PROCID', 0)",
            "reads_the_rank_in_bytes": "import os\nRANK = os.environb.get(b'RANK', 0)",
            "leaves_a_thread": f"{thread.format(60)}thread.start()",
        }
        others = {
            "reads_the_rest": "import os\nCOPY = dict(os.environ)\nTHREADS = os.environ['SLURM_CPUS_PER_TASK']",
            "joins_its_thread": f"{thread.format(0)}thread.start()\nthread.join()",
            "fails": "raise RuntimeError('not today')",
            "runs_a_program": "import subprocess\nsubprocess.run(['true'], check=True)",
        }
        for name, code in (spoils | others).items():
            (tmp_path / f"{name}.py").write_text(code)
        assert set(self.start(warm, tmp_path, *others, *spoils).left_out) == set(spoils)

    @pytest.mark.parametrize(
        ("module", "end", "code"), [("ending", "os._exit(3)", 3), ("sitecustomize", "del os.pidfd_open", 1)]
    )
    def test_imports_that_end_the_process_are_not_repeated(
        self, warm: Forking, tmp_path: Path, module: str, end: str, code: int
    ) -> None:
        (tmp_path / f"{module}.py").write_text(f"import os\nos.write(1, b'import\\n')\n{end}")
        with pytest.raises(WarmUnavailableError, match="has ended"):
            self.start(warm, tmp_path, "ending")
        with pytest.raises(WarmUnavailableError, match=f"ended with exit code {code}"):
            warm._begin({**BASE_ENV, "PYTHONPATH": str(tmp_path), "DS_ACCELERATOR": "cpu"}, python=sys.executable)
        assert (tmp_path / "warm.log").read_text().count("import") == 1


def test_a_forked_launch_that_fails_is_repeated_plainly(folder: Path, tmp_path: Path) -> None:
    """A script that must be the first to import a module represents scripts that cannot be forked."""
    script = tmp_path / "refuses.py"
    script.write_text(
        "import os, sys\nprint(os.environ['SLURM_PROCID'], file=open(f'rank{os.environ[\"RANK\"]}', 'a'))\n"
        "assert 'imported_before' not in sys.modules, 'I want it fresh'\n"
        + (SCRIPTS / "tiny_launch.py").read_text().replace("from __future__ import annotations", "")
    )
    (tmp_path / "imported_before.py").write_text("")
    notices: list[str] = []
    environment = {**BASE_ENV, "PYTHONPATH": str(tmp_path)}
    launcher = local_launcher(
        tmp_path / "out", devices=cpu_devices(2), base_env=environment, warm=True, on_notice=notices.append
    )
    launcher.prepare(Preload(modules=("imported_before",)))
    (tmp_path / "out").mkdir()
    try:
        config = str(folder / "user_config.json")
        command = ScriptCommand(script=str(script), args=(config,), cwd=str(folder), config_path=config)
        as_srun = {"SLURM_PROCID": "$RANK"}
        refused = request(folder, launch_id="refused", command=command, env=as_srun)
        report, _ = run(launcher, replace(refused, continues=True))  # its ranks waited ten minutes for another trial
        assert report.outcome is Outcome.MEASURED, report
        assert [(folder / f"rank{rank}").read_text().split() for rank in "01"] == [["0", "0"], ["1", "1"]]
        assert len(notices) == 1
        assert "all run plainly" in notices[0]
        assert not launcher._forking.enabled, "the next is plain at once"
    finally:
        launcher.close()
