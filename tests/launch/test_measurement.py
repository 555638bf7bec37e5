from __future__ import annotations

import math
from dataclasses import replace

import pytest

from optuna_dsat.launch.measurement import (
    GlobalStep,
    LaunchRecord,
    confidence_interval,
    is_certain,
    merge_ranks,
    metrics_of,
    step_time_uncertainty,
)
from tests.harness.events import engine, step_of


def global_steps(latencies: list[float], samples: float = 16.0) -> list[GlobalStep]:
    return [
        GlobalStep(
            step=index,
            latency_s=latency,
            forward_s=0.1,
            backward_s=0.2,
            step_s=0.1,
            samples=samples,
            peak_allocated_bytes=index,
            peak_reserved_bytes=2 * index,
            rss_bytes=3 * index,
            loss=None,
        )
        for index, latency in enumerate(latencies, start=1)
    ]


def test_ranks_that_wait_for_each_other_take_the_time_that_each_takes() -> None:
    """The slowest rank of each step gave up to a fifth less throughput than a clock on either rank."""
    merged = [
        merge_ranks(
            [
                step_of(rank=0, latency_s=first, forward_s=first - 0.3, backward_s=0.3, step_s=0.0),
                step_of(rank=1, latency_s=1.2 - first, forward_s=0.1, backward_s=1.1 - first, step_s=0.0, loss=4.0),
            ],
            data_parallel_size=2,
            configured_samples=0,
        )
        for first in (0.5, 0.7)
    ]
    metrics = metrics_of(merged, flops_per_sample=1.0, world_size=2)
    assert (metrics["latency"], metrics["forward"] + metrics["backward"]) == pytest.approx((0.6, 0.6))
    assert [step.samples for step in merged] == [16, 16]
    assert merged[0].loss == 3.0


def test_ranks_that_wait_for_one_that_evaluates_do_not_train_meanwhile() -> None:
    ranks = [step_of(rank=0, latency_s=10.5, evaluation_s=10.0), step_of(rank=1, latency_s=10.5)]
    merged = merge_ranks(ranks, data_parallel_size=2, configured_samples=0)
    assert merged.latency_s - merged.evaluation_s == 0.5


def test_ranks_of_one_model_parallel_group_count_once_and_a_batch_nobody_saw_as_configured() -> None:
    group = [step_of(rank=0), step_of(rank=1, samples=0)]
    assert merge_ranks(group, data_parallel_size=1, configured_samples=64).samples == 8
    assert merge_ranks([step_of(samples=0)], data_parallel_size=2, configured_samples=64).samples == 64


def test_throughput_is_the_ratio_of_sums_and_latency_includes_what_phases_do_not() -> None:
    metrics = metrics_of(global_steps([0.5, 1.5]), flops_per_sample=10.0, world_size=2)
    assert metrics["throughput"] == pytest.approx(32 / 2.0)
    assert metrics["FLOPS_per_gpu"] == pytest.approx(10.0 * 16.0 / 2)
    assert metrics["latency"] == pytest.approx(1.0)
    assert metrics["engine_throughput"] == pytest.approx(32 / 0.8)
    assert metrics["peak_reserved_bytes"] == 4


def test_interval_holds_the_value_and_narrows_without_noise() -> None:
    noisy = confidence_interval(
        global_steps([0.5, 0.6, 0.4, 0.55, 0.45, 0.5]), "throughput", flops_per_sample=0, world_size=1
    )
    assert (noisy.low or math.inf) < noisy.value < (noisy.high or 0.0)
    steady = confidence_interval(global_steps([0.5] * 6), "throughput", flops_per_sample=0, world_size=1)
    assert steady.low == pytest.approx(steady.high) == pytest.approx(32.0)


def test_a_record_completes_a_step_once_every_rank_has_it() -> None:
    record = LaunchRecord(world_size=2, start_profile_step=3)
    assert record.add(engine()) is None
    assert record.add(step_of(rank=0, step=2)) is None
    warm_up = record.add(step_of(rank=1, step=2))
    assert warm_up is not None
    assert record.counted == []
    record.add(step_of(rank=0, step=3))
    assert record.counted == []
    record.add(step_of(rank=1, step=3))
    assert [step.step for step in record.counted] == [3]
    assert record.peak_bytes == 100


@pytest.mark.parametrize(("pipeline", "flops"), [(False, 40.0), (True, 80.0)])
def test_a_stage_of_a_pipeline_computes_its_flops_for_every_sample(pipeline: bool, flops: float) -> None:
    record = LaunchRecord(world_size=2, start_profile_step=1)
    record.add(engine(data_parallel_size=1, pipeline=pipeline))
    for rank in (0, 1):
        record.add(step_of(rank=rank, step=1, samples=8, latency_s=1.0))
    assert record.metrics(flops_per_sample=10.0)["FLOPS_per_gpu"] == pytest.approx(flops)


