"""A script with a settings file; other kinds are in ``test_printed_commands``."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.harness.commands import PLAIN_CONFIG, Command

SCRIPTS = Path(__file__).parents[1] / "scripts" / "first_try"
OPTIONS = (
    *("--cpu-ranks", "1", "--zero-stages", "1", "--no-tune", "offload_optimizer", "--confirm", "0", "--json"),
    *("--metric", "throughput", "--start-profile-step", "2", "--end-profile-step", "3", "--max-trials", "1"),
)


pytestmark = pytest.mark.torchrun


def test_a_nested_field_of_a_settings_file(tmp_path: Path) -> None:
    settings = tmp_path / "run.yaml"
    settings.write_text("epochs: 2\ndata: {loader: {batch_size: 3, workers: 0}}\n")
    fixed = ("--fix", "train_micro_batch_size_per_gpu=6", "--no-enqueue-user-config")
    (tmp_path / "ds.json").write_text(json.dumps(PLAIN_CONFIG))
    tuned = Command(tmp_path, "random", *OPTIONS, *fixed, str(SCRIPTS / "settings.py"), "--", str(settings))
    output, errors = tuned.finish()
    result = json.loads(output)
    assert "batch size from data.loader.batch_size in run.yaml (now 3)" in errors
    assert result["user_train_batch_size"] == 3
    assert result["config"]["train_micro_batch_size_per_gpu"] == 6, "twice the samples in hardly more time"
    copy = Path(result["config_path"]).with_name("best_run.yaml")
    assert "optuna-dsat train settings-random" in result["command"], "its config is built in code"
    assert result["advice"] == ""
    assert "batch_size: 3" in settings.read_text(), "the file is the user's"
    assert copy.read_text() == "epochs: 2\ndata:\n  loader:\n    batch_size: 6\n    workers: 0\n"
    run = subprocess.run(shlex.split(result["command"]), cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "trained with 6" in run.stdout
