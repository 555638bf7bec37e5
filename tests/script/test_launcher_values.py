"""Launchers' options: what their parsers let through is refused, and reading them imports no more than they need."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from optuna_dsat.errors import UsageError
from optuna_dsat.script.command.launch_command import read_command
from optuna_dsat.script.command.launcher_options import (
    MOST_SLOTS,
    gpu_indices,
    nodes_of_torchrun,
    ranks_of_torchrun,
    read_options,
    slots_of,
)
from optuna_dsat.script.command.stand_ins import StandInUsedError, imported_alone

REFUSED = [
    "torchrun --nproc_per_node abc train.py",
    "torchrun --nproc_per_node=-3 train.py",
    "torchrun --nproc-per-node 0 train.py",
    "torchrun --nproc-per-node 2.5 train.py",
    f"torchrun --nproc-per-node {'9' * 5000} train.py",
    "torchrun --nnodes x train.py",
    "torchrun --nnodes 0 train.py",
    "torchrun --nnodes 2:1 train.py",
    "torchrun --nnodes 1:2:3 train.py",
    "torch.distributed.launch --nproc_per_node abc train.py",
    "deepspeed --num_gpus=-3 train.py",
    "deepspeed --num_gpus 0 train.py",
    "deepspeed --num_nodes=-2 train.py",
    "deepspeed --include localhost:a train.py",
    "deepspeed --include localhost:0-99999999999 train.py",
    "deepspeed --exclude localhost:3-1 train.py",
    "deepspeed --exclude localhost:0 --include localhost:1 train.py",
    "deepspeed --num_gpus 2 --include localhost:1 train.py",
    "accelerate launch --num_processes 0 train.py",
    "accelerate launch --num_processes=-3 train.py",
    "accelerate launch --num_machines 0 --num_processes 2 train.py",
    "accelerate launch --use_deepspeed --num_processes 2 --gpu_ids a,b train.py",
]


@pytest.mark.parametrize("command", REFUSED)
def test_values_that_no_launch_takes_are_refused_with_the_option(command: str) -> None:
    launcher, *words = command.split()
    with pytest.raises(ValueError, match="--") as refused:
        read_options(launcher, words)
    assert len(str(refused.value).replace("9" * 5000, "")) < 200


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("torchrun --nproc_per_node abc train.py", "--nproc-per-node is a number"),
        ("deepspeed --num_gpus abc train.py", "argument --num_gpus/--num_accelerators: invalid int value: 'abc'"),
        ("accelerate launch --num_processes zero train.py", "num-processes: invalid int value: 'zero'"),
        ("python -m torch.distributed.run --nnodes x train.py", "--nnodes is a number from 1, or LEAST:MOST; got 'x'"),
    ],
)
def test_a_refusal_is_one_line_of_the_reason(tmp_path: Path, command: str, reason: str) -> None:
    with pytest.raises(UsageError) as refused:
        read_command(command.split(), cwd=tmp_path)
    assert reason in str(refused.value)
    assert "launcher_options" not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_values_that_a_launch_takes_are_read() -> None:
    assert [ranks_of_torchrun(one) for one in ("1", "8", "auto", "gpu", "npu")] == [1, 8, None, None, None]
    assert [nodes_of_torchrun(one) for one in ("1", "1:1", "2:4")] == [1, 1, 4]
    assert slots_of("0,2-3", "--include") == [0, 2, 3]
    assert slots_of("", "--include") == []
    assert len(slots_of(f"0-{MOST_SLOTS - 1}", "--include")) == MOST_SLOTS
    assert gpu_indices("0,GPU-1a2b,MIG-3c", "--gpu_ids") == "0,GPU-1a2b,MIG-3c"


COMMANDS = [
    "torchrun --standalone --nproc_per_node 2 --numa-binding=node -m pkg.train --lr 1",
    "torch.distributed.launch --nproc_per_node 2 train.py",
    "deepspeed --num_gpus 8 train.py --deepspeed_config ds.json",
    "deepspeed --hostfile hosts --include w0:1,2@w1:0,3 --module pkg.train",
    "accelerate launch --config_file acc.yaml train.py --lr 3",
    "accelerate launch train.py",
    "accelerate launch --num_processes 2 --mixed_precision bf16 train.py",
    "accelerate launch --multi_gpu train.py",
    "accelerate launch --use_deepspeed --zero_stage 2 --num_processes 4 --num_machines 2 train.py",
]
SHOW = """
import json, sys
from optuna_dsat.script.command.launch_command import as_json
from optuna_dsat.script.command.launcher_options import read_options
for real in (False, True):
    if real:
        assert not {"torch", "deepspeed", "accelerate", "safetensors"} & {one.split(".")[0] for one in sys.modules}
        import accelerate, deepspeed.launcher.runner, torch.distributed.launch
    print(json.dumps([as_json(read_options(one.split()[0], one.split()[1:])) for one in json.loads(sys.argv[1])]))
"""


def test_a_parser_alone_reads_the_same_as_with_all_of_its_library(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("w0 slots=4\nw1 slots=4\n")
    (tmp_path / "acc.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndeepspeed_config: {zero_stage: 2, gradient_accumulation_steps: 3}\n"
        "distributed_type: DEEPSPEED\nmixed_precision: 'no'\nnum_machines: 1\nnum_processes: 2\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", SHOW, json.dumps(COMMANDS)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    alone, real = (json.loads(line) for line in done.stdout.splitlines() if line.startswith('["'))
    assert alone == real
    assert len(alone) == len(COMMANDS)


PACKAGE = {
    "__init__.py": "raise RuntimeError('this takes seconds')\n",
    "heavy.py": "raise RuntimeError('so does this')\n",
    "runner.py": (
        "from dsat_heavy.heavy import Base, count, decorated\n"
        "class Own(Base): ...\n"
        "@decorated\ndef main(): ...\n"
        "def noted(one: count | None): ...\n"
        "def parse(word): return word.upper()\n"
        "def counted(): return count() + 1\n"
        "def chosen(): return 1 if count else 2\n"
        "def listed(): return [*count]\n"
    ),
}


def test_what_a_stand_in_cannot_do_is_never_done_with_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dsat_heavy").mkdir()
    for name, text in PACKAGE.items():
        (tmp_path / "dsat_heavy" / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with imported_alone({"dsat_heavy.runner"}) as stage:
        import dsat_heavy.runner as runner  # type: ignore[import-not-found]

        stage.end_imports()
        assert runner.parse("a") == "A"
        for used in (runner.counted, runner.chosen, runner.listed, lambda: runner.main(), lambda: str(runner.count)):
            with pytest.raises(StandInUsedError):
                used()
    assert not any(name.startswith("dsat_heavy") for name in sys.modules)
    monkeypatch.setitem(sys.modules, "dsat_heavy", runner)
    with pytest.raises(StandInUsedError), imported_alone({"dsat_heavy.runner"}):
        raise AssertionError("what is imported already is used as it is")
