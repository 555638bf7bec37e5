"""A data set smaller than the user's own micro-batch bounds the search instead of ending it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness.commands import Command
from tests.system.test_first_try import CONFIG, OPTIONS, SCRIPTS

pytestmark = pytest.mark.torchrun


def test_a_pipeline_with_fewer_samples_than_its_micro_batch(tmp_path: Path) -> None:
    config = {**CONFIG, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    command = Command(tmp_path, "random", *OPTIONS, str(SCRIPTS / "few_samples.py"), "ds.json", "--", "ds.json")
    output, errors = command.finish()
    found = json.loads(output)
    assert errors.count("The training data give a rank 5 samples in an epoch") == 1
    assert "Your own, 8, is not reached" in errors
    assert found["config"]["train_micro_batch_size_per_gpu"] <= 5
    assert found["user_value"] is None
    assert "invalid_config" not in found["launches"]
