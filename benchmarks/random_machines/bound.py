"""How near the best a search could come on machines drawn at random that knows all but which structure is fastest.

    python -m benchmarks.random_machines.bound --seeds 1000-1199

It is told, for every structure (ZeRO stage and offloads) that runs, the fastest micro-batch and settings of all knobs,
and how much launches differ. It launches the user's config, then each structure once in an order drawn at random,
refused ones too, and from then on whichever of the two best means has fewer launches. It holds the best mean. What a
search does beyond that (climb to sizes that pay, look for the edge of memory, tell ten knobs apart) costs it nothing,
so a real one is slower wherever it cannot know the order of structures beforehand.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.optimum import reaches
from benchmarks.random_machines.__main__ import seeds_of
from benchmarks.random_machines.machine import RandomMachine, machine_of, structure_of

__all__ = ["Told", "distances", "told_of"]

_BEFORE = 2
"""Launches before the first structure: the profile's and the user's own config."""
_DRAWS = 100
"""Searches a machine, each with an order and noise of its own."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """What is known of a machine before the first launch."""

    throughputs: NDArray[np.float64]
    """Samples per second of each structure's best configuration, shape ``(structures,)``; 0 for a refused one."""
    noise: float
    """Relative standard deviation from launch to launch."""


def told_of(machine: RandomMachine) -> Told:
    """Return the best of each structure; those that do not fit at any size are left out."""
    best = {structure: 0.0 for structure in machine.drawn.refused if structure in machine.drawn.habits}
    for reach in reaches(machine):
        if reach.largest:
            structure = structure_of(reach.settings)
            best[structure] = max(best.get(structure, 0.0), reach.throughput)
    return Told(throughputs=np.array([*best.values()]), noise=machine.drawn.noise)


def distances(parts: Told, dice: np.random.Generator, *, launches: int) -> list[float]:
    """Return how far from the best what one search holds is after each of its launches; 1 before the first result.

    Args:
        parts: The machine.
        dice: Draws order and noise.
        launches: In all, those before the first structure among them.
    """
    count = len(parts.throughputs)
    order = dice.permutation(count)
    sums, times = np.zeros(count), np.zeros(count, dtype=int)
    top, result = float(parts.throughputs.max()), [1.0] * _BEFORE
    while len(result) < launches:
        if len(result) - _BEFORE < count:
            item = int(order[len(result) - _BEFORE])
        else:
            first, second = np.argsort(-sums / np.maximum(times, 1))[: min(2, count)][[0, -1]]
            item = int(first if times[first] <= times[second] else second)
        times[item] += 1
        sums[item] += parts.throughputs[item] * (1 + parts.noise * dice.standard_normal())
        held = int(np.argmax(sums / np.maximum(times, 1)))
        result.append(1 - float(parts.throughputs[held]) / top)
    return result


def row(searches: Sequence[Sequence[float]]) -> str:
    """Return a line of the table: shares within 1 and 3 %, launches to 1 %."""

    def share(within: float, after: int) -> str:
        return f"{statistics.fmean(search[after - 1] <= within for search in searches):.0%}"

    reached = [next((n for n, far in enumerate(search, start=1) if far <= 0.01), math.inf) for search in searches]
    cells = (share(0.01, 6), share(0.01, 15), share(0.01, 20), share(0.03, 20), f"{statistics.median(reached):g}")
    return " | ".join(cells)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.random_machines.bound")
    parser.add_argument("--seeds", type=seeds_of, default="1000-1199", metavar="FIRST-LAST")
    groups: dict[str, list[list[float]]] = {"all": [], "by communication theory": [], "by no law": []}
    sizes = []
    for seed in parser.parse_args(arguments).seeds:
        machine = machine_of(seed)
        words, dice = told_of(machine), np.random.default_rng(seed)
        sizes.append(len(words.throughputs))
        searches = [distances(words, dice, launches=20) for _ in range(_DRAWS)]
        groups["all"] += searches
        groups["by communication theory" if machine.drawn.ordered else "by no law"] += searches
    print(f"{len(sizes)} machines, {statistics.median(sizes):g} structures in the median\n")
    print(
        "| machines whose structures cost | share of machines | within 1 % after 6 launches | after 15 | after 20 | ",
        end="",
    )
    print("within 3 % after 20 | launches to 1 % |\n|---|--:|--:|--:|--:|--:|--:|")
    for name, searches in groups.items():
        if searches:
            print(f"| {name} | {len(searches) / len(groups['all']):.0%} | {row(searches)} |")


if __name__ == "__main__":
    main()
