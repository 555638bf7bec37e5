"""The full command with a script that uses the Hugging Face Trainer."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest

from tests.harness.commands import Command

pytestmark = pytest.mark.torchrun

EXAMPLE = Path(__file__).parents[2] / "examples" / "huggingface"


def test_the_trainers_batch_sizes_follow_the_config_up_to_the_command_that_trains(tmp_path: Path) -> None:
    shutil.copy(EXAMPLE / "ds_config.json", tmp_path)
    command = Command(
        tmp_path,
        *("random", str(EXAMPLE / "train.py"), "ds_config.json", "--study", "hf", "--cpu-ranks", "2", "--json"),
        *("--zero-stages", "3", "--no-tune", "offload_optimizer", "--no-tune", "offload_param"),
        *("--fix", "train_micro_batch_size_per_gpu=3", "--no-enqueue-user-config", "--max-trials", "1"),
        *("--confirm", "0", "--start-profile-step", "2", "--end-profile-step", "3"),
        *("--", "--deepspeed", "ds_config.json", "--output_dir", "out", "--do_train", "--do_eval"),
        *("--per-device-train-batch-size", "5", "--gradient_accumulation_steps=2", "--samples", "8"),
        "--use_cpu",
    )
    output, errors = command.finish()
    result = json.loads(output)
    follow = [line for line in errors.splitlines() if "follow each configuration" in line]
    assert follow == [
        "The script trains with the Hugging Face Trainer: --per_device_train_batch_size (now 5) and "
        "--gradient_accumulation_steps (now 2) follow each configuration."
    ]
    config = json.loads(Path(result["config_path"]).read_text(encoding="utf-8"))
    assert config == result["config"]
    assert (config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]) == (3, 2)
    assert (config["train_batch_size"], config["zero_optimization"]["stage"]) == (12, 3)
    assert config["optimizer"]["params"]["lr"] == "auto"
    words = shlex.split(result["command"])
    assert words[words.index("--deepspeed") + 1] == result["config_path"]
    assert words[words.index("--per-device-train-batch-size") + 1] == "3"
    assert "--gradient_accumulation_steps=2" in words
    assert "--per_device_train_batch_size" not in words
    assert result["advice"] == ""
    assert [*(tmp_path / "out").rglob("*")] == []
