"""Micro-batches are reached by doubling from those that ran before."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from optuna.pruners import BasePruner, NopPruner
from optuna.samplers import BaseSampler

from optuna_dsat.pruners import AshaPruner, DeepSpeedPruner
from optuna_dsat.samplers import BinarySearchSampler, LineageRandomSampler
from optuna_dsat.trials.lineage import MICRO_BATCH

OWN = 2
MEMORY = 10_000
KNEE = 16
"""Micro-batch from which throughput is flat, as that of a small model on a CPU."""
METHODS: dict[str, tuple[Callable[..., BaseSampler], Callable[[], BasePruner]]] = {
    "random": (LineageRandomSampler, DeepSpeedPruner),
    "binary": (BinarySearchSampler, NopPruner),
    "asha": (BinarySearchSampler, AshaPruner),
}


def flat(knobs: dict[str, Any]) -> float:
    return float(min(knobs[MICRO_BATCH], KNEE))


def growing(knobs: dict[str, Any]) -> float:
    return float(knobs[MICRO_BATCH])


def launched(kit: SimpleNamespace, method: str, metric: Callable[[dict[str, Any]], float], **options: Any) -> list[int]:
    sampler, pruner = METHODS[method]
    study = kit.create(sampler(seed=3, max_micro_batch=lambda _knobs, _trials: MEMORY, **options), pruner())
    suggest = partial(kit.suggest, high=2 * MEMORY)
    kit.Driver(study, suggest=suggest, edge=lambda _knobs: MEMORY, metric=metric).run(30)
    return [trial.params[MICRO_BATCH] for trial in study.trials if not trial.user_attrs.get("vetoed")]


@pytest.mark.parametrize("method", METHODS)
def test_no_launch_goes_beyond_twice_what_fitted(kit: SimpleNamespace, method: str) -> None:
    sizes = launched(kit, method, growing, proven=(1, OWN))
    largest = OWN
    for size in sizes:
        assert size <= 2 * largest
        largest = max(largest, min(size, MEMORY))
    assert largest > 1000, "the doublings get there, where they pay"


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_launched_far_beyond_the_last_doubling_that_paid(kit: SimpleNamespace, method: str) -> None:
    assert KNEE <= max(launched(kit, method, flat, proven=(1, OWN))) <= 4 * KNEE
    assert max(launched(kit, method, flat)) > 1000, "the bound is what holds it"
