"""Real launches: torchrun, two ranks, DeepSpeed on the CPU."""

from __future__ import annotations

import json
import re

import pytest

from optuna_dsat.runtime.events import (
    BatchSourcesFound,
    EngineReady,
    ProfileMeasured,
    RankFailed,
    RankFinished,
    RankStarted,
    StepMeasured,
)
from optuna_dsat.runtime.measure.memory import cpu_name
from tests.harness.ranks import Starter, WarmRanks

pytestmark = pytest.mark.torchrun

RANKS = (0, 1)


def test_a_dict_config_gets_the_overlay_and_every_step_is_recorded(start: Starter, warm_ranks: WarmRanks) -> None:
    overlay = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 0},
    }
    arguments = ("--by=dict", f"--deepspeed_config={start.user_config}")
    launch = start.torchrun("configured.py", *arguments, overlay=overlay, warm=warm_ranks)
    assert launch.exit_code == 0, launch.output
    for rank in RANKS:
        kinds = [event.kind for event in launch.events(rank)]
        sources = ["batch_sources"] if rank == 0 else []
        assert kinds == [
            *("rank_started", "engine_ready", *["step_measured"] * 4, *sources, "step_measured", "rank_finished")
        ]
        assert launch.of(RankStarted, rank)[0].local_rank == rank
        engine = launch.of(EngineReady, rank)[0]
        assert (engine.zero_stage, engine.train_batch_size) == (0, 12)
        steps = launch.of(StepMeasured, rank)
        assert [step.step for step in steps] == [1, 2, 3, 4, 5]
        assert {step.samples for step in steps} == {6}  # without the 7 of evaluation
        assert {step.observed_micro_batch for step in steps} == {3}
        for step in steps:
            assert 0 < step.forward_s + step.backward_s + step.step_s <= step.latency_s
            assert step.loss is not None
            assert step.peak_allocated_bytes > 0
        assert launch.of(RankFinished, rank) == [launch.events(rank)[-1]]
        assert launch.of(RankFinished, rank)[0].reason == "profile_done"
    seen = json.loads(launch.log("stdout").splitlines()[-1])
    assert seen == {"same_config": True, "deepspeed_config": True, "optuna": False, "optimizer": "AdamW"}


def test_a_profile_of_zero_3_with_offload_by_args_and_a_client_optimizer(start: Starter, warm_ranks: WarmRanks) -> None:
    overlay = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    }
    launch = start.torchrun(
        "configured.py",
        "--by=args",
        "--client-optimizer",
        "--deepspeed_config",
        str(start.user_config),
        overlay=overlay,
        purpose="profile",
        device_memory_bytes=2 * 2**30,
        warm=warm_ranks,
    )
    assert launch.exit_code == 0, launch.output + launch.log("stderr")
    for rank in RANKS:
        [profile] = launch.of(ProfileMeasured, rank)
        assert profile.params == profile.trainable_params == 8 * 8 + 8 + 8 + 1
        assert profile.largest_layer_params == 72
        assert profile.param_bytes == 4
        # Forward, gradients of the weights, and of the second layer's input: 2 FLOPs per multiply-add.
        assert profile.flops_per_sample == 2 * (64 + 8) + 2 * (64 + 8) + 2 * 8
        assert profile.activation_bytes_per_sample >= 4 * (8 + 8)
        assert profile.device_memory_bytes == 2 * 2**30
        assert profile.device_name == cpu_name(), "the model of the processor, where it has a name"
        assert profile.host_memory_bytes > profile.device_memory_bytes
        assert 0 < profile.peak_bytes < 2 * 2**30
        assert profile.optimizer == "AdamW"
        assert profile.optimizer_tested
        assert len(launch.of(StepMeasured, rank)) == 5
    assert json.loads(launch.log("stdout").splitlines()[-1])["deepspeed_config"] is True


def test_throughput_of_a_script_that_waits_for_data_is_the_known_truth(start: Starter, warm_ranks: WarmRanks) -> None:
    overlay = {"zero_optimization": {"stage": 1}}
    launch = start.torchrun("sleepy.py", str(start.user_config), "0.8", overlay=overlay, warm=warm_ranks)
    assert launch.exit_code == 0, launch.output
    counted = [[step for step in launch.of(StepMeasured, rank) if step.step in (3, 4)] for rank in RANKS]
    samples = sum(step.samples for steps in counted for step in steps)
    elapsed = max(sum(step.latency_s for step in steps) for steps in counted)
    printed = [re.findall(r"^iteration (\S+)$", launch.log("stdout", rank), re.MULTILINE) for rank in RANKS]
    truth = max(sum(map(float, iterations[2:4])) for iterations in printed)
    assert truth >= 2 * 0.8
    assert samples / elapsed == pytest.approx(2 * 2 * 2 / truth, rel=0.05)


