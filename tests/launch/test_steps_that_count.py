"""Counted steps: steps skipped by the loss scaler do not count, and inputs of unequal size are unequal work."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from optuna_dsat.launch.classify import classify, observed_micro_batch
from optuna_dsat.launch.event_log import EventLog
from optuna_dsat.launch.measurement import (
    GlobalStep,
    LaunchRecord,
    confidence_interval,
    input_variation,
    is_certain,
    merge_ranks,
    metrics_of,
)
from optuna_dsat.launch.protocol import LaunchFacts, Verdict
from optuna_dsat.launch.run_directory import RunDirectory
from optuna_dsat.metrics import Interval
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.events import STEPS_SKIPPED, Event, RankFinished, StepMeasured, encode_event
from optuna_dsat.runtime.measure.engine import MOST_SKIPPED_STEPS
from tests.harness.events import engine, step_of
from tests.launch.test_measurement import global_steps


def scaled(skips: str, *, rank: int = 0, samples: int = 8) -> Iterator[StepMeasured]:
    """Yield the steps of a rank, ``x`` for a skipped step; step n takes n seconds."""
    for index, sign in enumerate(skips):
        before = skips[:index].count("x")
        yield step_of(
            rank, index + 1, latency_s=index + 1.0, samples=samples, skipped=sign == "x", skipped_before=before
        )


def record_of(skips: str, *, start: int) -> LaunchRecord:
    record = LaunchRecord(world_size=2, start_profile_step=start)
    for events in zip(scaled(skips), scaled(skips, rank=1), strict=True):
        for event in events:
            record.add(event)
    return record


def facts_of(skips: str, reason: str, **changes: object) -> LaunchFacts:
    events: dict[int, Sequence[Event]] = {}
    for rank in range(2):
        skipped = skips.count("x")
        end = RankFinished(rank=rank, time=9.0, reason=reason, steps=len(skips) - skipped, skipped=skipped)
        events[rank] = [engine(), *scaled(skips, rank=rank), end]
    known: dict[str, object] = {"slots": 2, "start_profile_step": 2, "end_profile_step": 4, "micro_batch": 8}
    return LaunchFacts(**{**known, **changes}, events=events)  # type: ignore[arg-type]


def test_skipped_steps_are_no_warm_up_and_leave_no_gap() -> None:
    record = record_of("xx.x...", start=2)
    assert [(step.step, step.latency_s) for step in record.steps] == [(1, 3.0), (2, 5.0), (3, 6.0), (4, 7.0)]
    assert [step.latency_s for step in record.counted] == [5.0, 6.0, 7.0]
    assert (record.skipped_steps, len(record.boundaries)) == (3, 7)
    assert record.metrics(flops_per_sample=0.0)["throughput"] == pytest.approx(3 * 16 / 18.0)


def test_a_skipped_step_completes_none_for_those_who_follow() -> None:
    record = LaunchRecord(world_size=1, start_profile_step=1)
    words = [record.add(event) for event in scaled("x.x.")]
    assert [None if step is None else step.step for step in words] == [None, 1, None, 2]


def test_what_skipped_steps_took_of_memory_and_data_is_taken() -> None:
    record = LaunchRecord(world_size=1, start_profile_step=1)
    first, second = scaled("x.")
    record.add(replace(first, peak_allocated_bytes=900))
    record.add(second)
    assert record.peak_bytes == 900
    assert record.data_seen(8) == 16


def test_a_launch_says_how_many_steps_were_skipped() -> None:
    verdict = classify(facts_of("xx.x...", "profile_done"))
    assert verdict.outcome is Outcome.MEASURED
    assert verdict.message == "measured to step 4; 3 steps skipped by the loss scaler, not counted"
    stop = Verdict(outcome=Outcome.MEASURED, message="measured to step 3: the step time is known")
    assert classify(facts_of("x...", "", stop=stop)).message == stop.message + (
        "; 1 step skipped by the loss scaler, not counted"
    )


def test_a_launch_that_waited_in_vain_has_what_it_has() -> None:
    verdict = classify(facts_of("." * 3 + "x" * MOST_SKIPPED_STEPS, STEPS_SKIPPED))
    assert verdict.outcome is Outcome.MEASURED
    assert verdict.message.startswith(
        "measured to step 3 of 4, since a launch waits for no more skipped steps; 33 steps"
    )


@pytest.mark.parametrize("applied", ["", "."], ids=["none at all", "only warm-up"])
def test_a_launch_without_a_step_that_counts_is_not_measured(applied: str) -> None:
    verdict = classify(facts_of(applied + "x" * MOST_SKIPPED_STEPS, STEPS_SKIPPED))
    assert verdict.outcome is Outcome.SCRIPT_ERROR
    assert f"skipped 33 of {33 + len(applied)} steps" in verdict.message
    assert "initial_scale_power" in verdict.message


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_skipped_steps_without_fp16_advise_nothing_about_it(precision: str) -> None:
    facts = facts_of("x" * MOST_SKIPPED_STEPS, STEPS_SKIPPED)
    events = {rank: [replace(engine(), precision=precision), *own[1:]] for rank, own in facts.events.items()}
    message = classify(replace(facts, events=events)).message
    assert f"DeepSpeed, in {precision}, skipped 33 of 33 steps" in message
    assert "fp16" not in message
    assert "loss scaler" not in message


def test_a_script_that_ends_among_skipped_steps_is_out_of_data() -> None:
    verdict = classify(facts_of("xx.", "script_end"))
    assert verdict.outcome is Outcome.OUT_OF_DATA
    assert "after 1 global step (and 2 that the loss scaler skipped), before step 4" in verdict.message


def test_the_batch_of_warm_up_is_not_compared_behind_skipped_steps() -> None:
    facts = facts_of("xx.....", "profile_done", start_profile_step=2)
    first, *rest = facts.events[0][3:]
    assert isinstance(first, StepMeasured)  # the first counted step, and warm-up
    events = {0: [*facts.events[0][:3], replace(first, observed_micro_batch=64), *rest], 1: facts.events[1]}
    assert observed_micro_batch(replace(facts, events=events)) == 8


def test_ranks_that_gave_up_are_done_and_progress_names_skipped_steps(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "trial-0000")
    log = EventLog(directory, slots=1, started=0.0)
    path = directory.events(0)
    path.write_text("".join(encode_event(event) + "\n" for event in scaled("xx.x")), encoding="utf-8")
    log.read(1.0)
    assert log.progress_in_words(end_profile_step=5) == (
        "the last step was 1 of 5, with 3 more that the loss scaler skipped"
    )
    assert log.done == set()
    end = RankFinished(rank=0, time=9.0, reason=STEPS_SKIPPED, steps=1, skipped=3)
    with path.open("a", encoding="utf-8") as file:
        file.write(encode_event(end) + "\n")
    log.read(2.0)
    assert log.done == {0}


def sized(lengths: Sequence[float], seconds: Sequence[float], *, samples: float = 4.0) -> list[GlobalStep]:
    """Return steps of ``samples`` sequences of given lengths."""
    return [
        replace(step, elements=samples * length, elements_are_tokens=True)
        for step, length in zip(global_steps(list(seconds), samples=samples), lengths, strict=True)
    ]


def test_tokens_of_all_ranks_count_and_activations_of_a_later_stage_do_not() -> None:
    first = step_of(rank=0, samples=2, elements=20, elements_are_tokens=True)
    second = step_of(rank=1, samples=2, elements=30, elements_are_tokens=True)
    merged = merge_ranks([first, second], data_parallel_size=2, configured_samples=0)
    assert (merged.elements, merged.elements_are_tokens) == (50, True)
    later = step_of(rank=1, samples=2, elements=20 * 64)
    merged = merge_ranks([first, later], data_parallel_size=1, configured_samples=0)
    assert (merged.elements, merged.elements_are_tokens) == (20, True)


@pytest.mark.parametrize(
    ("lengths", "variation"),
    [([100, 104], 0.0), ([90, 110], 0.2), ([100, 100, 100], 0.0), ([100, 0], 0.0)],
    ids=["within 5%", "dynamic padding", "constant", "not seen in one step"],
)
def test_inputs_vary_beyond_5_per_cent(lengths: list[float], variation: float) -> None:
    assert input_variation(sized(lengths, [1.0] * len(lengths))) == pytest.approx(variation)


def test_the_short_last_batch_of_an_epoch_is_no_variation() -> None:
    full, short = sized([100], [1.0], samples=8)[0], sized([100], [0.3], samples=2)[0]
    assert input_variation([full, full, short]) == 0.0


def test_speed_per_element_is_stated_of_tokens_and_of_what_else_varies() -> None:
    metrics = metrics_of(sized([10, 20, 30], [0.1, 0.2, 0.3]), flops_per_sample=0, world_size=1)
    assert metrics["tokens_per_s"] == pytest.approx(4 * 60 / 0.6)
    images = [replace(step, elements_are_tokens=False) for step in sized([10, 20, 30], [0.1, 0.2, 0.3])]
    assert metrics_of(images, flops_per_sample=0, world_size=1)["elements_per_s"] == metrics["tokens_per_s"]
    equal, unseen = sized([20, 20, 20], [0.1, 0.2, 0.3]), global_steps([0.1, 0.2, 0.3], samples=4.0)
    assert metrics_of(equal, flops_per_sample=0, world_size=1)["tokens_per_s"] == pytest.approx(4 * 60 / 0.6)
    pictures = [replace(step, elements_are_tokens=False) for step in equal]
    known, nothing = (metrics_of(steps, flops_per_sample=0, world_size=1) for steps in (pictures, unseen))
    assert known == nothing


def test_constant_inputs_are_measured_as_if_they_had_not_been_looked_at() -> None:
    seconds = [0.5, 0.6, 0.4, 0.55, 0.45, 0.5]
    seen, unseen = sized([64] * 6, seconds), global_steps(seconds, samples=4.0)
    for metric in ("throughput", "latency", "engine_throughput"):
        assert confidence_interval(seen, metric, flops_per_sample=1, world_size=2) == confidence_interval(
            unseen, metric, flops_per_sample=1, world_size=2
        )
    assert is_certain(seen, tolerance=0.5) is is_certain(unseen, tolerance=0.5) is True


def test_steps_whose_time_follows_their_size_are_alike_per_token_and_unlike_per_sample() -> None:
    lengths = [50, 100, 75, 60, 90]
    steps = sized(lengths, [length / 100 for length in lengths])
    tokens = confidence_interval(steps, "tokens_per_s", flops_per_sample=0, world_size=1)
    assert tokens.low == pytest.approx(tokens.value) == pytest.approx(tokens.high) == pytest.approx(400.0)
    samples = confidence_interval(steps, "throughput", flops_per_sample=0, world_size=1)
    assert samples.value == pytest.approx(4 * 5 / 3.75)
    assert samples.half_width > math.log(1.3) / 2


def test_no_launch_ends_early_where_inputs_vary() -> None:
    assert not is_certain(sized([50, 100, 50, 100] * 5, [1.0] * 20), tolerance=0.01)
    assert is_certain(sized([100] * 20, [1.0] * 20), tolerance=0.01)


def simulated(rng: random.Random, count: int) -> list[GlobalStep]:
    """Return steps of 8 padded sequences that take 10 ms plus 0.1 ms per token, off by 3%."""
    lengths = [max(rng.uniform(20, 120) for _ in range(8)) for _ in range(count)]
    seconds = [(0.01 + 1e-4 * 8 * length) * rng.gauss(1.0, 0.03) for length in lengths]
    return sized(lengths, seconds, samples=8)


@pytest.mark.parametrize(("metric", "count"), [("tokens_per_s", 3), ("throughput", 10)])
def test_the_interval_of_a_ratio_covers_its_truth(metric: str, count: int) -> None:
    rng = random.Random(f"{metric} {count}")
    whole = simulated(rng, 40_000)
    truth = metrics_of(whole, flops_per_sample=0, world_size=1)[metric]

    def interval() -> Interval:
        while True:
            steps = simulated(rng, count)
            if input_variation(steps):
                return confidence_interval(steps, metric, flops_per_sample=0, world_size=1)

    result = [interval() for _ in range(600)]
    covered = statistics.fmean((item.low or 0.0) <= truth <= (item.high or 0.0) for item in result)
    assert 0.90 <= covered <= 0.99


def test_a_launch_says_that_its_inputs_vary() -> None:
    steps = [
        step_of(step=number, latency_s=0.1 * number, samples=4, elements=400 * number, elements_are_tokens=True)
        for number in range(1, 5)
    ]
    end = RankFinished(rank=0, time=9.0, reason="profile_done", steps=4)
    facts = facts_of("", "", slots=1, micro_batch=4)
    verdict = classify(replace(facts, events={0: [*steps, end]}))
    assert verdict.message == "measured to step 4; inputs of a sample vary by 67% from step to step: 4,000 tokens/s"
