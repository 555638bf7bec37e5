"""A small conditional space with a known memory edge and a known metric, to drive samplers and pruners in tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
from optuna.samplers import BaseSampler
from optuna.study import StudyDirection
from optuna.trial import Trial, TrialState

from optuna_dsat.outcome import Outcome
from optuna_dsat.trials.attributes import OUTCOME, VETOED
from optuna_dsat.trials.lineage import MICRO_BATCH

Knobs = dict[str, Any]


def suggest(trial: Trial, *, high: int = 64, stages: tuple[int, ...] = (1, 2, 3), wide: bool = True) -> Knobs:
    stage = trial.suggest_categorical("zero_stage", list(stages))
    if wide:
        trial.suggest_categorical("offload_optimizer", ["none", "cpu"])
        trial.suggest_categorical("reduce_bucket_size", [int(5e6), int(5e7), int(5e8)])
        if stage == 3:
            trial.suggest_categorical("offload_param", ["none", "cpu"])
            trial.suggest_categorical("allgather_partitions", [True, False])
    trial.suggest_int(MICRO_BATCH, 1, high, log=True)
    return dict(trial.params)


def edge(knobs: Knobs) -> int:
    """Largest micro-batch that fits."""
    base = {0: 4, 1: 9, 2: 21, 3: 33}[knobs["zero_stage"]]
    return base * (2 if knobs.get("offload_optimizer") == "cpu" else 1)


def rate(knobs: Knobs) -> float:
    """Samples per second, saturating in the micro-batch."""
    fixed = {0: 0.5, 1: 1.0, 2: 1.1, 3: 1.6}[knobs["zero_stage"]]
    fixed += 6.0 if knobs.get("offload_optimizer") == "cpu" else 0.0
    size = int(knobs[MICRO_BATCH])
    return 100.0 * size / (fixed + 0.1 * size)


@dataclass
class Driver:
    """Asks, judges and tells, as the tuner does: a claims set, vetoes before the launch, reports, outcomes."""

    study: optuna.Study
    suggest: Callable[[Trial], Knobs] = suggest
    edge: Callable[[Knobs], int] = edge
    metric: Callable[[Knobs], float] = rate
    steps: int = 3
    claims: set[tuple[tuple[str, Any], ...]] = field(default_factory=set)

    def __post_init__(self) -> None:
        for trial in self.study.get_trials(deepcopy=False):
            self.claims.add(tuple(sorted(trial.params.items())))

    def ask(self) -> tuple[Trial, Knobs]:
        trial = self.study.ask()
        return trial, self.suggest(trial)

    def answer(self, trial: Trial, knobs: Knobs) -> TrialState:
        claim = tuple(sorted(knobs.items()))
        if claim in self.claims:
            trial.set_user_attr(VETOED, "duplicate")
            return self.study.tell(trial, state=TrialState.PRUNED).state
        self.claims.add(claim)
        if trial.should_prune():
            trial.set_user_attr(VETOED, "held back")
            return self.study.tell(trial, state=TrialState.PRUNED).state
        if knobs[MICRO_BATCH] > self.edge(knobs):
            trial.set_user_attr(OUTCOME, Outcome.OUT_OF_MEMORY.value)
            return self.study.tell(trial, state=TrialState.PRUNED).state
        value = self.metric(knobs)
        for step in range(3, 3 + self.steps):
            trial.report(value, step)
            if trial.should_prune():
                trial.set_user_attr(OUTCOME, Outcome.PRUNED.value)
                return self.study.tell(trial, state=TrialState.PRUNED).state
        trial.set_user_attr(OUTCOME, Outcome.MEASURED.value)
        return self.study.tell(trial, value).state

    def run(self, n: int) -> None:
        for _ in range(n):
            self.answer(*self.ask())


def create(
    sampler: BaseSampler,
    pruner: optuna.pruners.BasePruner | None = None,
    *,
    direction: str = "maximize",
    storage: str | optuna.storages.BaseStorage | None = None,
) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(
        sampler=sampler,
        pruner=pruner or optuna.pruners.NopPruner(),
        direction=StudyDirection[direction.upper()],
        storage=storage,
        study_name="s" if storage else None,
        load_if_exists=True,
    )


def sequence(study: optuna.Study) -> list[tuple[tuple[str, Any], ...]]:
    return [tuple(sorted(t.params.items())) for t in study.trials]


def launched(study: optuna.Study) -> int:
    return sum(VETOED not in t.user_attrs for t in study.trials)


def in_flight(study: optuna.Study) -> list[optuna.trial.FrozenTrial]:
    return [t for t in study.trials if not t.state.is_finished()]


@pytest.fixture(scope="session")
def kit() -> SimpleNamespace:
    """The helpers above, for tests that are imported by path and so cannot import this module."""
    return SimpleNamespace(
        Driver=Driver,
        create=create,
        edge=edge,
        in_flight=in_flight,
        launched=launched,
        rate=rate,
        sequence=sequence,
        suggest=suggest,
    )
