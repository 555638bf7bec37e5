"""The section on recorded landscapes of the report on random machines; what its file holds is not searched again."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.recorded import Recorded
from benchmarks.search_efficiency import Result, known, noise_of, run_one, summarise, table

__all__ = ["append", "recorded_section", "rows"]


def rows(path: Path) -> list[Result]:
    """Return the results of a file, one a line; none if there is no file."""
    if not path.exists():
        return []
    return [Result(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def append(path: Path, result: Result) -> None:
    """Add a result to a file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(result)) + "\n")


def recorded_section(
    landscapes: Mapping[str, Recorded], methods: Sequence[str], *, seeds: int, budget: int, results: Path
) -> str:
    """Search the landscapes and return their tables as markdown.

    Args:
        landscapes: By name.
        methods: Of ours and of the peers.
        seeds: Searches of each method on each landscape.
        budget: Launches after the profile launch.
        results: File that results are read from and added to.
    """
    if not landscapes:
        return "No landscape is recorded (benchmarks.record_landscape).\n"
    found = {(result.landscape, result.method, result.seed): result for result in rows(results)}
    lines = []
    for name, landscape in landscapes.items():
        best, heading = known(landscape)
        for method in methods:
            for seed in range(seeds):
                if (name, method, seed) not in found:
                    noise = noise_of(landscape, None)
                    result = run_one(landscape, method, best=best, budget=budget, noise=noise, seed=seed)
                    found[name, method, seed] = result
                    append(results, result)
                    print(f"{name}: {method} ends {result.distance:.1%} away", file=sys.stderr, flush=True)
        lines += [
            heading,
            table([summarise([found[name, method, seed] for seed in range(seeds)]) for method in methods]),
        ]
    return "\n".join(lines)
