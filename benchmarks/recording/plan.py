"""Which configurations are recorded, in which order, and how long that takes: pure functions."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

import numpy as np

from optuna_dsat.launch.measurement import GlobalStep

__all__ = ["WARM_UP", "enough", "estimate_s", "ladder", "launch_s", "next_scout", "order", "predicted", "sizes"]

WARM_UP = 2
"""Steps of a launch that do not count."""
LEAST_STEPS = 2
"""Fewest steps that count."""
WINDOW_S = 0.8
"""Shortest time over which the steps that count are measured: what else ran in it can be told then."""
LEVELS = (3, 2, 1, 0)
"""Densities of the ladder, densest first."""
_SCOUT_FACTOR = 4
"""Most by which one scout is larger than the last."""
_BEYOND = (1, 2, 2, 2)
"""By level: sizes recorded beyond the one whose step takes the longest time that is wanted."""


def enough(counted: Sequence[GlobalStep]) -> bool:
    """Return whether a launch has measured for long enough."""
    return len(counted) >= LEAST_STEPS and sum(step.latency_s for step in counted) >= WINDOW_S


def next_scout(known: Mapping[int, float | None], *, longest_step_s: float) -> int | None:
    """Return the micro-batch that is tried next to find where a step takes the longest time; None if that is known.

    Args:
        known: Micro-batch -> seconds of a step, None where it did not run.
        longest_step_s: The longest step that is wanted.
    """
    ran = {size: seconds for size, seconds in known.items() if seconds is not None}
    if not known:
        return 1
    if len(ran) < len(known):
        return None  # it does not run, or no larger one does
    last = max(ran)
    if ran[last] >= longest_step_s:
        return None
    doublings = math.ceil(math.log2(longest_step_s / ran[last]))
    return int(last * min(_SCOUT_FACTOR, 2 ** max(1, doublings)))


def predicted(known: Mapping[int, float], size: int) -> float:
    """Return the seconds of a step by those of some micro-batches: a power law between two, in proportion beyond."""
    ordered = sorted(known)
    if size > ordered[-1]:
        return known[ordered[-1]] * size / ordered[-1]
    return float(np.exp(np.interp(math.log(size), np.log(ordered), np.log([known[one] for one in ordered]))))


def ladder(level: int, *, largest: int) -> list[int]:
    """Return micro-batches up to ``largest``, rising.

    Level 0 is 1, 2, 4, ...; level 1 adds the middles from 12 on, most of them multiples of 8; level 2 an odd number to
    every other doubling, level 3 to each, and the first middles.
    """
    found = set()
    power = 1
    while power <= largest:
        found.add(power)
        if (level >= 1 and power >= 8) or (level >= 3 and power >= 2):
            found.add(power + power // 2)
        if power >= 4 and (level >= 3 or (level >= 2 and power.bit_length() % 2)):
            found.add(power + power // 4 + (power > 4))
        power *= 2
    return sorted(size for size in found if size <= largest)


def sizes(known: Mapping[int, float], level: int, *, longest_step_s: float, most: int | None = None) -> list[int]:
    """Return the micro-batches of a structure: up to the longest step, and two beyond.

    Args:
        known: Micro-batch -> seconds of a step, of the scouts that ran.
        level: Density of the ladder.
        longest_step_s: The longest step that is wanted.
        most: Largest that may run; None for no limit.
    """
    every = ladder(level, largest=4 * max(known))
    within = [size for size in every if predicted(known, size) <= longest_step_s]
    beyond = [size for size in every if size not in within and size in ladder(min(level, 1), largest=size)]
    return [size for size in [*within, *beyond[: _BEYOND[level]]] if most is None or size <= most]


def launch_s(step_s: float, *, beside_s: float) -> float:
    """Return the seconds of a launch."""
    return beside_s + step_s * (WARM_UP + max(LEAST_STEPS, math.ceil(WINDOW_S / step_s)))


def estimate_s(
    scouts: Sequence[Mapping[int, float]], plan: Sequence[Sequence[int]], *, beside_s: float, rounds: int
) -> float:
    """Return the seconds of all rounds.

    Args:
        scouts: For each structure: micro-batch -> seconds of a step.
        plan: For each structure: the micro-batches.
        beside_s: Seconds of a launch beside its steps.
        rounds: Launches of each configuration.
    """
    return rounds * sum(
        launch_s(predicted(known, size), beside_s=beside_s)
        for known, chosen in zip(scouts, plan, strict=True)
        for size in chosen
    )


def order(plan: Sequence[Sequence[int]], *, rounds: int, seed: int) -> list[tuple[int, int, int]]:
    """Return (round, structure, micro-batch) of all launches: round by round, each in an order of its own.

    Args:
        plan: For each structure: the micro-batches.
        rounds: Launches of each configuration.
        seed: Of the orders.
    """
    dice = random.Random(seed)
    found: list[tuple[int, int, int]] = []
    for number in range(1, rounds + 1):
        one = [(number, index, size) for index, chosen in enumerate(plan) for size in chosen]
        dice.shuffle(one)
        found += one
    return found
