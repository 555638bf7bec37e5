from __future__ import annotations

import math
import statistics
from types import SimpleNamespace
from typing import Any

import pytest
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from optuna_dsat.pruners import DeepSpeedPruner
from optuna_dsat.pruners._inflight import below_rung, step_noise
from optuna_dsat.trials.lineage import group

Rows = list[tuple[int, Any, dict[str, Any]]]

WINNER: Rows = [(16, 900.0, {"zero_stage": 2, "bucket": 7}), (32, 1000.0, {"zero_stage": 2, "bucket": 7})]
SLOW_ZERO_3: Rows = [
    # 16 / 300 = 0.0533 s, 32 / 320 = 0.1 s: the affine model promises 342 at micro-batch 64 at most
    (16, 300.0, {"zero_stage": 3, "bucket": 0}),
    (32, 320.0, {"zero_stage": 3, "bucket": 0}),
    (16, 290.0, {"zero_stage": 3, "bucket": 1}),
    (32, 310.0, {"zero_stage": 3, "bucket": 1}),
]
RISING_ZERO_3: Rows = [
    # 0.1 s and 0.104 s: 64 samples would take about 0.112 s, 571 a second and still rising; twice that is not out
    # of reach of 400 but of 1000 it is
    (16, 160.0, {"zero_stage": 3, "bucket": 0}),
    (32, 308.0, {"zero_stage": 3, "bucket": 0}),
    (16, 160.0, {"zero_stage": 3, "bucket": 1}),
    (32, 308.0, {"zero_stage": 3, "bucket": 1}),
]


@pytest.mark.parametrize(
    ("rows", "new", "reason"),
    [
        pytest.param([], (8, {}), None, id="nothing known"),
        pytest.param([(1, "oom", {"bucket": 1})], (8, {"bucket": 1}), "smallest micro-batch", id="dead"),
        pytest.param([(1, "oom", {"bucket": 1})], (8, {"bucket": 2}), None, id="another one than the dead"),
        pytest.param([(9, "broken", {"bucket": 1})], (8, {"bucket": 1}), "whatever", id="broken"),
        pytest.param(
            [(n, 10.0 * n, {"bucket": 1}) for n in range(1, 6)], (8, {"bucket": 1}), "5 launches", id="budget"
        ),
        pytest.param([(n, 10.0 * n, {"bucket": 1}) for n in range(1, 5)], (8, {"bucket": 1}), None, id="budget left"),
        pytest.param(
            [(20, 500.0, {"bucket": 0}), (16, "oom", {"bucket": 1})],
            (8, {"bucket": 1}),
            "ran micro-batch 15 or more",
            id="another of the structure runs larger",
        ),
        pytest.param(
            [(20, 500.0, {"bucket": 0}), (16, "oom", {"bucket": 1}), (8, 480.0, {"bucket": 1})],
            (12, {"bucket": 1}),
            None,
            id="another runs larger, but this one may become faster",
        ),
        pytest.param(
            [(20, 500.0, {"bucket": 0, "zero_stage": 3}), (16, "oom", {"bucket": 1})],
            (8, {"bucket": 1}),
            None,
            id="another structure runs larger",
        ),
        pytest.param([*WINNER, *SLOW_ZERO_3], (48, {"zero_stage": 3, "bucket": 0}), "expected", id="behind"),
        pytest.param(
            [*WINNER, (32, 10.0, {"zero_stage": 3, "bucket": 0})],
            (48, {"zero_stage": 3, "bucket": 0}),
            "at most 20",
            id="behind by one measurement: twice the micro-batch, at most twice as fast",
        ),
        pytest.param([*WINNER, *SLOW_ZERO_3], (8, {"zero_stage": 3, "bucket": 5}), "cannot reach", id="hopeless"),
        pytest.param(
            [*WINNER, *SLOW_ZERO_3[:2]], (8, {"zero_stage": 3, "bucket": 5}), None, id="one witness is not enough"
        ),
        pytest.param(
            [(32, 400.0, {"zero_stage": 2, "bucket": 7}), *RISING_ZERO_3],
            (8, {"zero_stage": 3, "bucket": 5}),
            None,
            id="zero 3 may win through a larger micro-batch",
        ),
        pytest.param(
            [(32, 400.0, {"zero_stage": 2, "bucket": 7}), *RISING_ZERO_3],
            (64, {"zero_stage": 3, "bucket": 0}),
            None,
            id="rising",
        ),
        pytest.param([*WINNER, *SLOW_ZERO_3], (8, {"zero_stage": 2, "bucket": 5}), None, id="structure of the best"),
    ],
)
def test_vetoes(kit: SimpleNamespace, rows: Rows, new: tuple[int, dict[str, Any]], reason: str | None) -> None:
    pruner = DeepSpeedPruner()
    study = kit.study(pruner, [kit.trial(size, result, **knobs) for size, result, knobs in rows])
    size, knobs = new
    trial = kit.start(study, size, **knobs)
    assert trial.should_prune() is (reason is not None)
    text = pruner.reason(study, study.trials[-1])
    assert text is None if reason is None else reason in str(text)


