"""Which GPUs launches take: those that are given, that others leave, and in the order in which they are numbered."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path

import pytest

from tests.cuda.machine import Machine
from tests.cuda.tuning import (
    GPT,
    QUICK,
    SMALL_GPT,
    Launched,
    Search,
    copy_gpt,
    left_nothing,
    ran_as_they_should,
    slow_search,
)

OPTIONS = (*QUICK, "--max-trials", "2", "--json")


def devices(search: Search) -> list[list[int]]:
    return [launch.report["devices"] for launch in search.launches]


@pytest.mark.parametrize("launcher", ["torchrun", "warm"])
@pytest.mark.parametrize("numbers", [[5], [6, 3]])
def test_gpus_are_chosen_by_uuid(machine: Machine, tmp_path: Path, numbers: list[int], launcher: str) -> None:
    folder = copy_gpt(tmp_path)
    visible = ",".join(machine.uuids(numbers))
    search = Search(machine, folder, *GPT, *OPTIONS, "--launcher", launcher, *SMALL_GPT, visible=visible).finish()
    assert devices(search) == [numbers] * 3
    ran_as_they_should(search, forked=launcher == "warm")


def test_gpus_are_chosen_by_number(machine: Machine, tmp_path: Path) -> None:
    folder = copy_gpt(tmp_path)
    search = Search(machine, folder, *GPT, *OPTIONS, *SMALL_GPT, visible="7,2").finish()
    assert devices(search) == [[7, 2]] * 3
    ran_as_they_should(search, forked=True)


def test_launches_of_one_gpu_share_the_machine(machine: Machine, tmp_path: Path) -> None:
    folder = copy_gpt(tmp_path)
    options = ("--gpus-per-trial", "1", "--max-slots", "2", "--max-trials", "4")
    search = Search(machine, folder, *GPT, *QUICK, *options, "--json", *SMALL_GPT, visible=None).finish()
    assert search.result["launches"] == {"measured": 4}
    assert {number for [number] in devices(search)} <= {0, 1}
    ran_as_they_should(search, forked=True)


def test_launches_number_gpus_as_nvml_does_even_where_cuda_would_not(machine: Machine, tmp_path: Path) -> None:
    machine.change_gpu(4, speed=3)
    folder = copy_gpt(tmp_path)
    options = (*OPTIONS, "--gpus-per-trial", "1", "--max-slots", "1")
    search = Search(machine, folder, *GPT, *options, *SMALL_GPT, visible=None).finish()
    assert devices(search) == [[0]] * 3
    ran_as_they_should(search, forked=True)


def test_a_part_of_a_gpu_is_warm_too(machine: Machine, tmp_path: Path) -> None:
    part = "MIG-1f2e3d4c-5747-4d3e-8f1c-9a2b3c4d5e6f"
    machine.say(f"part 0 {part} 9856 1 NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    folder = copy_gpt(tmp_path)
    search = Search(machine, folder, *GPT, *OPTIONS, "--no-continue", *SMALL_GPT, visible=part).finish()
    ranks = {rank["pid"] for launch in search.launches for rank in launch.ranks if rank["forked"]}
    assert len(ranks) == 3, search.errors
    assert {(call.pid, call.uuid, call.code) for call in machine.calls("context")} == {(pid, part, 0) for pid in ranks}
    assert {call.pid for call in machine.calls("cuInit")} == ranks


HOLD = "import torch; held = torch.empty(1 << 30, dtype=torch.uint8, device='cuda'); print(flush=True); input()"


@contextmanager
def process_on(machine: Machine, number: int) -> Iterator[int]:
    """Have somebody else hold 1 GiB of a GPU; yield his process."""
    with subprocess.Popen(
        [str(machine.python), "-c", HOLD],
        env=machine.environment(visible=str(number)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()


def test_a_gpu_that_somebody_else_uses_is_left_alone(machine: Machine, tmp_path: Path) -> None:
    folder = copy_gpt(tmp_path)
    options = (*OPTIONS, "--gpus-per-trial", "2")
    with process_on(machine, 1) as stranger:
        search = Search(machine, folder, *GPT, *options, *SMALL_GPT, visible="0,1,2").finish()
        assert list(machine.use()[1].processes) == [stranger]
    assert devices(search) == [[0, 2]] * 3
    assert {call.pid for call in machine.calls("context") if call.uuid == machine.gpus[1].uuid} == {stranger}
    left_nothing(machine)


def test_who_holds_a_gpu_is_said_while_a_search_waits_for_it(machine: Machine, tmp_path: Path) -> None:
    folder = copy_gpt(tmp_path)
    options = (*OPTIONS, "--wait-for-gpus", "4")
    with process_on(machine, 1) as stranger:
        search = Search(machine, folder, *GPT, *options, *SMALL_GPT, visible="0,1").finish(code=1)
    [waiting, ended] = [line for line in search.errors.splitlines() if f"GPU 1: process {stranger}" in line]
    assert waiting.startswith("Waiting for 2 free slots")
    assert ended.startswith("optuna-dsat: A launch needs 2 free slots")
    assert search.launches == []


def overlapping(first: Launched, other: Launched) -> bool:
    """Whether two launches ran at the same time, from the start of each to its last step."""

    def span(launch: Launched) -> tuple[float, float]:
        start = launch.report["started_at"]
        return start, start + launch.report["startup_s"] + launch.report["measured_s"]

    (start, end), (other_start, other_end) = span(first), span(other)
    return start < other_end and other_start < end


def test_a_second_tuner_takes_other_gpus(machine: Machine, tmp_path: Path) -> None:
    searches = []
    for name in ("one", "other"):
        folder = tmp_path / name
        folder.mkdir()
        searches.append(slow_search(machine, folder, "--gpus-per-trial", "1", "--max-slots", "1", visible=None))
    launches = [launch for search in searches for launch in search.finish().launches]
    together = [pair for pair in combinations(launches, 2) if overlapping(*pair)]
    assert together
    for first, other in together:
        assert not {*first.report["devices"]} & {*other.report["devices"]}
    assert {launch.report["outcome"] for launch in launches} == {"measured"}
    left_nothing(machine)


def test_the_doctor_sees_the_machine_and_makes_no_context_itself(machine: Machine, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        machine.say(f"holder 3 {other.pid} 2048")
        doctor = Search(machine, tmp_path, "doctor", "--json", visible="3,6").finish()
        other.communicate(b"\n")
    report = json.loads(doctor.output)
    result = {finding["name"]: finding["data"] for finding in report["findings"]}
    assert report["can_run"]
    assert result["gpu 3"]["processes"] == [other.pid] or str(other.pid) in json.dumps(result["gpu 3"])
    assert (result["gpu 3"]["used_bytes"], result["gpu 6"]["used_bytes"]) == (2 << 30, 0)
    assert result["hidden GPUs"]["count"] == 6
    assert result["torch"]["cuda_works"]
    assert result["deepspeed"]["accelerator"] == "cuda"
    assert doctor.process.pid not in {call.pid for call in machine.calls("cuInit")}
