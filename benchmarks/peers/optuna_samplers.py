"""Optuna's own samplers on the tuner's search space."""

from __future__ import annotations

import tempfile
from pathlib import Path

import optuna
from optuna.samplers import BaseSampler, RandomSampler, TPESampler

from benchmarks.ours import spec_of
from benchmarks.rig import BudgetSpentError, Rig
from optuna_dsat.config import ds_config
from optuna_dsat.outcome import Outcome
from optuna_dsat.study.profile.profile import measure_profile
from optuna_dsat.study.space import space_of


def run(method: str, rig: Rig, *, budget: int, seed: int) -> None:
    """Run one search with a sampler's defaults: ``optuna-tpe`` or ``optuna-random``.

    Space and micro-batch bound are the tuner's, from the same profile launches. What does not fit is a pruned trial,
    which is what Optuna's TPE ranks last.
    """
    sampler: BaseSampler = TPESampler(seed=seed) if method == "optuna-tpe" else RandomSampler(seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        spec = spec_of(rig, method="random", budget=budget, seed=seed, folder=Path(folder))
        profiled = measure_profile(spec, rig, on_attempt=lambda _: None, on_report=lambda *_: None)
    space = space_of(spec, profiled)
    base = ds_config.effective(spec.ds_config)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    while True:
        trial = study.ask()
        try:
            launch = rig.measure(ds_config.merge(base, space.overlay(space.suggest(trial))))
        except BudgetSpentError:
            return
        if launch.outcome is Outcome.MEASURED:
            study.tell(trial, launch.metrics["FLOPS_per_gpu"])
        else:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