def test_what_is_vetoed_is_not_offered_to_samplers(kit: SimpleNamespace) -> None:
    pruner = DeepSpeedPruner()
    study = kit.study(pruner, [kit.trial(size, result, **knobs) for size, result, knobs in [*WINNER, *SLOW_ZERO_3]])
    lineages = group(study.trials)
    assert [lineages[key].params["zero_stage"] for key in pruner.continuable(study, lineages)] == [2]
    assert pruner.hopeless(study, lineages) == [{"zero_stage": 3}]


def test_enqueued_trials_and_copies_of_lost_ones_are_never_vetoed(kit: SimpleNamespace) -> None:
    study = kit.study(DeepSpeedPruner(), [kit.trial(1, kit.OOM, bucket=1)])
    study.enqueue_trial({"zero_stage": 1, "bucket": 1, "train_micro_batch_size_per_gpu": 4})
    assert not study.ask().should_prune()
    copy = kit.start(study, 4, bucket=1)
    assert copy.should_prune()
    study._storage.set_trial_system_attr(copy._trial_id, "failed_trial", 0)
    assert not copy.should_prune()


@pytest.mark.parametrize(
    ("direction", "reports", "stopped"),
    [
        ("maximize", [70.0], True),
        ("maximize", [85.0], False),
        ("maximize", [130.0], False),
        ("maximize", [70.0, 70.0], True),
        ("maximize", [40.0, 160.0], False),
        ("maximize", [float("nan")], False),
        ("minimize", [130.0], True),
        ("minimize", [70.0], False),
    ],
)
def test_in_flight(kit: SimpleNamespace, direction: str, reports: list[float], stopped: bool) -> None:
    study = kit.study(DeepSpeedPruner(), [kit.trial(8, 100.0, bucket=0)], direction)
    running = kit.start(study, 8, bucket=2)
    for step, value in enumerate(reports, start=3):
        running.report(value, step)
    assert running.should_prune() is stopped


def test_noise_widens_the_margin(kit: SimpleNamespace) -> None:
    noisy = kit.trial(8, 100.0, bucket=0)
    noisy.intermediate_values = {3: 100.0, 4: 130.0, 5: 70.0}
    study = kit.study(DeepSpeedPruner(), [noisy])
    running = kit.start(study, 8, bucket=2)
    running.report(70.0, 3)
    assert not running.should_prune()


def test_without_a_best_nothing_is_stopped(kit: SimpleNamespace) -> None:
    study = kit.study(DeepSpeedPruner(), [kit.trial(64, kit.OOM, bucket=0)])
    running = kit.start(study, 8, bucket=2)
    running.report(1.0, 3)
    assert not running.should_prune()


def test_foreign_trials_are_left_alone(kit: SimpleNamespace) -> None:
    study = kit.study(DeepSpeedPruner(), [kit.trial(1, kit.OOM)])
    assert not study.ask().should_prune()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"trials_per_random_config": 0}, "trials_per_random_config must be at least 1, not 0"),
        ({"stop_margin": -1}, "stop_margin must be at least 0, not -1"),
    ],
)
def test_numbers_out_of_range_are_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DeepSpeedPruner(**kwargs)


def test_one_launch_is_told_as_one(kit: SimpleNamespace) -> None:
    pruner = DeepSpeedPruner(trials_per_random_config=1)
    study = kit.study(pruner, [kit.trial(4, 10.0, zero_stage=2)])
    kit.start(study, 8, zero_stage=2)
    assert pruner.reason(study, study.trials[-1]) == "this configuration had its 1 launch"


UP = StudyDirection.MAXIMIZE


def reported(state: TrialState, values: dict[int, float]) -> FrozenTrial:
    return create_trial(state=state, value=1.0 if state == TrialState.COMPLETE else None, intermediate_values=values)


def test_noise_is_the_median_over_completed_trials() -> None:
    rows = [[10.0, 11.0], [10.0, 12.0], [10.0, 10.5], [10.0, math.nan]]
    finished = [reported(TrialState.COMPLETE, dict(enumerate(row))) for row in rows]
    finished.append(reported(TrialState.PRUNED, {0: 1.0, 1: 99.0}))
    expected = statistics.stdev([10.0, 11.0]) / 10.5
    assert step_noise(finished) == pytest.approx(expected)
    assert step_noise([]) == 0.0


def test_a_job_is_judged_among_those_that_fit_or_run() -> None:
    fits = [reported(TrialState.COMPLETE, {3: value}) for value in (10.0, 20.0, 30.0)]
    broken = [reported(TrialState.FAIL, {3: 99.0})]
    job = reported(TrialState.RUNNING, {3: 25.0})

    def falls(trials: list[FrozenTrial], pending: list[FrozenTrial]) -> bool:
        return below_rung(job, trials, pending, direction=UP, divisor=2, early_stopping=0)

    assert not falls(fits, [])  # second of four, two stay
    assert not falls([*fits, *broken], [])
    assert falls(fits, [reported(TrialState.RUNNING, {3: 40.0})])  # third of five, two stay
    assert not falls([], [])
