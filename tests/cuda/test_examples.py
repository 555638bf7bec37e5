"""Every example but the pipeline, whose stages would have to send each other something, on two of eight GPUs.

Lightning runs on one: its ranks send each other the name of a folder, which takes a sum that a kernel would compute.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cuda.machine import Machine
from tests.cuda.tuning import GPT, QUICK, SMALL_GPT, Search, copy_example, copy_gpt, ran_as_they_should

BY_FLAG = ("--", "--deepspeed_config", "ds_config.json")


@dataclass(frozen=True)
class Example:
    """One way in which a script uses DeepSpeed."""

    folder: str
    command: tuple[str, ...]
    flags: tuple[str, ...] = ()
    visible: str = "4,1"
    launches: int = 2


EXAMPLES = {
    "gpt": Example("gpt", GPT, SMALL_GPT),
    "by_flag": Example("plain", ("random", "by_flag.py", "ds_config.json"), ("--", "--deepspeed", *BY_FLAG[1:])),
    "by_path": Example("plain", ("random", "by_path.py", "ds_config.json"), ("--", "--deepspeed", "ds_config.json")),
    "in_code": Example(
        "plain",
        ("random", "in_code.py", "ds_config.json", "--arg-mapping", "train_micro_batch_size_per_gpu=--micro-batch"),
        ("--", "--accumulate", "1"),
    ),
    "two_engines": Example("plain", ("random", "two_engines.py", "ds_config.json"), BY_FLAG),
    "core_api": Example("core_api", ("random", "train.py", "ds_config.json")),
    "module": Example("module", ("random", "--no-continue", "-m", "trainer.train", "ds_config.json"), BY_FLAG),
    "huggingface": Example(
        "huggingface",
        ("random", "train.py", "ds_config.json"),
        ("--", "--deepspeed", "ds_config.json", "--output_dir", "output", "--do_train", "--do_eval"),
    ),
    "accelerate": Example(
        "accelerate",
        ("random", "train.py", "ds_config.json", "--arg-mapping", "train_micro_batch_size_per_gpu=--batch-size"),
        ("--", "--config", "ds_config.json", "--batch-size", "8"),
        launches=3,  # one shows that --zero-stage does not set the stage here
    ),
    "lightning": Example(
        "lightning", ("random", "train.py", "ds_config.json"), ("--", "--config", "ds_config.json"), visible="4"
    ),
    "deepspeed_trial": Example(
        "deepspeed_trial", ("random", "model_def:MyTrial", "ds_config.json", "--hparams", "hparams.yaml")
    ),
}


@pytest.mark.parametrize("launcher", ["torchrun", "warm"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_tuned(machine: Machine, tmp_path: Path, name: str, launcher: str) -> None:
    example = EXAMPLES[name]
    folder = copy_gpt(tmp_path) if name == "gpt" else copy_example(example.folder, tmp_path)
    options = (*QUICK, "--max-trials", "1", "--launcher", launcher, "--json")
    search = Search(machine, folder, *example.command, *options, *example.flags, visible=example.visible).finish()
    gpus = [int(number) for number in example.visible.split(",")]
    assert search.result["launches"] == {"measured": 1}
    assert [launch.report["devices"] for launch in search.launches] == [gpus] * example.launches
    for launch in search.launches:
        assert {step["rank"] for step in launch.events("step_measured")} == set(range(len(gpus)))
    ran_as_they_should(search, forked=launcher == "warm")


def test_a_search_from_python_is_warm(machine: Machine, tmp_path: Path) -> None:
    folder = copy_example("python_api", tmp_path)
    copy_example("gpt", tmp_path)
    search = Search(machine, folder, "tune.py", "--max-trials", "2", program=(str(machine.python),)).finish()
    assert search.output.rstrip().splitlines()[-1].startswith("Train with it: ")
    assert len(search.trials) in (2, 3)  # the third measures the best without its drawn settings
    ran_as_they_should(search, forked=True)


def test_the_notebook_tunes_on_gpus(machine: Machine, tmp_path: Path) -> None:
    folder = copy_example("notebook", tmp_path)
    copy_example("plain", tmp_path)
    cells = json.loads((folder / "tune.ipynb").read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    search = Search(machine, folder, code, program=(str(machine.python), "-c")).finish()
    assert len(search.trials) == 2
    ran_as_they_should(search, forked=True)


def test_an_objective_of_ones_own_stays_on_the_cpu(machine: Machine, tmp_path: Path) -> None:
    folder = copy_example("own_objective", tmp_path)
    arguments = ("objective.py", "--trials", "4", "--memory-mib", "4")
    search = Search(machine, folder, *arguments, program=(str(machine.python),)).finish()
    assert search.output.splitlines()[-1].startswith("Best: {")
    assert machine.calls("cuMemAlloc") == []
