"""Real launches of libraries that read the DeepSpeed config before ``deepspeed.initialize`` does."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from optuna_dsat.launch.follow import follow
from optuna_dsat.runtime.events import (
    ConfigDiffers,
    EngineReady,
    EnvironmentSet,
    RankFinished,
    StepMeasured,
    TrainerFound,
)
from optuna_dsat.study.profile import profile
from tests.harness.entry_points import EntryPointBench, Run, bench, run_here
from tests.harness.ranks import USER_CONFIG, Launch, Starter, WarmRanks, script

__all__ = ["bench", "run_here"]

pytestmark = pytest.mark.torchrun

EXAMPLES = Path(__file__).parents[2] / "examples"
RANKS = (0, 1)


def config_of(example: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((EXAMPLES / example / "ds_config.json").read_text(encoding="utf-8"))
    return config


def overlay(*, stage: int, micro_batch: int, accumulation: int) -> dict[str, Any]:
    return {
        "train_batch_size": None,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage},
    }


def printed(launch: Launch) -> Any:
    """Return the first JSON object that the script printed."""
    return json.loads(next(line for line in launch.log("stdout").splitlines() if line.startswith('{"')))


def check(launch: Launch, *, stage: int, micro_batch: int, accumulation: int, steps: int = 5) -> None:
    """Check that both ranks ran the overlay's settings up to the last measured step."""
    assert launch.exit_code == 0, launch.output + launch.log("stderr")
    for rank in RANKS:
        engine = launch.of(EngineReady, rank)[0]
        assert (engine.zero_stage, engine.train_micro_batch_size_per_gpu) == (stage, micro_batch)
        assert (engine.gradient_accumulation_steps, engine.data_parallel_size) == (accumulation, 2)
        measured = launch.of(StepMeasured, rank)
        assert [step.step for step in measured] == [*range(1, steps + 1)]
        assert {step.observed_micro_batch for step in measured} == {micro_batch}
        assert {step.samples for step in measured} == {micro_batch * accumulation}
        assert launch.of(RankFinished, rank)[0].reason == "profile_done"


def test_a_trainer_set_up_in_code_runs_the_trial_and_nothing_beside(tmp_path: Path, warm_ranks: WarmRanks) -> None:
    start = Starter(tmp_path, config_of("huggingface"))
    output = tmp_path / "output"
    launch = start.torchrun(
        "trainer_in_code.py",
        str(start.user_config),
        str(output),
        overlay=overlay(stage=3, micro_batch=3, accumulation=2),
        warm=warm_ranks,
    )
    check(launch, stage=3, micro_batch=3, accumulation=2)
    assert printed(launch) == {
        "zero_3": True,
        "partitioned": True,
        "stage": 3,
        "bucket": "auto",  # the Trainer fills it in from the model
        "batch": [3, 2],
        "report_to": [],
        "evaluated": ["eval_loss"],
    }
    assert [*output.rglob("*")] == []
    assert launch.of(EngineReady)[0].joins_ranks
    for rank in RANKS:
        [trainer] = launch.of(TrainerFound, rank)
        assert (trainer.framework, trainer.micro_batch, trainer.gradient_accumulation_steps) == ("transformers", 16, 4)
        assert trainer.options == {}
    assert "per_device_train_batch_size 3 (the script has 16)" in launch.log("stderr")


@pytest.mark.parametrize("by", ["environment", "code"])
def test_accelerates_plugin_follows_the_trial(tmp_path: Path, by: str, warm_ranks: WarmRanks) -> None:
    config = {**config_of("accelerate"), "gradient_accumulation_steps": "auto"}
    config["zero_optimization"]["stage"] = "auto"
    start = Starter(tmp_path, config)
    arguments = ["--batch-size", "4", "--samples", "256", "--accumulate", "2"]
    environ = {}
    if by == "environment":
        environ = {
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(start.user_config),
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "8",
        }
    else:
        arguments += ["--zero-stage", "2"]
    path = EXAMPLES / "accelerate" / "train.py"
    text = f"import os, runpy\nos.environ.update({environ})\nrunpy.run_path({str(path)!r}, run_name='__main__')\n"
    chosen = overlay(stage=1, micro_batch=4, accumulation=3)
    chosen["zero_optimization"]["reduce_bucket_size"] = 5000
    launch = start.torchrun(script(start, text), *arguments, overlay=chosen, warm=warm_ranks)
    check(launch, stage=1, micro_batch=4, accumulation=3)
    assert not launch.of(EngineReady)[0].joins_ranks, "the script names a backend"
    result = launch.of(EngineReady)[0].config_differences
    assert result["gradient_accumulation_steps"] == [2, "auto"]
    assert result["zero_optimization.stage"] == [2, "auto"]
    assert not (tmp_path / "checkpoint").exists()


