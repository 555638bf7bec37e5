"""The intervals of measured effects cover the truth, whatever the noise and however many pairs share a launch."""

from __future__ import annotations

import math
import random
from typing import Any

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState

from optuna_dsat.report.explain.pairs import Effect, Pairs
from optuna_dsat.study.confirm.rounds import RoundLaunch, Rounds
from optuna_dsat.trials import attributes
from optuna_dsat.trials.lineage import MICRO_BATCH

SEEDS = 300
TRUE_FACTORS = {"zero_stage": math.log(1.2), "overlap_comm": math.log(1.05), MICRO_BATCH: math.log(1.5)}
OTHER = {"zero_stage": 2, "overlap_comm": False, MICRO_BATCH: 4}
WINNER = {"zero_stage": 1, "overlap_comm": True, MICRO_BATCH: 8}


def trial_of(number: int, params: dict[str, Any], value: float, *, purpose: str | None = None) -> FrozenTrial:
    trial = optuna.trial.create_trial(
        state=TrialState.COMPLETE,
        value=value,
        params=params,
        distributions={name: optuna.distributions.CategoricalDistribution([item]) for name, item in params.items()},
        user_attrs={} if purpose is None else {attributes.PURPOSE: purpose},
    )
    trial.number = number
    return trial


def pairs_of(rng: random.Random, noise: float, *, rounds: int) -> Pairs:
    """Return a study whose winner is the one of each pair, and whose machine drifts between rounds."""
    configs = [OTHER, WINNER, *({**WINNER, name: OTHER[name]} for name in WINNER)]
    levels = [sum(TRUE_FACTORS[name] for name in WINNER if config[name] == WINNER[name]) for config in configs]
    values = [math.exp(level + rng.gauss(0, noise)) for level in levels]
    trials = [
        trial_of(number, config, value, purpose=None if number else attributes.USER_CONFIG)
        for number, (config, value) in enumerate(zip(configs, values, strict=True))
    ]
    launches = []
    for item in range(1, rounds + 1):
        drift = rng.gauss(0, 0.1)
        for number in (0, 1):
            value = math.exp(levels[number] + drift + rng.gauss(0, noise))
            launches.append(
                RoundLaunch(
                    round=item,
                    number=number,
                    value=value,
                    low=value,
                    high=value,
                    metrics={},
                    steps=10,
                    outcome="measured",
                    message="",
                )
            )
    return Pairs(trials, Rounds(launches=tuple(launches)), maximize=True, assumed_noise=0.02)


def effect_of(pairs: Pairs, name: str) -> Effect:
    result = pairs.effect(WINNER, {**WINNER, name: OTHER[name]})
    assert result is not None
    return result


@pytest.mark.parametrize("noise", [0.01, 0.05, 0.15])
def test_intervals_of_effects_cover_the_truth(noise: float) -> None:
    covered = 0
    for seed in range(SEEDS):
        pairs = pairs_of(random.Random(seed), noise, rounds=4)
        assert pairs.is_noise_measured
        effects = {name: effect_of(pairs, name) for name in WINNER}
        covered += sum(abs(item.mean - TRUE_FACTORS[name]) <= item.half_width for name, item in effects.items())
    assert covered >= 0.9 * SEEDS * len(WINNER)


def test_without_repeated_launches_the_noise_is_assumed_and_the_interval_wide() -> None:
    pairs = pairs_of(random.Random(0), 0.01, rounds=0)
    assert not pairs.is_noise_measured
    assert pairs.noise == 0.02
    assert effect_of(pairs, "zero_stage").half_width > 1.96 * 0.02 * math.sqrt(2)


def test_settings_that_no_two_configurations_differ_in_alone_have_no_effect() -> None:
    trials = [trial_of(0, OTHER, 1.0, purpose=attributes.USER_CONFIG), trial_of(1, WINNER, 2.0)]
    pairs = Pairs(trials, Rounds(), maximize=True, assumed_noise=0.02)
    assert all(pairs.effect(WINNER, {**WINNER, name: OTHER[name]}) is None for name in WINNER)
