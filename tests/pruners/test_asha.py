from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from optuna.study import StudyDirection

from optuna_dsat.pruners import AshaPruner
from optuna_dsat.pruners._asha import Rungs, build_rungs
from optuna_dsat.trials.lineage import group

THREE = Rungs(max_rungs=3, min_launches=1, divisor=2, early_stopping=0)


def buckets(keys: Any, lineages: Any) -> list[int]:
    return [lineages[key].params["bucket"] for key in keys]


@pytest.mark.parametrize(("early_stopping", "expected"), [(0, [3, 6, 12, 24, 48]), (1, [6, 12, 24, 48, 96])])
def test_sizes_of_rungs(early_stopping: int, expected: list[int]) -> None:
    rungs = Rungs(max_rungs=5, min_launches=3, divisor=2, early_stopping=early_stopping)
    assert [rungs.size(k) for k in range(5)] == expected


def test_a_ladder_worked_by_hand(kit: SimpleNamespace) -> None:
    # rung sizes 1, 2, 4. First launches: 10, 20, 30, 40 -> 40 and 30 go on. Second launches: bucket 3 shows 45,
    # bucket 2 shows 50 -> of two that completed rung 1 one goes on, bucket 2.
    trials = [kit.trial(8, 10.0 * (i + 1), bucket=i) for i in range(4)]
    trials += [kit.trial(12, 45.0, bucket=3), kit.trial(12, 50.0, bucket=2)]
    late = [kit.trial(8, 10.0, bucket=0), kit.trial(8, 20.0, bucket=1), kit.trial(12, 99.0, bucket=0)]
    for launched, expected in ((trials, [[2, 3], [2], []]), (late, [[0, 1], [], []])):  # 0 had gone on before
        lineages = group(kit.study(AshaPruner(), launched).trials)
        rungs = build_rungs(lineages, rungs=THREE, direction=StudyDirection.MAXIMIZE)
        assert [sorted(buckets(rung, lineages)) for rung in rungs] == expected


def test_one_that_waited_is_promoted_when_the_rung_grows(kit: SimpleNamespace) -> None:
    pruner = AshaPruner(min_binary_search_trials=1)
    study = kit.study(pruner, [kit.trial(8, 10.0, bucket=0)])
    assert pruner.continuable(study, group(study.trials)) == []
    study.add_trial(kit.trial(8, 5.0, bucket=1))
    lineages = group(study.trials)
    assert buckets(pruner.continuable(study, lineages), lineages) == [0]
    study.add_trial(kit.trial(12, 11.0, bucket=0))
    for bucket, value in ((2, 4.0), (3, 3.0)):
        study.add_trial(kit.trial(8, value, bucket=bucket))
    lineages = group(study.trials)
    assert buckets(pruner.continuable(study, lineages), lineages) == [1]  # now second of four


@pytest.mark.parametrize(
    ("pruner", "launches", "direction", "continuable"),
    [
        # 0 and 1 completed rung 0, whose best of two goes on; 2 and 3 are in rung 0
        ({"min_binary_search_trials": 2}, [(0, 8, 50), (0, 9, 50), (1, 8, 40), (1, 9, 40), (2, 8, 20), (3, 8, 30)],
         "maximize", [0, 2, 3]),
        ({}, [(0, 1, "oom"), (1, 8, 40), (1, 9, 40), (1, 10, 40)], "maximize", [1]),
        # A rate grows at most in proportion to the micro-batch, which ends at 64: 49 become 98 at most
        ({}, [(0, 32, 100), (1, 32, 49), (2, 32, 51)], "maximize", [0, 2]),
        ({"max_rungs": 1, "min_binary_search_trials": 1}, [(0, 8, 50), (1, 8, 40), (2, 8, "broken")], "maximize", []),
        ({"min_binary_search_trials": 1}, [(0, 8, 10), (1, 8, 5)], "minimize", [1]),
    ],
    ids=["highest rung first, then the longest", "bisection that ended", "cannot win", "top rung, broken", "minimize"],
)  # fmt: skip
def test_of_each_rung_the_best_are_continued_and_those_that_have_not_completed_it(
    kit: SimpleNamespace,
    pruner: dict[str, Any],
    launches: list[tuple[int, int, Any]],
    direction: str,
    continuable: list[int],
) -> None:
    trials = [kit.trial(size, result, bucket=bucket) for bucket, size, result in launches]
    study = kit.study(AshaPruner(**pruner), trials, direction)
    lineages = group(study.trials)
    assert buckets(study.pruner.continuable(study, lineages), lineages) == continuable


def test_a_waiting_lineage_is_vetoed_unless_enqueued(kit: SimpleNamespace) -> None:
    pruner = AshaPruner(min_binary_search_trials=1)
    study = kit.study(pruner, [kit.trial(8, 10.0, bucket=0), kit.trial(8, 5.0, bucket=1)])
    assert kit.start(study, 12, bucket=1).should_prune()
    assert "did better" in str(pruner.reason(study, study.trials[-1]))
    assert not kit.start(study, 12, bucket=0).should_prune()
    assert not kit.start(study, 12, bucket=7).should_prune()
    study.enqueue_trial({"zero_stage": 1, "bucket": 1, "train_micro_batch_size_per_gpu": 16})
    assert not study.ask().should_prune()


@pytest.mark.parametrize(
    ("direction", "reported", "stopped"),
    [
        ("maximize", 79.0, True),
        ("maximize", 95.0, False),
        ("maximize", 120.0, False),
        ("minimize", 121.0, True),
        ("minimize", 79.0, False),
    ],
)
def test_in_flight_only_those_far_from_the_best_are_stopped(
    kit: SimpleNamespace, direction: str, reported: float, stopped: bool
) -> None:
    trials = [kit.trial(8, 100.0, bucket=0), kit.trial(8, 101.0, bucket=1)]
    study = kit.study(AshaPruner(), trials, direction)
    running = kit.start(study, 8, bucket=2)
    running.report(reported, 3)
    assert running.should_prune() is stopped


def test_asha_early_stopping_puts_off_the_judgement_of_steps(kit: SimpleNamespace) -> None:
    study = kit.study(AshaPruner(asha_early_stopping=1), [kit.trial(8, 100.0, bucket=b) for b in range(3)])
    running = kit.start(study, 8, bucket=4)
    running.report(1.0, 3)
    assert not running.should_prune()
    running.report(1.0, 4)
    assert running.should_prune()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"max_rungs": 0}, "max_rungs must be at least 1, not 0"),
        ({"min_binary_search_trials": 0}, "min_binary_search_trials must be at least 1, not 0"),
        ({"divisor": 1}, "divisor must be at least 2, not 1"),
        ({"asha_early_stopping": -1}, "asha_early_stopping must be at least 0, not -1"),
        ({"stop_margin": -0.1}, "stop_margin must be at least 0, not -0.1"),
    ],
)
def test_numbers_out_of_range_are_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AshaPruner(**kwargs)
