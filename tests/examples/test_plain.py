"""Plain DeepSpeed scripts: however the config reaches DeepSpeed, the trial's settings are what runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from optuna_dsat.config import user_file
from optuna_dsat.config.space_builder import SpaceRequest, build_space
from optuna_dsat.launch.protocol import ScriptCommand
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.events import EngineReady
from tests.harness.entry_points import EntryPointBench, Run, bench, run_here
from tests.harness.ranks import Starter, WarmRanks

from .conftest import CONFIG, ROOT, Launch, copy_example

__all__ = ["bench", "run_here"]
pytestmark = pytest.mark.torchrun
EXAMPLE = "plain"

PARAMETERS = 16 * 32 + 32 + 32 * 32 + 32 + 32 + 1


def test_the_flags_of_deepspeed_and_a_checkpoint_that_is_loaded_and_kept(
    example: Path, launch: Launch, warm_ranks: WarmRanks
) -> None:
    flags = ("--deepspeed", "--deepspeed_config", CONFIG)
    start = Starter(example, user_file.load(example / CONFIG).raw)
    start.torchrun(example / "by_flag.py", *flags, "--steps", "2", purpose="full", warm=warm_ranks)
    assert (example / "checkpoints" / "latest").read_text() == "global_step2"
    overlay = {"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": 2}}
    launched = launch("by_flag.py", *flags, "--resume", overlay=overlay, end_profile_step=4)
    assert launched.report.outcome is Outcome.MEASURED, launched.report
    assert f"resumed from {Path('checkpoints', 'global_step2')}" in launched.output
    assert "step 4 loss" in launched.output
    assert "saved True" in launched.output
    assert launched.errors.count("optuna-dsat: no checkpoint is written during a trial") == 1
    assert launched.changed == set()
    assert (launched.engine.zero_stage, launched.engine.train_batch_size) == (2, 6)
    assert {(step.samples, step.observed_micro_batch) for step in launched.steps} == {(3, 3)}
    assert launched.engine.config_differences == {}
    other = launch(
        "by_flag.py", *flags, "--resume", overlay={"zero_optimization": {"stage": 3}}, launch_id="trial-0001"
    )
    assert other.report.outcome is Outcome.MEASURED, other.report
    assert "after step 2" in other.output  # the client state is there, the weights of another stage are not
    assert "checkpoints/global_step2 was saved with another configuration than this trial's" in other.errors


def test_the_path_of_the_config_reaches_zero_init_too(launch: Launch) -> None:
    overlay = {"train_micro_batch_size_per_gpu": 5, "zero_optimization": {"stage": 3}}
    launched = launch("by_path.py", "--deepspeed", CONFIG, overlay=overlay, purpose="profile")
    assert launched.report.outcome is Outcome.MEASURED, launched.report
    assert "built partitioned" in launched.output
    assert launched.engine.zero_stage == 3
    assert launched.profile.params == PARAMETERS
    assert {step.observed_micro_batch for step in launched.steps} == {5}  # found behind a scalar, in a dict by keyword
    assert not launched.engine.config_in_code


def test_a_config_in_code_accumulates_as_the_trial_says_and_its_differences_are_told(launch: Launch) -> None:
    overlay = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    launched = launch("in_code.py", "--optimizer", "Adam", "--accumulate", "4", overlay=overlay)
    assert launched.report.outcome is Outcome.MEASURED, launched.report
    assert launched.engine.gradient_accumulation_steps == 3
    assert {(step.samples, step.observed_micro_batch) for step in launched.steps} == {(6, 2)}
    assert launched.record.metrics(flops_per_sample=1.0)["throughput"] > 0
    assert launched.engine.config_differences == {
        "gradient_accumulation_steps": [4, 1],
        "optimizer.type": ["Adam", "AdamW"],
    }
    assert launched.engine.config_in_code
    assert launched.changed == set()  # DeepSpeed's csv_monitor would have written


def test_of_two_engines_the_first_is_counted(launch: Launch) -> None:
    overlay = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}
    launched = launch("two_engines.py", f"--deepspeed_config={CONFIG}", overlay=overlay, purpose="profile")
    assert launched.report.outcome is Outcome.MEASURED, launched.report
    assert len(launched.of(EngineReady)) == 2  # one a rank
    assert launched.profile.params == PARAMETERS
    assert sorted(step.step for step in launched.steps) == [1, 1, 2, 2, 3, 3]
    assert {step.samples for step in launched.steps} == {2}


def test_the_config_of_every_example_can_be_searched() -> None:
    result = sorted((Path(__file__).parents[2] / "examples").glob(f"*/{CONFIG}"))
    assert result
    for path in result:
        assert build_space(SpaceRequest(ds_config=user_file.load(path).raw)).classes() > 1, path


OWN_BATCH = ROOT / "tests" / "scripts" / "own_batch.py"

STORAGE = ("--storage", "sqlite:///study.db")
OPTIONS = (
    *STORAGE,
    *("--cpu-ranks", "2", "--zero-stages", "1", "--max-trials", "1", "--confirm", "0", "--metric", "throughput"),
    *("--start-profile-step", "2", "--end-profile-step", "3"),
)


def test_a_module_is_tuned_and_resumed_as_a_script_is(bench: EntryPointBench, run_here: Run) -> None:
    copy_example("module", bench.folder).joinpath("trainer").rename(bench.folder / "trainer")
    tuned = run_here(
        "random", "-m", "trainer.train", "ds.json", *OPTIONS, "--json", "--", "--deepspeed_config", "ds.json"
    )
    assert tuned.returncode == 0, tuned.stderr
    result = json.loads(tuned.stdout)
    assert (result["study"], result["launches"]) == ("train-random", {"measured": 1})
    best = bench.folder / "optuna-dsat-output" / "train-random" / "best_ds_config.json"
    assert result["command"].endswith(f"--nproc_per_node 2 -m trainer.train --deepspeed_config {best}")
    again = run_here("resume", "train-random", *STORAGE, "--quiet", "--json")
    assert json.loads(again.stdout)["value"] == result["value"]
    (bench.folder / "trainer" / "train.py").unlink()
    refused = run_here("resume", "train-random", *STORAGE)
    assert refused.returncode == 2
    assert refused.stderr.startswith("optuna-dsat: The module trainer.train is not found from ")


def test_a_module_is_launched_as_a_script_is(launch: Launch, tmp_path: Path) -> None:
    folder = copy_example("module", tmp_path)
    command = ScriptCommand(
        script="trainer.train",
        is_module=True,
        args=("--deepspeed_config", CONFIG),
        cwd=str(folder),
        config_path=str(folder / CONFIG),
    )
    launched = launch("by_flag.py", overlay={"train_micro_batch_size_per_gpu": 3}, command=command)
    assert launched.report.outcome is Outcome.MEASURED, launched.report
    assert {step.observed_micro_batch for step in launched.steps} == {3}
    shown = json.loads((launched.directory.root / "command.json").read_text())["command"]
    assert shown[-4:-2] == ["--module", "trainer.train"]


def test_a_mapped_option_is_the_remedy(launch: Launch) -> None:
    mapped = {"train_micro_batch_size_per_gpu": "--batch-size"}
    launched = launch(str(OWN_BATCH), overlay={"train_micro_batch_size_per_gpu": 3}, arg_mappings=mapped)
    assert launched.report.outcome is Outcome.MEASURED, launched.report
    assert {step.observed_micro_batch for step in launched.steps} == {3}
    assert launched.engine.config_differences == {"optimizer.type": ["Adam", "AdamW"]}
