"""Messages between heads and agents survive being cut, mixed and disturbed."""

from __future__ import annotations

import json
import random
from pathlib import Path

from optuna_dsat.launch.agent.wire import Joiner, request_from_json, request_to_json, to_lines
from optuna_dsat.launch.places.slurm import cause_in, job_in, place_arguments
from tests.harness.launches import request


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
    assert request_from_json(json.loads(json.dumps(request_to_json(sent)))) == sent


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