def test_what_is_given_in_code_alone_is_told_whatever_the_launch_runs(tmp_path: Path, warm_ranks: WarmRanks) -> None:
    climbed = {**overlay(stage=3, micro_batch=4, accumulation=1)}
    climbed["zero_optimization"]["offload_optimizer"] = {"device": "none"}
    start = Starter(tmp_path, {})
    launch = start.torchrun("given_in_code.py", overlay=climbed, user_config_path="", warm=warm_ranks)
    assert launch.exit_code == 0, launch.output + launch.log("stderr")
    stage = {"zero_optimization.stage": [1, None]}
    given = {"gradient_accumulation_steps": [2, 1], "gradient_clipping": [0.5, None], **stage}
    offloaded = {**given, "zero_optimization.offload_optimizer.device": ["cpu", None]}
    result = printed(launch)
    for way in ("plugin's arguments", "plugin's dict", "TrainingArguments", "dict"):
        assert result[way].items() >= offloaded.items(), way
    assert result["plugin's arguments beside a dict"].items() >= given.items()
    assert result["environment beside a dict"].items() >= stage.items()
    [engine] = launch.of(EngineReady)
    assert (engine.zero_stage, engine.gradient_accumulation_steps) == (3, 1)
    assert engine.config_differences.items() >= {"gradient_accumulation_steps": [2, 1], **stage}.items()
    assert launch.of(ConfigDiffers)[0].differences == engine.config_differences


def test_a_script_that_tells_accelerate_to_use_the_cpu_is_told_so(tmp_path: Path, warm_ranks: WarmRanks) -> None:
    start = Starter(tmp_path, {})
    text = """import torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model, optimizer = accelerator.prepare(model := torch.nn.Linear(2, 1), torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(9):
    accelerator.backward(model(torch.ones(1, 2)).mean())
    optimizer.step()
"""
    launch = start.torchrun(script(start, text), user_config_path="", warm=warm_ranks)
    assert launch.exit_code != 0
    assert "Accelerator(cpu=True)" in launch.log("stderr")
    assert "tune accelerate launch" not in launch.log("stderr")


def test_lightnings_trainer_follows_the_trial(tmp_path: Path, warm_ranks: WarmRanks) -> None:
    start = Starter(tmp_path, config_of("lightning"))
    launch = start.torchrun(
        EXAMPLES / "lightning" / "train.py",
        *("--config", str(start.user_config), "--samples", "16", "--accumulate", "2"),
        overlay={**overlay(stage=3, micro_batch=4, accumulation=1), "bf16": {"enabled": True}, "fp16": None},
        warm=warm_ranks,
    )
    check(launch, stage=3, micro_batch=4, accumulation=1)
    assert launch.of(EngineReady)[0].precision == "bf16"
    for rank in RANKS:
        [trainer] = launch.of(TrainerFound, rank)
        assert (trainer.framework, trainer.gradient_accumulation_steps) == ("lightning", 2)
    assert not (tmp_path / "lightning_logs").exists()


def test_fabrics_strategy_follows_the_trial(tmp_path: Path, warm_ranks: WarmRanks) -> None:
    config = {key: value for key, value in config_of("lightning").items() if key != "optimizer"}
    start = Starter(tmp_path, config)
    launch = start.torchrun(
        "fabric.py", str(start.user_config), overlay=overlay(stage=3, micro_batch=4, accumulation=1), warm=warm_ranks
    )
    check(launch, stage=3, micro_batch=4, accumulation=1)
    assert printed(launch) == {"partitioned": True}
    assert launch.of(TrainerFound) == []