def test_the_engine_that_proves_to_train_takes_the_place_of_the_first() -> None:
    record = LaunchRecord(world_size=2, start_profile_step=1)
    record.add(replace(engine(), train_batch_size=3, config_differences={"zero_optimization.stage": [0, 1]}))
    record.add(replace(engine(), rank=1, train_batch_size=3))
    assert record.config_differences
    record.add(replace(engine(), rank=1, train_batch_size=10))
    record.add(replace(engine(), train_batch_size=10))
    assert record.engine is not None
    assert (record.engine.rank, record.engine.train_batch_size, record.config_differences) == (0, 10, {})


@pytest.mark.parametrize(("samples", "seen"), [([8, 8, 3], 19), ([8, 8], 16), ([], 7)])
def test_the_data_seen_are_the_samples_of_all_steps(samples: list[int], seen: int) -> None:
    record = LaunchRecord(world_size=2, start_profile_step=1)
    record.add(engine())
    for step, count in enumerate(samples, start=1):
        for rank in (0, 1):
            record.add(step_of(rank=rank, step=step, samples=count))
    assert record.data_seen(8) == seen


@pytest.mark.parametrize(
    ("samples", "accumulation", "passes"),
    [
        ([8, 32, 32], 1, 4),
        ([32, 32, 32], 4, 1),
        ([32, 32, 32], 2, 2),
        ([32, 32, 16], 1, 1),
        ([8, 8, 12], 1, 1),
        ([], 1, 1),
    ],
)
def test_a_script_that_accumulates_by_itself_is_known_by_what_its_steps_take(
    samples: list[int], accumulation: int, passes: int
) -> None:
    record = LaunchRecord(world_size=1, start_profile_step=2)
    record.add(replace(engine(), gradient_accumulation_steps=accumulation))
    for step, count in enumerate(samples, start=1):
        record.add(step_of(rank=0, step=step, samples=count, observed_micro_batch=8))
    assert record.passes_per_micro_batch == passes


@pytest.mark.parametrize(
    ("of_ranks", "samples", "differ"),
    [
        ([[9, 8], [9, 8]], 600, True),  # an epoch is far from its end
        ([[8, 5], [8, 5]], 13, False),  # its last batch
        ([[8, 5], [8, 5]], None, False),
        ([[8, 9], [7, 9]], None, True),  # no epoch begins with its last batch
        ([[9, 8, 8], [9, 7, 8]], None, True),
        ([[8, 8], [8, 8]], 600, False),
    ],
)
def test_batches_that_differ_in_size_are_told_from_the_end_of_an_epoch(
    of_ranks: list[list[int]], samples: int | None, differ: bool
) -> None:
    record = LaunchRecord(world_size=2, start_profile_step=1)
    record.add(engine())
    for step in range(len(of_ranks[0])):
        for rank, sizes in enumerate(of_ranks):
            size = sizes[step]
            record.add(step_of(rank=rank, step=step + 1, samples=size, observed_micro_batch=size))
    assert bool(record.differing_micro_batches(samples=samples)) is differ


def test_uncertainty_is_students_interval() -> None:
    # Three steps: standard deviation 0.1, and 4.303 is Student's quantile for two degrees of freedom.
    assert step_time_uncertainty(global_steps([0.9, 1.0, 1.1])) == pytest.approx(4.303 * 0.1 / 3**0.5)
    assert step_time_uncertainty(global_steps([1.0])) == float("inf")


@pytest.mark.parametrize(
    ("latencies", "certain"),
    [
        ([1.0, 1.0], False),
        ([1.0, 1.0, 1.0], True),
        ([1.0, 1.01, 0.99], False),
        ([1.0, 1.01, 0.99] * 6, True),
        ([1.0, 1.2, 1.4, 1.6, 1.8] * 4, False),
    ],
)
def test_a_step_time_is_certain_once_its_interval_is_tight(latencies: list[float], certain: bool) -> None:
    assert is_certain(global_steps(latencies), tolerance=0.01) is certain


@pytest.mark.parametrize(
    ("evaluations", "counted"),
    [([0.0, 0.0, 4.0], [1.0, 1.0]), ([4.0, 4.0, 4.0], [5.0, 5.0]), ([4.0, 0.0, 0.0], [1.0, 1.0])],
    ids=["rarely", "at every step", "before training"],
)
def test_evaluation_counts_only_where_it_happens_at_every_step(evaluations: list[float], counted: list[float]) -> None:
    record = LaunchRecord(world_size=1, start_profile_step=2)
    for number, seconds in enumerate(evaluations, start=1):
        record.add(step_of(step=number, latency_s=1.0 + seconds, evaluation_s=seconds))
    assert [step.latency_s for step in record.counted] == counted
    assert [step.latency_s for step in record.steps] == [1.0 + seconds for seconds in evaluations]
