"""Values of launchers' options that their parsers accept and their launch would reject."""

from __future__ import annotations

import base64
import json

import pytest

from optuna_dsat.errors import UsageError
from tests.harness.interceptor import launched

REFUSED = [
    "torchrun --nproc_per_node abc train.py",
    "torchrun --nproc-per-node 0 train.py",
    f"torchrun --nproc-per-node {'9' * 5000} train.py",
    "torchrun --nnodes 0 train.py",
    "torchrun --nnodes 2:1 train.py",
    "deepspeed --num_gpus 0 train.py",
    "deepspeed --num_nodes=-2 train.py",
    "deepspeed --num_gpus 2 --include localhost:1 train.py",
    "accelerate launch --num_processes 0 train.py",
    "accelerate launch --num_machines 0 --num_processes 2 train.py",
    "accelerate launch --use_deepspeed --num_processes 2 --gpu_ids a,b train.py",
]


@pytest.mark.parametrize("command", REFUSED)
def test_values_that_no_launch_takes_are_refused_with_the_option(command: str) -> None:
    launcher, *words = command.split()
    with pytest.raises(UsageError, match="--") as refused:
        launched(launcher, words)
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize(
    "command",
    [
        "torchrun --nnodes x train.py",
        "torchrun --nnodes 1:2:3 train.py",
        "deepspeed --include localhost:a train.py",
        "deepspeed --include localhost:0-99999999999 train.py",
        "deepspeed --exclude localhost:0 --include localhost:1 train.py",
    ],
)
def test_other_values_are_refused_by_the_launcher_itself(command: str) -> None:
    launcher, *words = command.split()
    with pytest.raises((ValueError, RuntimeError)):
        launched(launcher, words)


@pytest.mark.parametrize(
    ("command", "ranks", "nodes"),
    [
        ("torchrun --nproc-per-node npu train.py", None, 1),
        ("torchrun --nnodes 1:1 train.py", 1, 1),
        ("torchrun --nnodes 2:4 --nproc-per-node 8 train.py", 8, 4),
        ("accelerate launch --multi_gpu train.py", None, 1),
        ("accelerate launch --use_deepspeed --zero_stage 2 --num_processes 4 --num_machines 2 train.py", 2, 2),
    ],
)
def test_ranks_and_nodes_need_not_be_here(command: str, ranks: int | None, nodes: int) -> None:
    launcher, *words = command.split()
    result = launched(launcher, words)
    assert (result.ranks, result.nodes) == (ranks, nodes)


@pytest.mark.parametrize(
    ("slots", "ranks", "hosts", "gpus"),
    [({"localhost": [0, 2]}, 2, (), "0,2"), ({"w0": [0, 1], "w1": [0]}, 1, ("w0", "w1"), None)],
)
def test_the_command_that_deepspeed_starts_on_a_node(
    slots: dict[str, list[int]], ranks: int, hosts: tuple[str, ...], gpus: str | None
) -> None:
    world = base64.urlsafe_b64encode(json.dumps(slots).encode()).decode()
    result = launched("deepspeed.launcher.launch", [f"--world_info={world}", "train.py", "--lr", "3"])
    assert (result.script, result.args, result.ranks, result.nodes) == ("train.py", ("--lr", "3"), ranks, len(slots))
    assert (result.hosts, result.gpus) == (hosts, gpus)


def test_gpus_of_accelerate_are_indices_or_identifiers() -> None:
    words = ["launch", "--use_deepspeed", "--num_processes", "3", "--gpu_ids", "0,GPU-1a2b,MIG-3c", "train.py"]
    assert launched("accelerate", words).gpus == "0,GPU-1a2b,MIG-3c"
