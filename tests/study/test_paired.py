"""The statistics of rounds: what the intervals cover, what noise comes out, and what a drift does to them."""

from __future__ import annotations

import json
import math
import random
import statistics
from pathlib import Path

import numpy as np
import pytest

from optuna_dsat.metrics import Interval
from optuna_dsat.study.confirm.rounds import is_precise, mean_in_rounds, noise_of_rounds, paired_ratio
from tests.harness import present


def noisy_rounds(rng: random.Random, *, rounds: int, noise: float, ratio: float, drift: float = 0.0) -> tuple[
    dict[int, float], dict[int, float]
]:  # fmt: skip
    """Return a configuration and a baseline of 10 in rounds that the machine slows down by ``drift`` each."""
    shared = {item: math.exp(-drift * item) for item in range(1, rounds + 1)}
    own = {item: 10 * ratio * level * math.exp(rng.gauss(0, noise)) for item, level in shared.items()}
    return own, {item: 10 * level * math.exp(rng.gauss(0, noise)) for item, level in shared.items()}


def covers(ratio: Interval | None, truth: float) -> bool:
    return ratio is not None and ratio.low is not None and ratio.high is not None and ratio.low < truth < ratio.high


@pytest.mark.parametrize(("rounds", "drift"), [(3, 0.1), (12, 0.0)])
def test_the_interval_of_a_paired_ratio_covers_the_truth_95_times_of_100(rounds: int, drift: float) -> None:
    rng = random.Random(rounds)
    result = [
        paired_ratio(*noisy_rounds(rng, rounds=rounds, noise=0.03, ratio=1.2, drift=drift), maximize=True)
        for _ in range(2000)
    ]
    covered = [covers(item, 1.2) for item in result]
    assert 0.93 < statistics.fmean(covered) < 0.97


@pytest.mark.parametrize(
    ("noise", "least", "true"), [(0.01, 3, 1.1), (0.02, 3, 1.1), (0.005, 2, 1.1), (0.01, 2, 1.1), (0.04, 2, 10.0)]
)
def test_the_interval_still_covers_it_where_rounds_end_once_it_is_narrow(noise: float, least: int, true: float) -> None:
    rng = random.Random(4)
    covered, ended = [], []
    for _ in range(400):
        values: dict[int, dict[int, float]] = {number: {} for number in range(4)}
        for rounds in range(1, 61):
            for number, own in values.items():
                own[rounds] = 10.0 * (true if number == 1 else 1.0) * math.exp(rng.gauss(0, noise))
            ratio = paired_ratio(values[1], values[0], maximize=True, noise=noise_of_rounds(values))
            if rounds >= least and ratio is not None and is_precise(ratio):
                break
        covered.append(covers(ratio, true))
        ended.append(rounds)
    assert 0.90 <= statistics.fmean(covered) < 0.99
    assert least < statistics.fmean(ended) < 15


def test_of_a_metric_to_minimise_less_is_better() -> None:
    ratio = present(paired_ratio({1: 5.0, 2: 5.0}, {1: 10.0, 2: 10.0}, maximize=False))
    assert (ratio.value, ratio.low, ratio.high, ratio.rounds) == (2.0, 2.0, 2.0, 2)
    assert ratio.surely_above_1


def test_only_rounds_that_measured_both_are_paired() -> None:
    ratio = present(paired_ratio({1: 20.0, 3: 90.0}, {1: 10.0, 2: 11.0}, maximize=True))
    assert (ratio.value, ratio.low, ratio.high, ratio.rounds) == (2.0, None, None, 1)
    assert not ratio.surely_above_1
    assert ratio.half_width == math.inf
    assert paired_ratio({1: 1.0}, {2: 1.0}, maximize=True) is None


def test_the_interval_is_students_on_logarithms() -> None:
    logs = [0.10, 0.12, 0.17]
    own = {item: math.exp(log) for item, log in enumerate(logs)}
    ratio = present(paired_ratio(own, dict.fromkeys(own, 1.0), maximize=True))
    half = 4.303 * statistics.stdev(logs) / math.sqrt(3)
    assert ratio.low == pytest.approx(math.exp(0.13 - half))
    assert ratio.half_width == pytest.approx(half)
    assert mean_in_rounds(list(own.values())) == ratio