def test_a_pipeline_is_measured_batch_by_batch(start: Starter, warm_ranks: WarmRanks) -> None:
    overlay = {"gradient_accumulation_steps": 3, "zero_optimization": {"stage": 0}}
    launch = start.torchrun("pipeline.py", str(start.user_config), overlay=overlay, purpose="profile", warm=warm_ranks)
    assert launch.exit_code == 0, launch.output + launch.log("stderr")
    for rank in RANKS:
        engine = launch.of(EngineReady, rank)[0]
        assert engine.pipeline
        assert engine.config_differences["gradient_accumulation_steps"][0] == 6  # 12 samples of one data-parallel rank
        assert {(step.samples, step.observed_micro_batch) for step in launch.of(StepMeasured, rank)} == {(6, 2)}
        [profile] = launch.of(ProfileMeasured, rank)
        assert profile.params == 2 * 72
        assert profile.flops_per_sample > 0


def test_ranks_that_share_a_sequence_have_the_same_samples(start: Starter, warm_ranks: WarmRanks) -> None:
    launch = start.torchrun("tiny_launch.py", str(start.user_config), "--sequence-parallel", warm=warm_ranks)
    assert launch.exit_code == 0, launch.output + launch.log("stderr")
    engine = launch.of(EngineReady, 0)[0]
    assert (engine.data_parallel_size, engine.train_batch_size) == (1, engine.train_micro_batch_size_per_gpu)
    assert {(step.samples, step.elements) for step in launch.of(StepMeasured, 0)} == {(4, 2 * 4 * 16)}


def test_the_samples_of_a_loader_of_deepspeed_are_known(start: Starter, warm_ranks: WarmRanks) -> None:
    overlay = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
    launch = start.torchrun(
        "first_try/few_samples.py", str(start.user_config), overlay=overlay, purpose="profile", warm=warm_ranks
    )
    assert launch.exit_code == 0, launch.output + launch.log("stderr")
    [sources] = launch.of(BatchSourcesFound)
    assert [(loader["samples"], loader["trains"]) for loader in sources.loaders] == [(3, True)], "five, on two ranks"


def test_a_script_that_trains_without_deepspeed_is_stopped_and_told_why(start: Starter, warm_ranks: WarmRanks) -> None:
    launch = start.torchrun("first_try/without.py", warm=warm_ranks)
    assert launch.exit_code == 1
    [failure] = launch.of(RankFailed)
    assert failure.message.startswith("the script trains without DeepSpeed: its optimizer stepped")
    assert "`optuna-dsat tune accelerate launch ...`" in failure.message
    assert not (start.folder / "model.pt").exists()


HALF = {"enabled": True, "initial_scale_power": 22}


@pytest.mark.parametrize("stage", [2, 3])
def test_steps_that_the_loss_scaler_skips_do_not_count(start: Starter, warm_ranks: WarmRanks, stage: int) -> None:
    overlay = {"zero_optimization": {"stage": stage}, "fp16": HALF}
    launch = start.torchrun("half.py", f"--deepspeed_config={start.user_config}", overlay=overlay, warm=warm_ranks)
    assert launch.exit_code == 0, launch.output + launch.log("stderr")
    words = [int(line) for line in launch.log("stdout").splitlines() if line.isdigit()]
    for rank in RANKS:
        steps = launch.of(StepMeasured, rank)
        skipped = sum(step.skipped for step in steps)
        assert 2 < skipped < 20
        assert [step.step for step in steps] == list(range(1, skipped + 6))
        assert [step.number for step in steps if not step.skipped] == [1, 2, 3, 4, 5]
        seen = [step.skipped_before + step.skipped for step in steps]
        assert seen[: len(words)] == words  # the last step is not reported: the rank has exited
        [end] = launch.of(RankFinished, rank)
        assert (end.reason, end.steps, end.skipped) == ("profile_done", 5, skipped)
        assert {(step.elements, step.elements_are_tokens) for step in steps} == {(20, True), (30, True), (40, True)}
