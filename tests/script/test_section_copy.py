"""A DeepSpeed config that is a section of a script's settings file is handed over in a copy of that file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from optuna_dsat.config.ds_config import GRADIENT_ACCUMULATION, MICRO_BATCH, TRAIN_BATCH
from optuna_dsat.script.section_copy import section_copy
from optuna_dsat.script.settings_file import SettingsCopy

OWN: dict[str, Any] = {
    MICRO_BATCH: 4,
    "optimizer": {"params": {"lr": 0.001, "eps": 1e-08}},
    "zero_optimization": {"stage": 1},
}
BEST = {**OWN, TRAIN_BATCH: 16, MICRO_BATCH: 8, GRADIENT_ACCUMULATION: 2, "zero_optimization": {"stage": 2}}
LINES = """\
# mine
seed: 1
training:
  steps: 60   # as many as needed
  deepspeed:
    train_micro_batch_size_per_gpu: 4
    optimizer: {params: {lr: 0.001, eps: 1.0e-08}}
    zero_optimization:
      stage: 1  # to be tuned

  # what follows
  batch_size: 4
"""
EXPECTED = {"seed": 1, "training": {"steps": 60, "deepspeed": BEST, "batch_size": 4}}


def copied(
    folder: Path, text: str, *, name: str = "run.yaml", source: dict[str, Any] | None = None
) -> SettingsCopy | None:
    (folder / name).write_text(text)
    args = ("--config", name, "--seed", "2")
    return section_copy(source or {}, BEST, own=OWN, args=args, cwd=str(folder), folder=folder / "out")


def test_the_section_changes_and_nothing_else_does(tmp_path: Path) -> None:
    copy = copied(tmp_path, LINES)
    assert copy is not None
    assert yaml.safe_load(copy.text) == EXPECTED
    for kept in ("# mine\n", "steps: 60   # as many as needed\n", "  # what follows\n"):
        assert kept in copy.text
    assert copy.names_config
    assert copy.pointed(("--config=run.yaml",), cwd=str(tmp_path)) == [f"--config={tmp_path}/out/best_run.yaml"]


@pytest.mark.parametrize("indent", [None, 4])
def test_json_stays_json(tmp_path: Path, indent: int | None) -> None:
    settings = {"seed": 1, "training": {"steps": 60, "deepspeed": OWN, "batch_size": 4}}
    copy = copied(tmp_path, json.dumps(settings, indent=indent), name="run.json")
    assert copy is not None
    assert json.loads(copy.text) == EXPECTED


def test_a_section_in_one_line_of_yaml(tmp_path: Path) -> None:
    own = json.dumps(OWN).replace("1e-08", "1.0e-08")
    text = f"seed: 1\ndeepspeed: {own}  # mine\nsteps: 3\n"
    copy = copied(tmp_path, text)
    assert copy is not None
    assert yaml.safe_load(copy.text) == {"seed": 1, "deepspeed": BEST, "steps": 3}


@pytest.mark.parametrize(
    ("key", "batch_size"), [("training.batch_size", 8), ("training.deepspeed.train_micro_batch_size_per_gpu", 4)]
)
def test_the_batch_size_changes_where_the_script_reads_it(tmp_path: Path, key: str, batch_size: int) -> None:
    source = {"kind": "setting", "file": str(tmp_path / "run.yaml"), "key": key, "own": 4}
    copy = copied(tmp_path, LINES, source=source)
    assert copy is not None
    result = yaml.safe_load(copy.text)["training"]
    assert (result["batch_size"], result["deepspeed"]) == (batch_size, BEST)


@pytest.mark.parametrize(
    "text",
    [
        LINES.replace("lr: 0.001", "lr: 0.002"),
        LINES + "other:\n  zero_optimization: {stage: 1}\n  train_micro_batch_size_per_gpu: 4\n",
        LINES.replace("optimizer: ", "optimizer: &shared ") + "again: *shared\n",
        LINES.replace("deepspeed:", "deepspeed: &all") + "again: *all\n",
        "training: [",
    ],
    ids=["another config", "two of them", "a part used elsewhere", "used elsewhere", "no yaml"],
)
def test_what_cannot_be_told_or_replaced_is_left_to_the_user(tmp_path: Path, text: str) -> None:
    assert copied(tmp_path, text) is None


def test_a_batch_size_that_follows_by_something_else_leaves_the_file(tmp_path: Path) -> None:
    assert copied(tmp_path, LINES, source={"kind": "loader", "own": 4}) is None
