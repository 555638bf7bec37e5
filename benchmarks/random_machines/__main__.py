"""Search machines drawn at random, one search each, and say how far from the best each method ends.

    python -m benchmarks.random_machines --seeds 0-199 --methods guided binary --results results.jsonl

With ``--continues`` a launch measures several trials that differ in live settings only. ``--budget`` counts trials.
Realistic machines, stress tests (one machine in ten) and recorded landscapes have separate rows. "Statements true" is
the share of searches in which not more was left to gain than they stated at their end with 90 % probability.

Results are appended to the file as they come; searches that it holds are not run again. Seeds 0 to 199 are for
development, 1000 to 1199 for the figures of a release.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import optuna

from benchmarks.optimum import optimum
from benchmarks.random_machines.draw import is_realistic
from benchmarks.random_machines.machine import RandomMachine, machine_of
from benchmarks.recorded import Recorded, recorded_landscapes
from benchmarks.search_efficiency import (
    METHODS,
    Result,
    count,
    median,
    missing,
    noise_of,
    run_one,
    statements_true,
)

Key = tuple[str, int, str]
"""Landscape, seed and method of a search."""


def main(arguments: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(arguments)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    logging.getLogger("determined").setLevel(logging.ERROR)
    methods = [method for method in args.methods if not missing(method)]
    for method in set(args.methods) - set(methods):
        print(f"{method} is left out: {', '.join(missing(method))} not installed (see benchmarks/README.md)\n")
    known = read(args.results)
    for seed in args.seeds:
        machine = machine_of(seed)
        missing_here = [method for method in methods if (machine.name, seed, method) not in known]
        if missing_here:
            best = optimum(machine).best.throughput
            _run(machine, missing_here, args, known, best=best, noise=machine.drawn.noise, seed=seed)
    for record in recorded_landscapes().values():
        for seed in range(args.recorded):
            missing_here = [method for method in methods if (record.name, seed, method) not in known]
            _run(record, missing_here, args, known, best=record.best()[0], noise=noise_of(record, None), seed=seed)
    asked = {machine_of(seed).name for seed in args.seeds} | (set(recorded_landscapes()) if args.recorded else set())
    print(table({key: result for key, result in known.items() if key[0] in asked}, methods))


def _run(
    landscape: RandomMachine | Recorded,
    methods: Sequence[str],
    args: argparse.Namespace,
    known: dict[Key, Result],
    *,
    best: float,
    noise: float,
    seed: int,
) -> None:
    """Run the searches of one landscape and seed, append them to the file and add them to ``known``."""
    for method in methods:
        result = run_one(
            landscape, method, best=best, budget=args.budget, noise=noise, seed=seed, continues=args.continues
        )
        known[landscape.name, seed, method] = result
        print(f"{landscape.about}: {method} ends {result.distance:.1%} away", file=sys.stderr, flush=True)
        with args.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(result)) + "\n")


def read(path: Path) -> dict[Key, Result]:
    """Return the results of a file by landscape, seed and method; empty if there is no file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    results = [Result(**json.loads(line)) for line in lines]
    return {(result.landscape, result.seed, result.method): result for result in results}


def table(found: Mapping[Key, Result], methods: Iterable[str]) -> str:
    """Return a markdown table, one row a class and method."""
    lines = [
        "| landscapes, method | searches | within 1 % | within 3 % | within 1 % after 15 launches "
        "| median launches to 1 % | median launches | without rounds | median trials | median minutes "
        "| median distance | 90th percentile | worst | statements true |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for kind in ("realistic", "recorded", "stress"):
        for method in methods:
            own = [result for key, result in found.items() if key[2] == method and kind_of(*key[:2]) == kind]
            if own:
                lines.append(row(f"{kind}, {method}", own))
    return "\n".join(lines) + "\n"


def kind_of(landscape: str, seed: int) -> str:
    """Return the class of a landscape: ``recorded``, ``realistic`` or ``stress``."""
    if landscape != f"machine-{seed}":
        return "recorded"
    return "realistic" if is_realistic(seed) else "stress"


def row(name: str, results: Sequence[Result]) -> str:
    """Return the line of some searches."""
    distances = sorted(result.distance for result in results)

    def share(holds: Callable[[Result], bool]) -> str:
        return f"{statistics.fmean(map(holds, results)):.0%}"

    cells = (
        name,
        str(len(results)),
        share(lambda result: result.distance <= 0.01),
        share(lambda result: result.distance <= 0.03),
        share(lambda result: result.launches_to_near is not None and result.launches_to_near <= 15),
        count(median(result.launches_to_near for result in results)),
        f"{statistics.median(result.launches for result in results):.0f}",
        f"{statistics.median(result.launches - result.rounds for result in results):.0f}",
        f"{statistics.median(result.trials for result in results):.0f}",
        f"{statistics.median(result.seconds for result in results) / 60:.0f}",
        f"{statistics.median(distances):.1%}",
        f"{distances[math.ceil(0.9 * len(distances)) - 1]:.1%}",  # that nine in ten do not exceed
        f"{distances[-1]:.1%}",
        statements_true([result.statements[-1:] for result in results]),
    )
    return f"| {' | '.join(cells)} |"


def seeds_of(text: str) -> list[int]:
    """Return the seeds of ``FIRST-LAST``, of ``FIRST-LAST:STEP`` or of a number."""
    bounds, _, step = text.partition(":")
    first, _, last = bounds.partition("-")
    return list(range(int(first), int(last or first) + 1, int(step or 1)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.random_machines", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--seeds", type=seeds_of, default=seeds_of("0-23"), metavar="A-B[:STEP]", help="machines (default 0-23)"
    )
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--budget", type=int, default=50, help="launches after the profile launch (default 50)")
    parser.add_argument("--recorded", type=int, default=0, metavar="N", help="searches of each recorded landscape too")
    parser.add_argument("--continues", action="store_true", help="a launch may measure several trials")
    parser.add_argument("--results", type=Path, required=True, help="JSON lines: results are read from it and added")
    return parser


if __name__ == "__main__":
    main()
