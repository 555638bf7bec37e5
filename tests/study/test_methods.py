from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from optuna.trial import FrozenTrial, TrialState, create_trial

from optuna_dsat.config import ds_config
from optuna_dsat.config.space_builder import SpaceRequest, build_space
from optuna_dsat.cost.memory import estimate, largest_micro_batch
from optuna_dsat.cost.memory_fit import CorrectionFit
from optuna_dsat.study.search.methods import Ceiling
from optuna_dsat.study.space import hardware_of
from optuna_dsat.study.spec import StudySpec, make_spec
from optuna_dsat.trials import attributes
from optuna_dsat.trials.lineage import MICRO_BATCH
from tests.harness.small_model import PROFILE, profiled_of

GIB = 2**30
CONFIG = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
PROFILED = profiled_of(profile=replace(PROFILE, activation_bytes_per_sample=3 * 10**8, host_memory_bytes=256 * GIB))
SPACE = build_space(
    SpaceRequest(
        ds_config=CONFIG,
        zero_stages=(1, 2, 3),
        fix={},
        no_tune=(),
        nvme_path=None,
        params=10**9,
        micro_batch_cap=1024,
        device="cuda",
    )
)


@pytest.fixture
def spec() -> StudySpec:
    return make_spec(
        name="s",
        method="binary",
        script={"script": "train.py", "args": (), "cwd": ".", "config_path": "ds.json"},
        ds_config=CONFIG,
        device="cuda",
        slots_per_trial=4,
        max_trials=8,
        metric="throughput",
        output_dir="out",
    )


def params_of(chance: random.Random) -> dict[str, Any]:
    class Drawing:
        """Stands in for a trial."""

        def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
            del name
            return chance.choice(choices[:2])

        def suggest_int(self, name: str, low: int, high: int, *, log: bool) -> int:
            del name, low, high, log
            return chance.randint(1, 60)

    drawing: Any = Drawing()
    return SPACE.suggest(drawing)


def measured(spec: StudySpec, number: int, chance: random.Random) -> FrozenTrial:
    params = params_of(chance)
    config = ds_config.merge(ds_config.effective(spec.ds_config), SPACE.overlay(params))
    hardware = hardware_of(spec, PROFILED)
    peak = estimate(PROFILED.profile, config, micro_batch=params[MICRO_BATCH], hardware=hardware).device_bytes
    done = chance.random() < 0.8
    trial = create_trial(
        state=TrialState.COMPLETE if done else TrialState.FAIL,
        value=1.0 if done else None,
        user_attrs={attributes.CONFIG: config, attributes.PEAK_BYTES: peak + chance.randint(-GIB, GIB) if done else 0},
    )
    trial.number = trial._trial_id = number
    return trial


def expected(spec: StudySpec, params: dict[str, Any], trials: Sequence[FrozenTrial]) -> int:
    hardware = hardware_of(spec, PROFILED)
    fit = CorrectionFit(PROFILED.profile, hardware)
    fit.add(attributes.measured_peaks(trials))
    correction = fit.correction()
    config = ds_config.merge(ds_config.effective(spec.ds_config), SPACE.overlay({**params, MICRO_BATCH: 1}))
    return max(1, largest_micro_batch(PROFILED.profile, config, hardware=hardware, correction=correction))


def test_a_ceiling_learns_from_a_growing_history_what_it_would_from_the_whole(spec: StudySpec) -> None:
    chance = random.Random(0)
    ceiling = Ceiling(spec, PROFILED, SPACE)
    trials = [measured(spec, number, chance) for number in range(30)]
    late, seen = trials.pop(3), set()
    for count in (0, 1, 2, 7, 8, 20, 29):
        result = [*trials[:3], late, *trials[3:count]] if count > 15 else trials[:count]  # one that finished late
        for _ in range(3):
            params = params_of(chance)
            assert ceiling(params, result) == expected(spec, params, result)
            seen.add(ceiling(params, result))
    assert len(seen) > 3


def test_a_history_that_is_another_one_is_learnt_from_anew(spec: StudySpec) -> None:
    ceiling = Ceiling(spec, PROFILED, SPACE)
    params = params_of(random.Random(5))
    for seed in (1, 2):
        trials = [measured(spec, number, random.Random(seed)) for number in range(6)]
        assert ceiling(params, trials) == expected(spec, params, trials)
    assert ceiling(params, trials[:2]) == expected(spec, params, trials[:2])
