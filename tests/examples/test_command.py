"""The whole command on a module, and a launch of a script that does not follow its config."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from optuna_dsat.outcome import Outcome
from tests.harness.commands import Command

from .conftest import CONFIG, ROOT, Launch, copy_example

pytestmark = pytest.mark.torchrun
EXAMPLE = "plain"
OWN_BATCH = ROOT / "tests" / "scripts" / "own_batch.py"

STORAGE = ("--storage", "sqlite:///study.db")
OPTIONS = (
    *STORAGE,
    *("--cpu-ranks", "2", "--zero-stages", "1", "--max-trials", "1", "--confirm", "0", "--metric", "throughput"),
    *("--start-profile-step", "2", "--end-profile-step", "3"),
)


def test_a_module_is_tuned_and_resumed_as_a_script_is(tmp_path: Path) -> None:
    folder = copy_example("module", tmp_path)
    flags = ("--", "--deepspeed_config", CONFIG)
    tuned = Command(folder, "random", "-m", "trainer.train", CONFIG, *OPTIONS, "--quiet", "--json", *flags)
    result = json.loads(tuned.finish()[0])
    assert result["study"] == "train-random"
    assert result["launches"] == {"measured": 1}
    best = folder / "optuna-dsat-output" / "train-random" / "best_ds_config.json"
    assert result["command"].endswith(f"--nproc_per_node 2 -m trainer.train --deepspeed_config {best}")
    command = best.parent / "trial-0000" / "command.json"
    assert json.loads(command.read_text())["command"][-4:-2] == ["--module", "trainer.train"]
    again = Command(folder, "resume", "train-random", *STORAGE, "--quiet", "--json").finish()[0]
    assert json.loads(again)["value"] == result["value"]
    (folder / "trainer" / "train.py").unlink()
    _, errors = Command(folder, "resume", "train-random", *STORAGE).finish(code=2)
    assert errors.startswith("optuna-dsat: The module trainer.train is not found from ")


def test_a_mapped_option_is_the_remedy(launch: Launch) -> None:
    mapped = {"train_micro_batch_size_per_gpu": "--batch-size"}
    launched = launch(str(OWN_BATCH), overlay={"train_micro_batch_size_per_gpu": 3}, arg_mappings=mapped)
    assert launched.report.outcome is Outcome.MEASURED, launched.report
    assert {step.observed_micro_batch for step in launched.steps} == {3}
    assert launched.engine.config_differences == {"optimizer.type": ["Adam", "AdamW"]}
