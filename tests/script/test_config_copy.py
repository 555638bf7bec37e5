"""A DeepSpeed config in YAML that a script reads by itself is handed over whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from optuna_dsat.config.ds_config import GRADIENT_ACCUMULATION, MICRO_BATCH, TRAIN_BATCH
from optuna_dsat.script.config_copy import config_copy
from optuna_dsat.script.settings_file import SettingsCopy

OWN: dict[str, Any] = {
    "block_size": 32, TRAIN_BATCH: 64, MICRO_BATCH: 8, "optimizer": {"params": {"lr": 1e-05}},
    "zero_optimization": {"stage": 1},
}  # fmt: skip
BEST = {**OWN, TRAIN_BATCH: 8, MICRO_BATCH: 2, GRADIENT_ACCUMULATION: 4, "zero_optimization": {"stage": 0}}


def copied(folder: Path, *, own: dict[str, Any] = OWN, name: str = "ds.yml", **source: Any) -> SettingsCopy | None:
    file = folder / name
    file.write_text("# mine\n" + yaml.safe_dump(OWN))
    return config_copy(
        {"kind": "setting", "file": str(file), "key": MICRO_BATCH, "own": 8, **source},
        BEST,
        own=own,
        args=("--deepspeed_config", "ds.yml"),
        cwd=str(folder),
        folder=folder / "out",
    )


def test_it_holds_the_best_config_with_every_batch_size_and_numbers_that_yaml_reads_as_numbers(tmp_path: Path) -> None:
    copy = copied(tmp_path)
    assert copy is not None
    assert yaml.safe_load(copy.text) == BEST
    assert copy.pointed(("--deepspeed_config", "ds.yml"), cwd=str(tmp_path))[1] == f"{tmp_path}/out/best_ds.yml"


def test_a_config_that_the_batch_size_follows_is_found_among_the_arguments(tmp_path: Path) -> None:
    for name, text in (("other.yaml", "lr: 3\n"), ("ds.yml", yaml.safe_dump(OWN))):
        (tmp_path / name).write_text(text)
    args = ("--model=other.yaml", "--config=ds.yml", "\0", "none.yml")
    copy = config_copy({}, BEST, own=OWN, args=args, cwd=str(tmp_path), folder=tmp_path / "out")
    assert copy is not None
    assert yaml.safe_load(copy.text) == BEST
    assert copy.pointed(args, cwd=str(tmp_path))[1] == f"--config={tmp_path}/out/best_ds.yml"
    assert config_copy({}, BEST, own=OWN, args=args[:1], cwd=str(tmp_path), folder=tmp_path) is None


def test_what_the_script_adds_to_its_file_is_left_to_it(tmp_path: Path) -> None:
    added = {"steps_per_print": 7, "optimizer": {"params": {"lr": 1e-05, "betas": [0.9, 0.95]}}}
    tuned = {**BEST, **added, "zero_optimization": {"stage": 0, "overlap_comm": True}}
    (tmp_path / "ds.yml").write_text(yaml.safe_dump(OWN))
    copy = config_copy({}, tuned, own={**OWN, **added}, args=("ds.yml",), cwd=str(tmp_path), folder=tmp_path / "out")
    assert copy is not None
    assert yaml.safe_load(copy.text) == {**BEST, "zero_optimization": {"stage": 0, "overlap_comm": True}}


def test_what_is_not_told_of_a_config_stays_in_the_file(tmp_path: Path) -> None:
    unsaid = {"steps_per_print": 20, "fp16": {"enabled": False}, "autotuning": {"enabled": True}}
    own, best = {**OWN, "fp16": {"loss_scale": 0}}, {**BEST, "fp16": {"loss_scale": 0}}
    (tmp_path / "ds.yml").write_text(yaml.safe_dump({**own, **unsaid, "fp16": {"loss_scale": 0, "enabled": False}}))
    copy = config_copy({}, best, own=own, args=("ds.yml",), cwd=str(tmp_path), folder=tmp_path / "out")
    assert copy is not None
    assert yaml.safe_load(copy.text) == {
        **best, "steps_per_print": 20, "fp16": {"loss_scale": 0, "enabled": False},
    }  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"own": {**OWN, "zero_optimization": {"stage": 2}}},
        {"key": f"deepspeed.{MICRO_BATCH}"},
        {"kind": "loader"},
        {"name": "other.yml"},
        {"name": "ds.json"},
    ],
    ids=["the script changes it", "a part of the file", "nothing of a file", "no argument names it", "no YAML"],
)
def test_there_is_none_where_the_script_passes_something_else(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert copied(tmp_path, **changes) is None
