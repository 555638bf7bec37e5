"""Scripts of the kinds that people have, tuned by the command that they type today."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.harness.commands import Command

SCRIPTS = Path(__file__).parents[1] / "scripts" / "first_try"
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}
OPTIONS = (
    *("--cpu-ranks", "1", "--zero-stages", "1", "--no-tune", "offload_optimizer", "--confirm", "0", "--json"),
    *("--metric", "throughput", "--start-profile-step", "2", "--end-profile-step", "3", "--max-trials", "2"),
)

ONE_LAUNCH = ("--fix", "train_micro_batch_size_per_gpu=6", "--max-trials", "1", "--no-enqueue-user-config")

pytestmark = pytest.mark.torchrun


def tuned(folder: Path, *command: str) -> tuple[dict[str, Any], str]:
    (folder / "ds.json").write_text(json.dumps(CONFIG))
    output, errors = Command(folder, "random", *OPTIONS, *command).finish()
    found: dict[str, Any] = json.loads(output)
    return found, errors


def test_a_launchers_command_without_any_config(tmp_path: Path) -> None:
    found, errors = tuned(
        tmp_path, "torchrun", "--nproc_per_node", "1", str(SCRIPTS / "option.py"), "--batch-size", "3"
    )
    assert "batch size from --batch-size (now 3)" in errors
    size = found["config"]["train_micro_batch_size_per_gpu"]
    assert 1 <= size <= 24, "the data hold 24 samples"
    assert found["config"]["optimizer"] == CONFIG["optimizer"]
    assert "optuna-dsat train option-random" in found["command"], "its config is built in code"
    assert found["user_train_batch_size"] == 3


def test_an_option_that_sets_the_stage_in_the_trials_and_in_the_printed_command(tmp_path: Path) -> None:
    launch = ("torchrun", "--nproc_per_node", "1", str(SCRIPTS / "staged.py"), "--stage", "3")
    found, errors = tuned(tmp_path, *ONE_LAUNCH, "--zero-stages", "0", *launch)
    assert "ZeRO stage from --stage; it follows" in errors
    assert found["config"]["zero_optimization"]["stage"] == 1, "the script accepts no 0"
    run = subprocess.run(shlex.split(found["command"]), cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "option 1, ZeRO 1" in run.stdout


def test_a_constant_and_a_config_that_is_named_to_the_tuner_alone(tmp_path: Path) -> None:
    found, errors = tuned(tmp_path, *ONE_LAUNCH, str(SCRIPTS / "constant.py"), "ds.json")
    assert "its data loader (constant.py, line 14, now 4)" in errors
    assert found["user_train_batch_size"] == 4
    assert "optuna-dsat train constant-random" in found["command"], "its batch size is a constant"
    assert found["config"]["train_micro_batch_size_per_gpu"] == 6
    assert "constant.py:14 to 6" in found["advice"]


def test_a_batch_size_that_cannot_change_is_kept(tmp_path: Path) -> None:
    found, errors = tuned(tmp_path, str(SCRIPTS / "fixed.py"), "ds.json", "--", "ds.json")
    assert "the micro-batch stays 2" in errors
    assert found["config"]["train_micro_batch_size_per_gpu"] == 2


def test_a_script_that_trains_without_deepspeed_is_stopped_and_told_why(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    _, errors = Command(tmp_path, "random", *OPTIONS, str(SCRIPTS / "without.py"), "ds.json").finish(code=4)
    assert "the script trains without DeepSpeed" in errors
    assert not (tmp_path / "model.pt").exists()


def test_accelerate_without_a_config_gets_one_and_the_printed_command_has_it(tmp_path: Path) -> None:
    found, errors = tuned(tmp_path, *ONE_LAUNCH, str(SCRIPTS / "accelerated.py"), "ds.json")
    assert "batch size from --batch-size (now 4)" in errors
    variables = ("ACCELERATE_USE_DEEPSPEED=true", f"ACCELERATE_DEEPSPEED_CONFIG_FILE={found['config_path']}")
    assert all(one in shlex.split(found["command"]) for one in variables), found["command"]
    assert "optimizer" not in found["config"], "the script builds its own"
    assert not (tmp_path / "logs").exists(), "the tracker writes into the launch's folder"


def test_a_nested_field_of_a_settings_file(tmp_path: Path) -> None:
    settings = tmp_path / "run.yaml"
    settings.write_text("epochs: 2\ndata: {loader: {batch_size: 3, workers: 0}}\n")
    fixed = ("--fix", "train_micro_batch_size_per_gpu=6")
    found, errors = tuned(tmp_path, *fixed, str(SCRIPTS / "settings.py"), "--", str(settings))
    assert "batch size from data.loader.batch_size in run.yaml (now 3)" in errors
    assert found["user_train_batch_size"] == 3
    assert found["config"]["train_micro_batch_size_per_gpu"] == 6, "twice the samples in hardly more time"
    copy = Path(found["config_path"]).with_name("best_run.yaml")
    assert "optuna-dsat train settings-random" in found["command"], "its config is built in code"
    assert found["advice"] == ""
    assert "batch_size: 3" in settings.read_text(), "the file is the user's"
    assert copy.read_text() == settings.read_text().replace("batch_size: 3", "batch_size: 6")
    run = subprocess.run(shlex.split(found["command"]), cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "trained with 6" in run.stdout


def test_an_application_of_hydras(tmp_path: Path) -> None:
    pytest.importorskip("hydra")
    found, errors = tuned(tmp_path, *ONE_LAUNCH, str(SCRIPTS / "hydra_app.py"))
    assert "batch size from data.batch_size (now 3)" in errors
    assert "optuna-dsat train hydra_app-random" in found["command"], "its config is built in code"
    assert not (tmp_path / "outputs").exists(), "Hydra's folders stay with the launches"
    run = subprocess.run(
        [*shlex.split(found["command"]), "--", "epochs=1"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "trained with 6" in run.stdout


def test_a_function_that_python_fire_calls(tmp_path: Path) -> None:
    pytest.importorskip("fire")
    command = ("torchrun", "--nproc_per_node", "1", str(SCRIPTS / "fired.py"), "train")
    found, errors = tuned(tmp_path, *ONE_LAUNCH, *command)
    assert "batch size from --batch_size (now 3)" in errors
    assert "optuna-dsat train fired-random" in found["command"], "its config is built in code"


def test_a_trainer_whose_arguments_stand_in_a_file(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    settings = tmp_path / "run.yaml"
    settings.write_text(
        "output_dir: out\nper_device_train_batch_size: 3\nper_device_eval_batch_size: 3\nmax_steps: 2\n"
        "learning_rate: 1.0e-3\nreport_to: none\n"
    )
    command = ("python", str(SCRIPTS / "trainer_file.py"), "run.yaml", "ds.json")
    found, errors = tuned(tmp_path, *ONE_LAUNCH, *command)
    assert "per_device_train_batch_size in run.yaml (now 3) and gradient_accumulation_steps (now 1) follow" in errors
    copy = Path(found["config_path"]).with_name("best_run.yaml")
    assert found["command"].endswith(f"trainer_file.py {copy} {found['config_path']}")
    assert copy.read_text() == settings.read_text().replace("train_batch_size: 3", "train_batch_size: 6")
    assert found["advice"] == ""
    run = subprocess.run(shlex.split(found["command"]), cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "trained with 6" in run.stdout


def test_a_trainer_whose_batch_sizes_are_options_of_another_name(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    given = ("--train-batch-size", "3", "--deepspeed", "ds.json")
    found, errors = tuned(tmp_path, *ONE_LAUNCH, "python", str(SCRIPTS / "trainer_clicked.py"), *given)
    assert "--train-batch-size (now 3) and --accumulate (now 1) follow" in errors
    assert "--train-batch-size 6" in found["command"]
    assert found["command"].endswith(f"--deepspeed {found['config_path']} --accumulate 1")
    assert found["advice"] == ""
