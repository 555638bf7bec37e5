"""A daemon that forks twice, with a separate session and no environment, ends with the launch that started it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from optuna_dsat.launch.launcher import TorchrunLauncher, local_launcher
from optuna_dsat.launch.machine.devices import cpu_devices
from optuna_dsat.launch.machine.journal import remove_leftovers
from optuna_dsat.launch.machine.processes import find_marked, has_mark, new_mark
from optuna_dsat.launch.machine.tree import ProcessTree, end_launch, end_noted
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.agent.processes import MARK_ENV, ProcessKey
from optuna_dsat.runtime.events import StepMeasured
from optuna_dsat.runtime.process_identity import process_space
from tests.harness.launches import (
    DS_CONFIG,
    LIGHT,
    STUB,
    events,
    processes_of,
    reports,
    request,
    updates_until,
    updates_until_finished,
)
from tests.harness.waits import assert_within, ended, wait_until

ROOT = Path(__file__).parents[2]
BASE_ENV = {**os.environ, "OMP_NUM_THREADS": "1"}

TUNER = """
import sys
from pathlib import Path
from optuna_dsat.launch.machine.devices import cpu_devices
from optuna_dsat.launch.launcher import TorchrunLauncher, local_launcher
from tests.harness.launches import STUB, request
launcher = local_launcher(Path("out"), devices=cpu_devices(1))
launcher.start(request(Path.cwd(), script=STUB, slots=1, args=("--end", "sleep", "--daemon", sys.argv[1])))
while True:
    launcher.poll(0.1)
"""


@pytest.fixture(scope="module")
def forking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchrunLauncher]:
    folder = tmp_path_factory.mktemp("forked")
    (folder / "user_config.json").write_text(json.dumps(DS_CONFIG), encoding="utf-8")
    made = local_launcher(folder / "out", devices=cpu_devices(1), base_env=BASE_ENV, warm=True)
    (folder / "out").mkdir()
    made.prepare(LIGHT)
    made.start(request(folder, launch_id="first", script=STUB, slots=1))
    updates_until_finished(made)
    yield made
    made.close()


def daemon_of(file: Path) -> int:
    wait_until(lambda: file.exists() and file.read_text(encoding="ascii").endswith("\n"), what="a daemon runs")
    pid = int(file.read_text(encoding="ascii"))
    assert pid not in {process.key.pid for process in find_marked()}
    return pid


@pytest.mark.torchrun
def test_a_daemon_ends_with_its_forked_launch(forking: TorchrunLauncher, cwd: Path) -> None:
    check_daemon(forking, cwd, end="parent")


@pytest.mark.torchrun
def test_a_daemon_ends_with_its_plain_launch(launcher: TorchrunLauncher, cwd: Path) -> None:
    check_daemon(launcher, cwd, end="itself")


def check_daemon(launcher: TorchrunLauncher, cwd: Path, *, end: str) -> None:
    daemon = cwd / "daemon"
    args = () if end == "itself" else ("--end", "sleep")
    launcher.start(request(cwd, launch_id=end, script=STUB, slots=1, args=(*args, "--daemon", str(daemon))))
    updates = updates_until(launcher, lambda seen: events(seen, StepMeasured))
    pid, began = daemon_of(daemon), time.monotonic()
    running = launcher._running.get(end)
    if end == "parent":
        assert running is not None
        while pid not in {key.pid for key in processes_of(running).known}:
            updates += launcher.poll(0.1)
        server = launcher._forking._server
        assert server is not None
        os.kill(server.process.pid, signal.SIGKILL)
    launches = reports([*updates, *updates_until_finished(launcher, 0 if reports(updates) else 1)])
    reported = time.monotonic()
    wait_until(lambda: ended(pid), what="the daemon is gone")
    assert_within(time.monotonic() - reported, 2.0)
    assert_within(time.monotonic() - began, 10.0)
    assert (launches[end].outcome is Outcome.MEASURED) is (end == "itself")


@pytest.mark.torchrun
def test_a_daemon_of_a_killed_tuner_is_ended_by_the_next_start(cwd: Path, notes: Path) -> None:
    environ = {**BASE_ENV, "PYTHONPATH": str(ROOT), "TMPDIR": str(cwd)}
    tuner = subprocess.Popen([sys.executable, "-c", TUNER, str(cwd / "daemon")], env=environ, cwd=cwd)
    pid = daemon_of(cwd / "daemon")
    wait_until(
        lambda: any(f'"pid": {pid},' in path.read_text() for path in notes.glob("*/*.jsonl")), what="it is noted"
    )
    tuner.kill()
    tuner.wait()
    assert not ended(pid)
    assert remove_leftovers({"TORCH_EXTENSIONS_DIR": str(cwd)})["processes"] >= 1
    assert ended(pid)


def test_a_process_that_a_script_only_names_as_its_rank_is_left_alone() -> None:
    mark = new_mark()
    agent = subprocess.Popen(["sleep", "600"], env={**os.environ, MARK_ENV: mark})
    other = subprocess.Popen(["sleep", "600"])
    wait_until(lambda: has_mark(agent.pid, mark), what="the agent is started")
    tree = ProcessTree(agent, mark=mark)
    tree.add_rank(0, other.pid)
    tree.add_rank(1, os.getpid())
    assert tree.ranks == set()
    end_launch(tree)
    assert agent.returncode == -signal.SIGKILL
    assert other.poll() is None
    other.kill()
    other.wait()


def test_notes_end_only_the_process_that_they_mean() -> None:
    sleep = subprocess.Popen(["sleep", "600"])
    key = ProcessKey.of(sleep.pid)
    assert key is not None
    noted = {"pid": key.pid, "start_ticks": key.start_ticks, "space": process_space()}
    others = [
        {**noted, "start_ticks": key.start_ticks - 1},
        {**noted, "space": process_space() + "1"},
    ]
    assert end_noted(others) == 0
    assert key.alive
    assert end_noted([noted, noted]) == 1
    assert sleep.wait() == -signal.SIGTERM
