"""The agent of a node: what it answers, when it leaves; its messages, and commands that leave no process behind."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from optuna_dsat.launch.agent import run
from optuna_dsat.launch.agent.agent import Doorbell, NodeAgent, addresses, digest_of, free_port, interface_of, reached
from optuna_dsat.launch.agent.files import HEARD_S, Joiner, LaunchFiles, to_lines
from optuna_dsat.launch.event_log import GrowingFile
from optuna_dsat.launch.places.slurm import cause_in, job_in, place_arguments
from optuna_dsat.launch.protocol import Conditions, EndFacts, LaunchRequest
from optuna_dsat.launch.run_directory import OutputError, RunDirectory
from optuna_dsat.launch.warm.forking import IMPORTING, Forking
from optuna_dsat.runtime.events import Event
from optuna_dsat.version import __version__
from tests.harness import present
from tests.harness.commands import ROOT
from tests.harness.events import step_of
from tests.harness.launches import STUB, request
from tests.harness.waits import ended, wait_until


class Clock:
    """A clock that stands until it is set."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    clock = Clock()
    agent = NodeAgent(node=1, name="n2", environ={"PATH": os.environ["PATH"]}, clock=clock)
    agent.clock = clock  # type: ignore[attr-defined]
    yield agent
    agent.close()


def answer(agent: NodeAgent, order: dict[str, Any]) -> dict[str, Any]:
    agent.advance()
    agent.take(order)
    (news,) = [
        item for item in agent.advance() if item["news"] != "notice"
    ]  # a killed run of somebody's was cleaned up
    return news


def look(agent: NodeAgent, **changes: Any) -> dict[str, Any]:
    return answer(
        agent, {"do": "look", "kind": "cpu", "slots": 2, "files": {}, "python": None, "listen": False, **changes}
    )


def test_it_says_first_who_it_is(agent: NodeAgent) -> None:
    (hello,) = agent.advance()
    assert (hello["news"], hello["name"], hello["version"]) == ("hello", "n2", __version__)


def test_it_leaves_when_it_is_told_to_or_hears_nothing(agent: Any) -> None:
    assert not agent.leaving
    agent.clock.now += HEARD_S + 1
    assert agent.leaving
    agent.take({"do": "ping"})
    assert not agent.leaving
    agent.take({"do": "leave"})
    assert agent.leaving


