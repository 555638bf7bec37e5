"""How many launches and seconds each search method needs to find the fastest configuration, simulated or recorded.

    python -m benchmarks.search_efficiency [--seeds 11] [--landscapes NAME ...] [--methods NAME ...] [--json FILE]

Prints one table per landscape; ``benchmarks/README.md`` says how to read it and how to install the peers.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import optuna

from benchmarks import ours
from benchmarks.named_landscapes import LANDSCAPES, Computed, throughput
from benchmarks.optimum import Optimum, optimum
from benchmarks.peers import deepspeed_autotuning, determined_dsat, optuna_samplers
from benchmarks.recorded import Recorded, recorded_landscapes
from benchmarks.rig import Launch, Rig
from optuna_dsat.outcome import Outcome

Runner = Callable[..., None]

METHODS: Mapping[str, Runner] = {
    "random": ours.run,
    "binary": ours.run,
    "asha": ours.run,
    "guided": ours.run,
    "optuna-tpe": optuna_samplers.run,
    "optuna-random": optuna_samplers.run,
    "dsat-random": determined_dsat.run,
    "dsat-binary": determined_dsat.run,
    "dsat-asha": determined_dsat.run,
    "deepspeed-fast": deepspeed_autotuning.run,
    "deepspeed-grid": deepspeed_autotuning.run,
    "deepspeed-random": deepspeed_autotuning.run,
    "deepspeed-model": deepspeed_autotuning.run,
}
"""Ours without a prefix, then the peers."""
NEAR = 0.01
"""A configuration this close to the true best counts as found."""
NOISE = 0.02
"""Relative deviation of measured times, where a landscape does not tell."""
CLOSE = 0.05
"""A configuration this close is what most would be content with."""
_NEEDS = {"dsat-": ("determined",), "deepspeed-": ("deepspeed", "tabulate"), "deepspeed-model": ("xgboost",)}


@dataclass(frozen=True, kw_only=True)
class Result:
    """One search."""

    landscape: str
    method: str
    seed: int
    launches: int
    """In all, profile launches and finalists included; a launch may measure several trials."""
    seconds: float
    """Simulated, in all."""
    launches_to_near: int | None
    """Launches, profile launches included, until the held configuration was within ``NEAR`` of the true best."""
    seconds_to_near: float | None
    launches_to_close: int | None
    """Likewise for ``CLOSE``."""
    distance: float
    """Of the configuration held at the end from the true best, relative; 1 without any. Negative for one outside the
    tuner's space that beats it."""
    outcomes: Mapping[str, int]
    trials: int
    """Measurements in all; as many as launches if none continues another."""
    rounds: int
    """Launches that compare finalists and the user's config."""
    statements: Sequence[tuple[float, float]] = ()
    """What may be left to gain as the method states it with 90 % probability, and what was left; the last statement is
    that of the end of the search.
    """

    @property
    def found(self) -> bool:
        """Whether any configuration ran."""
        return self.distance < 1


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method on a landscape: medians over seeds, infinite where most seeds never got there."""

    method: str
    launches_to_near: float
    seconds_to_near: float
    near: float
    """Share of seeds that held a configuration within ``NEAR`` at some time."""
    launches_to_close: float
    distance: float
    found: float
    """Share of seeds that found any configuration that runs."""
    launches: float
    statements: str
    """Share of true statements at the end of searches, see ``Result.statements``."""


def main(arguments: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(arguments)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    logging.getLogger("determined").setLevel(logging.ERROR)
    methods = [method for method in args.methods if not missing(method)]
    for method in args.methods:
        if method not in methods:
            print(f"{method} is left out: {', '.join(missing(method))} not installed (see benchmarks/README.md)\n")
    results: list[Result] = []
    for landscape in _chosen(args):
        best, heading = known(landscape)
        print(heading, flush=True)
        rows: list[Row] = []
        for method in methods:
            began = time.monotonic()
            matches = [
                run_one(
                    landscape,
                    method,
                    best=best,
                    budget=args.budget,
                    noise=noise_of(landscape, args.noise),
                    seed=seed,
                )
                for seed in range(args.seeds)
            ]
            results += matches
            rows.append(summarise(matches))
            print(f"{landscape.name} {method}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
        print(table(rows), flush=True)
    if args.json:
        args.json.write_text(json.dumps([asdict(result) for result in results], indent=1))


def _chosen(args: argparse.Namespace) -> list[Computed | Recorded]:
    """Return the landscapes that are asked for: without a choice the seven and all that are recorded."""
    if args.recorded:
        return [Recorded.load(path) for path in args.recorded]
    every: dict[str, Computed | Recorded] = {**LANDSCAPES, **recorded_landscapes()}
    return [every[name] for name in args.landscapes or every]


def noise_of(landscape: Computed | Recorded, asked: float | None) -> float:
    """Return the noise to search with: what is asked for, else the recorded one, else ``NOISE``."""
    if asked is not None:
        return asked
    return (isinstance(landscape, Recorded) and landscape.noise) or NOISE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search_efficiency", description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=11, help="searches per method and landscape (default 11)")
    parser.add_argument(
        "--landscapes",
        nargs="+",
        choices=[*LANDSCAPES, *recorded_landscapes()],
        help="default all, the recorded ones too",
    )
    parser.add_argument("--recorded", nargs="+", type=Path, metavar="FILE", help="these records instead")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--budget", type=int, default=64, help="launches after the profile launch (default 64)")
    parser.add_argument(
        "--noise",
        type=float,
        help=f"relative deviation of measured times (default {NOISE}, on records the recorded one)",
    )
    parser.add_argument("--json", type=Path, help="file that receives the result of every search")
    return parser


def missing(method: str) -> list[str]:
    needed = [package for prefix, packages in _NEEDS.items() if method.startswith(prefix) for package in packages]
    return [package for package in needed if importlib.util.find_spec(package) is None]


def run_one(
    landscape: Computed | Recorded,
    method: str,
    *,
    best: float,
    budget: int,
    noise: float,
    seed: int,
    continues: bool = False,
) -> Result:
    """Run one search and judge it.

    Args:
        landscape: Where.
        method: One of ``METHODS``.
        best: Throughput of the true best, in samples per second.
        budget: Launches after the profile launches.
        noise: Relative standard deviation of measured times.
        seed: Of the method and of the noise.
        continues: Whether a launch measures several trials.
    """
    rig = Rig(landscape, budget=budget, noise=noise, seed=seed, continues=continues)
    METHODS[method](method, rig, budget=budget, seed=seed)
    launches = rig.launches
    distances = [1 - worth / best for worth in _held(landscape, launches, rig.results)]
    near = next((index for index, distance in enumerate(distances) if distance <= NEAR), None)
    close = next((index for index, distance in enumerate(distances) if distance <= CLOSE), None)
    outcomes = [launch.outcome.value for launch in launches]
    started = list(accumulate(not launch.root for launch in launches))
    return Result(
        landscape=landscape.name,
        method=method,
        seed=seed,
        launches=started[-1],
        seconds=launches[-1].ended_s,
        launches_to_near=None if near is None else started[near],
        seconds_to_near=None if near is None else launches[near].ended_s,
        launches_to_close=None if close is None else started[close],
        distance=distances[-1],
        outcomes={outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))},
        rounds=sum(launch.purpose == "confirm" for launch in launches),
        trials=len(launches),
        statements=[(stated, best / throughput(landscape, config) - 1) for config, stated in rig.statements],
    )


def _held(
    landscape: Computed | Recorded,
    launches: Sequence[Launch],
    results: Sequence[Mapping[str, Any] | None] | None,
) -> list[float]:
    """Return after each launch what the configuration then held is worth, without noise.

    Held is the result that the search would have, or the best measurement.
    """
    worths = []
    held = shown = 0.0
    for index, launch in enumerate(launches):
        value = launch.metrics.get("throughput", 0.0)
        if launch.outcome is Outcome.MEASURED and launch.purpose != "profile" and value > shown:
            shown, held = value, throughput(landscape, launch.ds_config)
        config = None if results is None else results[index]
        if config is not None:
            held = throughput(landscape, config)
        worths.append(held)
    return worths


def summarise(results: Sequence[Result]) -> Row:
    """Return the medians over the seeds of one method on one landscape."""
    return Row(
        method=results[0].method,
        launches_to_near=median(r.launches_to_near for r in results),
        seconds_to_near=median(r.seconds_to_near for r in results),
        near=statistics.fmean(r.launches_to_near is not None for r in results),
        launches_to_close=median(r.launches_to_close for r in results),
        distance=statistics.median(r.distance for r in results),
        found=statistics.fmean(r.found for r in results),
        launches=statistics.median(r.launches for r in results),
        statements=statements_true(r.statements[-1:] for r in results),
    )


def median(values: Iterable[float | None]) -> float:
    """Return the median, infinite where half of the values or more are None: never."""
    return statistics.median_high([math.inf if value is None else value for value in values])


def statements_true(statements: Iterable[Sequence[tuple[float, float]]]) -> str:
    """Return the share of statements that were true, and their number; empty without any."""
    true = [left <= stated for several in statements for stated, left in several]
    return f"{statistics.fmean(true):.0%} of {len(true)}" if true else ""


def known(landscape: Computed | Recorded) -> tuple[float, str]:
    """Return the best throughput of a landscape, and its heading."""
    if not isinstance(landscape, Recorded):
        best = optimum(landscape)
        return best.best.throughput, _heading(landscape, best)
    rate, structure, size = landscape.best()
    return rate, (
        f"### {landscape.name}\n{landscape.about}.\n"
        f"Best recorded: {rate:.4g} samples/s at {structure.words}, micro-batch {size}; "
        f"{len(landscape.lineages)} lineages.\n"
    )


def _heading(landscape: Computed, best: Optimum) -> str:
    result = best.best
    lines = [
        f"### {landscape.name}",
        f"{landscape.about}. {landscape.slots} GPUs, {landscape.device_bytes / 2**30:.0f} GiB each.",
        f"True best: {result.throughput:.4g} samples/s at ZeRO {result.params['zero_stage']}, micro-batch "
        f"{result.micro_batch} of {result.largest} that fit; {best.runnable} of {best.lineages} lineages run, "
        f"{best.near} hold a configuration within 1 %.",
        "",
    ]
    return "\n".join(lines)


def table(rows: Sequence[Row]) -> str:
    """Return a markdown table, one row a method."""
    lines = [
        "| method | launches to 5 % | to 1 % | minutes to 1 % | seeds that got to 1 % | final distance "
        "| seeds with any | launches | statements true |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        minutes = (
            ""
            if math.isinf(row.seconds_to_near)
            else f"{row.seconds_to_near / 60:.{0 if row.seconds_to_near >= 60 else 1}f}"
        )
        lines.append(
            f"| {row.method} | {count(row.launches_to_close)} | {count(row.launches_to_near)} | {minutes} "
            f"| {row.near:.0%} | {row.distance:.1%} | {row.found:.0%} | {row.launches:.0f} | {row.statements} |"
        )
    return "\n".join(lines) + "\n"


def count(launches: float) -> str:
    """Return a number of launches in words."""
    return "never" if math.isinf(launches) else f"{launches:.0f}"


if __name__ == "__main__":
    main()