def test_noise_is_what_launches_differ_by_and_not_what_the_machine_drifts_by() -> None:
    rng = random.Random(1)
    shared = {item: math.exp(-0.2 * item) for item in range(200)}
    values = {
        number: {item: level * math.exp(rng.gauss(0, 0.03)) for item, level in shared.items()} for number in range(3)
    }
    noise = present(noise_of_rounds(values))
    assert noise.relative_sd == pytest.approx(0.03, rel=0.1)
    assert (noise.launches, noise.degrees) == (600, 398)


def test_noise_needs_two_rounds() -> None:
    assert noise_of_rounds({}) is None
    assert noise_of_rounds({0: {1: 1.0}, 1: {1: 2.0}}) is None
    assert noise_of_rounds({0: {1: 1.0, 2: 3.0}, 1: {1: 2.0}, 2: {2: 5.0}}) is None
    noise = present(noise_of_rounds({0: {1: 1.0, 2: 3.0}, 1: {1: 2.0, 2: 6.0}, 2: {2: 5.0}}))
    assert noise.relative_sd == pytest.approx(0.0, abs=1e-12)
    assert (noise.launches, noise.degrees) == (5, 1)


def test_the_launches_of_all_configurations_tell_the_interval_of_two() -> None:
    rng = random.Random(2)
    covered, halves = [], dict[bool, list[float]]()
    for _ in range(1000):
        values = {number: {item: math.exp(rng.gauss(0, 0.03)) for item in range(3)} for number in range(4)}
        for pooled in (False, True):
            noise = noise_of_rounds(values) if pooled else None
            ratio = present(paired_ratio(values[1], values[0], maximize=True, noise=noise))
            halves.setdefault(pooled, []).append(ratio.half_width)
        covered.append(covers(ratio, 1.0))
    assert 0.93 < statistics.fmean(covered) < 0.97
    assert statistics.fmean(halves[True]) < 0.65 * statistics.fmean(halves[False])


@pytest.mark.parametrize("name", ["cnn", "gpt", "huggingface"])
def test_intervals_cover_the_truth_with_the_noise_of_real_launches(name: str) -> None:
    """Real noise has outliers, and is larger for fast configurations, such as the baseline."""
    recorded: dict[str, list[float]] = {}
    for run in json.loads(Path(f"benchmarks/landscapes/{name}.json").read_text())["runs"]:
        if run["outcome"] == "measured":
            recorded.setdefault(f"{run['zero']} {run['micro_batch']}", []).append(math.log(run["latency_s"]))
    logs = np.array([times for times in recorded.values() if len(times) == 3])
    residuals = (logs - logs.mean(axis=1, keepdims=True) - logs.mean(axis=0) + logs.mean()) * math.sqrt(3 / 2)
    order, rng, covered = np.argsort(logs.mean(axis=1)), np.random.default_rng(1), []
    fast, slow = (residuals[part].ravel() for part in (order[: len(order) // 4], order[len(order) // 2 :]))
    for _ in range(400):
        values = {
            number: {item: math.exp(log) for item, log in enumerate(rng.choice(slow if number else fast, 3))}
            for number in range(4)
        }
        covered.append(covers(paired_ratio(values[1], values[0], maximize=True, noise=noise_of_rounds(values)), 1.0))
    assert 0.90 < statistics.fmean(covered) < 0.98


def test_of_two_configurations_the_noise_is_that_of_their_ratios() -> None:
    values = {0: {1: 1.0, 2: 1.1, 3: 1.2}, 1: {1: 2.0, 2: 2.0, 3: 2.5, 4: 9.0}}
    alone = present(paired_ratio(values[1], values[0], maximize=True))
    pooled = present(paired_ratio(values[1], values[0], maximize=True, noise=noise_of_rounds(values)))
    assert (pooled.value, pooled.rounds) == (alone.value, alone.rounds)
    assert pooled.low == pytest.approx(alone.low)
    assert pooled.half_width == pytest.approx(alone.half_width)


def test_a_large_speed_up_need_not_be_known_to_the_percent() -> None:
    large, small = (Interval(value=x, low=x * 0.93, high=x * 1.07, rounds=3) for x in (10.0, 1.5))
    assert is_precise(large)
    assert not is_precise(small)