def test_what_a_study_needs_is_looked_for(agent: NodeAgent, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("pass")
    files = {str(script): digest_of(script), str(tmp_path): digest_of(tmp_path)}
    assert look(agent, files=files)["why"] == ""
    script.write_text("raise")
    assert look(agent, files=files)["why"] == f"{script} is not the file that the head has"
    script.unlink()
    assert look(agent, files=files)["why"] == f"{script} is not there"


def test_gpus_that_are_not_there_are_named(agent: NodeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    agent._environ["CUDA_VISIBLE_DEVICES"] = ""
    assert look(agent, kind="cuda", slots=8)["why"] == "it shows 0 GPUs of the 8 that a launch takes."


def test_a_launch_that_cannot_start_is_told_and_takes_no_slot(agent: NodeAgent, tmp_path: Path) -> None:
    look(agent, slots=1)
    wire = request(tmp_path, script=STUB, slots=2).to_json()
    order = {"do": "launch", "request": wire, "environ": {}, "warm": False, "rendezvous": None}
    assert answer(agent, order)["news"] == "failed"
    assert present(agent._machine).pool.free == 1


class Measuring:
    """Processes of a launch whose ranks measure, until they are ended."""

    def __init__(self) -> None:
        self.conditions, self.dead_ranks = Conditions(cores=2), set[int]()
        self.code: int | None = None
        self.end: EndFacts | None = None
        self.is_ending = False

    def advance(self, _now: float, _read: Any) -> list[Event]:
        return [] if self.is_ending else [step_of(step=1)]

    def kill_all(self) -> None:
        self.is_ending, self.end = True, EndFacts(oom_kills=0)

    def sweep(self) -> bool:
        return True

    def release(self, _now: float) -> str:
        return ""


def test_a_trial_whose_files_cannot_be_written_ends_the_launch_that_it_was_to_continue(
    agent: NodeAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look(agent, slots=1)
    first = request(tmp_path, launch_id="first", script=STUB, slots=1, continues=True)
    order = {"do": "launch", "request": first.to_json(), "warm": False, "rendezvous": None, "environ": {}}
    agent.take(order)
    agent._launches["first"].processes = cast(Any, Measuring())
    [conditions] = [item for item in agent.advance() if item["news"] == "conditions"]
    assert conditions["conditions"]["cores"] == 2, "before its processes are gone"

    def fail(*_: Any, **__: Any) -> RunDirectory:
        raise OutputError("No space left on device")

    monkeypatch.setattr(run, "write_run_directory", fail)
    changes = {"train_micro_batch_size_per_gpu": 8}
    second = replace(first, launch_id="second").to_json()
    agent.take({"do": "continue", "launch_id": "first", "request": second, "changes": changes})
    news = [item for _ in range(3) for item in agent.advance()]
    told = [(item["news"], item["launch_id"]) for item in news]
    assert told == [(kind, "second") for kind in ("failed", "gone", "free")]


def test_what_takes_long_on_a_node_is_told_until_it_is_over(
    agent: NodeAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look(agent, slots=1)
    assert agent._machine is not None
    ready: list[bool] = []
    monkeypatch.setattr(Forking, "begin", lambda *_, **__: None)
    monkeypatch.setattr(Forking, "is_ready", property(lambda _: bool(ready)))
    wire = request(tmp_path, script=STUB, slots=1).to_json()
    order = {"do": "launch", "request": wire, "environ": {}, "warm": True, "rendezvous": None}
    assert answer(agent, order) == {"news": "phase", "words": IMPORTING}
    assert agent.advance() == []
    agent.take({"do": "end", "launch_id": "trial-0000"})
    text = agent.advance()
    assert {"news": "phase", "words": ""} in text


def test_doors_are_reached_by_their_interfaces() -> None:
    door = Doorbell(["127.0.0.1", "203.0.113.7"])  # the second is no address of this machine
    try:
        assert [address for address, _ in door.open] == ["127.0.0.1"]
        assert reached([*door.open, ("127.0.0.1", free_port("127.0.0.1"))]) == [("127.0.0.1", "lo")]
    finally:
        door.close()
    assert interface_of("203.0.113.7") == ""
    assert not [address for address in addresses() if address[1].startswith("127.")]


def test_a_file_is_passed_on_as_it_grows(tmp_path: Path) -> None:
    growing = GrowingFile(tmp_path / "rank0.jsonl")
    assert growing.read_lines() == []
    growing.path.write_bytes(b"one\ntw")
    assert growing.read_lines() == [b"one"]
    with growing.path.open("ab") as file:
        file.write(b"o\n")
    assert growing.read_lines() == [b"two"]
    growing.path.unlink()
    os.mkfifo(growing.path)  # which blocks who opens it
    growing.offset = -1
    assert growing.read_lines() == []


class Talk:
    """An agent in a process of its own, at the other end of two pipes."""

    def __init__(self, folder: Path) -> None:
        environ = {**os.environ, "SLURM_PROCID": "0", "SLURMD_NODENAME": "n1", "TMPDIR": str(folder)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "optuna_dsat.launch.places.node_agent"],
            cwd=ROOT, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
        )  # fmt: skip
        os.set_blocking(present(self.process.stdout).fileno(), False)
        self._joiner = Joiner()
        self.news: list[Any] = []

    def tell(self, **order: Any) -> None:
        present(self.process.stdin).write(json.dumps(order).encode() + b"\n")

    def hears(self, condition: Callable[[Any], bool]) -> Any:
        def heard() -> bool:
            self.news += [message for _, message in self._joiner.feed(present(self.process.stdout).read() or b"")]
            return any(map(condition, self.news))

        wait_until(heard, what="the agent says it")
        return next(filter(condition, self.news))

    def end(self) -> None:
        present(self.process.stdin).close()
        self.process.wait()
        present(self.process.stdout).close()


def test_orders_for_others_are_left_alone_and_the_end_of_the_input_ends_it(tmp_path: Path) -> None:
    talk = Talk(tmp_path)
    try:
        talk.hears(lambda news: news["news"] == "hello")
        talk.tell(do="ping", sent=1.0, to=1)
        talk.tell(do="ping", sent=2.0, to=None)
        heard = talk.hears(lambda news: news["news"] == "pong")
        assert heard["sent"] == 2.0
        assert abs(heard["time"] - time.time()) < 60
    finally:
        talk.end()
    assert talk.process.returncode == 0


def test_signals_that_come_while_it_ends_change_nothing(tmp_path: Path) -> None:
    talk = Talk(tmp_path)
    try:
        talk.hears(lambda news: news["news"] == "hello")
        while talk.process.poll() is None:
            talk.process.send_signal(signal.SIGTERM)
    finally:
        talk.end()
    assert talk.process.returncode == 0


def test_a_head_that_reads_nothing_keeps_no_agent(tmp_path: Path) -> None:
    talk = Talk(tmp_path)
    try:
        talk.hears(lambda news: news["news"] == "hello")
        for _ in range(100):
            talk.tell(do="ping", sent="x" * 1000, to=None)  # each is answered, with more than a pipe holds in all
        present(talk.process.stdin).close()
        assert talk.process.wait() == 0
    finally:
        talk.process.kill()
        talk.end()


def test_a_log_that_grows_faster_than_it_is_passed_on_keeps_its_beginning_and_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"_MOST_AT_ONCE": 2**14, "_MOST_BEHIND": 2**19, "START_BYTES": 2**16}  # a 16th of what they are
    for name, size in sizes.items():
        monkeypatch.setattr(f"optuna_dsat.launch.agent.files.{name}", size)
    for name, size in {"START_BYTES": 2**16, "END_BYTES": 31 * 2**16, "_INTERVAL_S": 0}.items():
        monkeypatch.setattr(f"optuna_dsat.launch.event_log.{name}", size)
    directory = RunDirectory(tmp_path)
    directory.log_dir.mkdir()
    log = directory.stdout(0)
    files = LaunchFiles(directory, ranks=[0], node=0)
    received, written = "", 0
    for _ in range(12):
        with log.open("ab") as file:
            for _ in range(16):
                file.write(b"".join(b"line %09d\n" % (written // 15 + number) for number in range(2**12)))
                written += 15 * 2**12
        received += "".join(text for name, text in files.log_texts() if name == log.name)
    received += "".join(text for name, text in files.log_texts(last=True) if name == log.name)
    assert received.startswith("line 000000000\n")
    assert received.endswith(f"line {written // 15 - 1:09d}\n")
    dropped = [int(number) for number in re.findall(r"optuna-dsat dropped (\d+) bytes here", received)]
    kept = re.sub(r"\noptuna-dsat dropped \d+ bytes here\n", "", received)
    assert len(kept) + sum(dropped) == written
    assert "\x00" not in received


PARENT = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN if sys.argv[2] == "stubborn" else signal.SIG_DFL)
child = subprocess.Popen(["sh", "-c", "sleep 600 & echo $! $$; wait"], stdout=subprocess.PIPE, start_new_session=True)
with open(sys.argv[1], "w") as file:
    file.write(f"{os.getpid()} {child.stdout.readline().decode()}")
if sys.argv[2] == "ends":
    sys.exit(7)
time.sleep(600)
"""


def started(folder: Path, how: str) -> tuple[subprocess.Popen[bytes], list[int]]:
    """Return a guarded command, and the processes that it has started: itself, a child and a grandchild."""
    noted = folder / "pids"
    code = "from optuna_dsat.launch.places import guarded as it; it._GRACE_S = 0.3; sys.exit(it.main(sys.argv[1:]))"
    words = ["-c", f"import sys; {code}", "", "-c", PARENT, str(noted), how]
    process = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdin=subprocess.PIPE)
    wait_until(lambda: noted.exists() and noted.read_text().endswith("\n"), what="it has started its child")
    return process, [int(word) for word in noted.read_text().split()]


@pytest.mark.parametrize("how", ["obeys", "stubborn"])
def test_it_ends_with_its_input_though_the_process_that_was_started_is_killed(tmp_path: Path, how: str) -> None:
    process, pids = started(tmp_path, how)
    assert len(pids) == 3
    assert not any(map(ended, pids))
    process.kill()  # as Ray does with the children of a worker that ends
    process.wait()
    present(process.stdin).close()
    wait_until(lambda: all(map(ended, pids)), what="all of it is gone")


def test_what_it_leaves_behind_is_killed_and_its_exit_code_is_passed_on(tmp_path: Path) -> None:
    process, pids = started(tmp_path, "ends")
    assert process.wait() == 7
    assert all(map(ended, pids))
    present(process.stdin).close()


def test_messages_of_many_nodes_are_joined_from_one_stream_cut_anywhere() -> None:
    chance = random.Random(7)
    sent = {node: [{"news": "log", "text": "ä\n" * chance.randrange(3000)} for _ in range(5)] for node in range(12)}
    queues = [[line for message in all_ for line in to_lines(node, message)] for node, all_ in sent.items()]
    stream = b""
    while any(queues):
        stream += chance.choice([queue for queue in queues if queue]).pop(0)
    joiner, got = Joiner(), []
    while stream:
        size = chance.randrange(1, 5000)
        got += joiner.feed(stream[:size])
        stream = stream[size:]
    assert {node: [message for item, message in got if item == node] for node in sent} == sent
    assert not joiner.strays


def test_no_line_is_longer_than_slurm_passes_on_whole() -> None:
    assert max(map(len, to_lines(99999, {"text": "x" * 10_000}))) <= 1024


def test_what_a_nodes_shell_prints_is_no_message() -> None:
    joiner = Joiner()
    own = b"".join(to_lines(3, {"news": "hello"}))
    assert joiner.feed(b"Welcome to n1.\n" + own + b"1.no json\n") == [(3, {"news": "hello"})]
    assert joiner.strays == ["Welcome to n1.", "1.no json"]


def test_a_request_comes_back_as_it_was(tmp_path: Path) -> None:
    sent = request(tmp_path, args=("--lr", "1e-4"), timeout_s=4.0)
    assert LaunchRequest.from_json(json.loads(json.dumps(sent.to_json()))) == sent


def test_what_srun_says_is_told_without_its_prefixes() -> None:
    lines = [
        "srun: Required node not available (down, drained or reserved)",
        "srun: job 17 queued and waiting for resources",
        "srun: error: Unable to allocate resources: Invalid account",
    ]
    assert job_in(lines) == "17"
    assert cause_in(lines) == "Unable to allocate resources: Invalid account"
    assert cause_in(["allocation failure: Invalid partition name specified"]) == "Invalid partition name specified"
    assert cause_in(["srun: job 17 has been allocated resources"]) == ""
    ended = "srun: error: n1: task 0: Exited with exit code 2"
    assert cause_in([ended]) == "n1: task 0: Exited with exit code 2"
    assert cause_in([ended, "slurmstepd: error: execve(): /opt/python: No such file or directory"]) == (
        "execve(): /opt/python: No such file or directory"
    )
    preempted = "slurmstepd-n1: error: *** STEP 1.0 ON n1 CANCELLED AT 2026-11-23T03:22:47 DUE TO PREEMPTION ***"
    assert cause_in([ended, preempted]) == "*** STEP 1.0 ON n1 CANCELLED AT 2026-11-23T03:22:47 DUE TO PREEMPTION ***"


def test_options_of_the_user_come_last_and_take_precedence() -> None:
    asked = place_arguments(nodes=2, slots=8, arguments=["--gpus-per-node=a100:8"])
    assert asked == ["--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--gpus-per-node=8", "--gpus-per-node=a100:8"]
    assert "--gpus-per-node" not in " ".join(place_arguments(nodes=1, slots=0, arguments=[]))