def test_a_trainer_by_the_guide_is_measured_and_keeps_its_own_baseline(tmp_path: Path, warm_ranks: WarmRanks) -> None:
    start = Starter(tmp_path, config_of("huggingface"))
    launch = start.torchrun(
        "first_try/trainer_guide.py",
        str(start.user_config),
        *("--output_dir", str(tmp_path / "out"), "--per_device_train_batch_size", "5", "--report_to", "none"),
        *("--fp16", "True", "--use_cpu", "True"),
        overlay={**overlay(stage=1, micro_batch=1, accumulation=1), "bf16": {"enabled": True}, "fp16": None},
        warm=warm_ranks,
    )
    check(launch, stage=1, micro_batch=1, accumulation=1)
    assert launch.of(EngineReady)[0].precision == "bf16"
    [trainer] = launch.of(TrainerFound)
    assert (trainer.micro_batch, trainer.gradient_accumulation_steps) == (5, 1)
    assert set(trainer.options) == {"train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}


@pytest.mark.parametrize("script", ["accelerated.py", "trainer_plain.py"])
def test_what_names_no_config_trains_with_the_launchs(tmp_path: Path, script: str, warm_ranks: WarmRanks) -> None:
    start = Starter(tmp_path, USER_CONFIG)
    arguments = ["out"] if script == "trainer_plain.py" else ["--batch-size", "2"]
    launch = start.torchrun(
        f"first_try/{script}",
        *arguments,
        overlay=overlay(stage=2, micro_batch=2, accumulation=1),
        warm=warm_ranks,
        end_profile_step=3,
    )
    check(launch, stage=2, micro_batch=2, accumulation=1, steps=3)
    [result] = launch.of(EnvironmentSet)
    assert result.variables == {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(start.user_config),
    }
    differences = dict(launch.of(EngineReady)[0].config_differences)
    differences.pop("zero_allow_untested_optimizer", None)
    assert {key: values[0] for key, values in differences.items()} == {
        "optimizer.params.lr": None,
        "optimizer.params.torch_adam": None,
        "optimizer.type": None,
    }
    assert "ACCELERATE_USE_DEEPSPEED=true" in launch.log("stderr")


def test_what_names_its_config_in_the_end_keeps_it_whole(tmp_path: Path, warm_ranks: WarmRanks) -> None:
    start = Starter(tmp_path, config_of("huggingface"))
    launch = start.torchrun(
        "first_try/trainer_twice.py",
        *("out", str(start.user_config)),
        overlay=overlay(stage=2, micro_batch=2, accumulation=1),
        warm=warm_ranks,
        end_profile_step=3,
    )
    check(launch, stage=2, micro_batch=2, accumulation=1, steps=3)
    given, withdrawn = launch.of(EnvironmentSet)
    assert given.variables
    assert withdrawn.variables == {}
    assert "optimizer.type" not in launch.of(EngineReady)[0].config_differences


def test_the_trainers_batch_sizes_follow_the_config_up_to_the_command_that_trains(
    bench: EntryPointBench, run_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search over a simulated landscape, whose profile launch reports what those above report."""
    options = {
        "train_micro_batch_size_per_gpu": "--per_device_train_batch_size",
        "gradient_accumulation_steps": "--gradient_accumulation_steps",
    }
    sizes = {"micro_batch": 5, "gradient_accumulation_steps": 2}

    def followed(*args: Any, **kwargs: Any) -> Any:
        record, report = follow(*args, **kwargs)
        record.trainer = TrainerFound(rank=0, time=1.0, framework="transformers", options=options, **sizes)
        return record, report

    monkeypatch.setattr(profile, "follow", followed)
    (bench.folder / "ds.json").write_text(json.dumps(config_of("huggingface")))
    ended = run_here(
        *("random", "train.py", "ds.json", "--cpu-ranks", "2", "--json", "--zero-stages", "3", "--confirm", "0"),
        *("--fix", "train_micro_batch_size_per_gpu=3", "--no-enqueue-user-config", "--max-trials", "1"),
        *("--", "--deepspeed", "ds.json", "--output_dir", "out"),
        *("--per-device-train-batch-size", "5", "--gradient_accumulation_steps=2"),
    )
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    follow_lines = [line for line in ended.stderr.splitlines() if "follow each configuration" in line]
    assert follow_lines == [
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
