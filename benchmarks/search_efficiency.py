"""How many launches each search method needs, and how far from the best it ends, on random machines and on records.

    python -m benchmarks.search_efficiency --seeds 0-199 --methods guided binary --results results.jsonl

Realistic machines, stress tests (one machine in ten) and records have separate rows; ``benchmarks/README.md`` says how
to read them and how to install the peers. "Statements true" is the share of searches in which not more was left to gain
than they stated at their end with 90 % probability. A launch measures several trials that differ in live settings only,
as the product's do; ``--budget`` counts trials.

Results are appended to the file as they come; searches that it holds are not run again. Seeds 0 to 199 are for
development, 1000 to 1199 for the figures of a release.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import optuna

from benchmarks import ours
from benchmarks.optimum import optimum
from benchmarks.peers import deepspeed_autotuning, determined_dsat, optuna_samplers
from benchmarks.random_machines.draw import is_realistic
from benchmarks.random_machines.machine import RandomMachine, machine_of
from benchmarks.recorded import Recorded, recorded_landscapes
from benchmarks.rig import Landscape, Launch, Rig, throughput
from optuna_dsat.outcome import Outcome

Runner = Callable[..., None]
Key = tuple[str, int, str]
"""Landscape, seed and method of a search."""

METHODS: Mapping[str, Runner] = {
    "random": ours.run,
    "binary": ours.run,
    "asha": ours.run,
    "guided": ours.run,
    "guided-both": ours.run,
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
"""Ours without a prefix, then the peers. ``guided-both`` answers the question at the user's global batch, too."""
NEAR = 0.01
"""A configuration this close to the true best counts as found."""
NOISE = 0.02
"""Relative deviation of measured times, where a record does not tell."""
_MORE_ROUNDS = 30
"""Launches beyond the budget for the rounds of two answers, which one round does not compare."""
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
    distance: float
    """Of the configuration held at the end from the true best, relative; 1 without any. Negative for one outside the
    tuner's space that beats it."""
    outcomes: Mapping[str, int]
    trials: int
    """Measurements in all; as many as launches if none continues another."""
    rounds: int
    """Launches that compare finalists and the user's config."""
    same_batch: float | None = None
    """Distance of the answer at the user's global batch from the true best there; None if it was not asked for."""
    statements: Sequence[tuple[float, float]] = ()
    """What may be left to gain as the method states it with 90 % probability, and what was left; the last statement is
    that of the end of the search.
    """


def main(arguments: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(arguments)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    logging.getLogger("determined").setLevel(logging.ERROR)
    methods = [method for method in args.methods if not missing(method)]
    for method in set(args.methods) - set(methods):
        print(f"{method} is left out: {', '.join(missing(method))} not installed (see benchmarks/README.md)\n")
    known = read(args.results)
    machines = {} if args.records else {seed: machine_of(seed) for seed in args.seeds}
    for seed, machine in machines.items():
        if any((machine.name, seed, method) not in known for method in methods):
            best = optimum(machine).throughput
            _run(machine, methods, args, known, best=best, noise=machine.drawn.noise, seed=seed)
    records = [Recorded.load(path) for path in args.records] or [*recorded_landscapes().values()]
    for record in records:
        for seed in range(args.recorded):
            _run(record, methods, args, known, best=record.best()[0], noise=record.noise or NOISE, seed=seed)
    asked = {item.name for item in (*machines.values(), *(records if args.recorded else ()))}
    print(table({key: result for key, result in known.items() if key[0] in asked}, methods))


def _run(
    landscape: Landscape,
    methods: Sequence[str],
    args: argparse.Namespace,
    known: dict[Key, Result],
    *,
    best: float,
    noise: float,
    seed: int,
) -> None:
    """Run the searches of a landscape and seed that are not known; append them to the file and to ``known``."""
    for method in methods:
        if (landscape.name, seed, method) in known:
            continue
        result = run_one(landscape, method, best=best, budget=args.budget, noise=noise, seed=seed)
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
        "| median distance | 90th percentile | worst | statements true | at the user's batch within 1 %, 3 % |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
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
        _at_user_batch(results),
    )
    return f"| {' | '.join(cells)} |"


def _at_user_batch(results: Sequence[Result]) -> str:
    """Return the shares of answers at the user's global batch within 1 and 3 %; empty without any."""
    distances = [result.same_batch for result in results if result.same_batch is not None]
    if not distances:
        return ""
    return ", ".join(f"{statistics.fmean(each <= limit for each in distances):.0%}" for limit in (0.01, 0.03))


def seeds_of(text: str) -> list[int]:
    """Return the seeds of ``FIRST-LAST``, of ``FIRST-LAST:STEP`` or of a number."""
    bounds, _, step = text.partition(":")
    first, _, last = bounds.partition("-")
    return list(range(int(first), int(last or first) + 1, int(step or 1)))


def missing(method: str) -> list[str]:
    needed = [package for prefix, packages in _NEEDS.items() if method.startswith(prefix) for package in packages]
    return [package for package in needed if importlib.util.find_spec(package) is None]


def run_one(
    landscape: Landscape,
    method: str,
    *,
    best: float,
    budget: int,
    noise: float,
    seed: int,
) -> Result:
    """Run one search and judge it.

    Args:
        landscape: Where.
        method: One of ``METHODS``.
        best: Throughput of the true best, in samples per second.
        budget: Launches after the profile launches.
        noise: Relative standard deviation of measured times.
        seed: Of the method and of the noise.
    """
    more = _MORE_ROUNDS if method.endswith(ours.BOTH) else 0
    rig = Rig(landscape, budget=budget + more, noise=noise, seed=seed)
    METHODS[method](method, rig, budget=budget, seed=seed)
    launches = rig.launches
    distances = [1 - worth / best for worth in _held(landscape, launches, rig.results)]
    near = next((index for index, distance in enumerate(distances) if distance <= NEAR), None)
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
        distance=distances[-1],
        outcomes={outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))},
        rounds=sum(launch.purpose == "confirm" for launch in launches),
        trials=len(launches),
        same_batch=_same_batch(landscape, rig.same_batch),
        statements=[(stated, best / throughput(landscape, config) - 1) for config, stated in rig.statements],
    )


def _same_batch(landscape: Landscape, config: Mapping[str, Any] | None) -> float | None:
    """Return the distance of a config from the true best at the user's global batch, whose accumulation is 1."""
    if config is None or not isinstance(landscape, RandomMachine):
        return None
    best = optimum(landscape, samples=landscape.drawn.user_micro_batch).throughput
    return 1 - throughput(landscape, config) / best


def _held(
    landscape: Landscape,
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


def median(values: Iterable[float | None]) -> float:
    """Return the median, infinite where half of the values or more are None: never."""
    return statistics.median_high([math.inf if value is None else value for value in values])


def statements_true(statements: Iterable[Sequence[tuple[float, float]]]) -> str:
    """Return the share of statements that were true, and their number; empty without any."""
    true = [left <= stated for several in statements for stated, left in several]
    return f"{statistics.fmean(true):.0%} of {len(true)}" if true else ""


def count(launches: float) -> str:
    """Return a number of launches in words."""
    return "never" if math.isinf(launches) else f"{launches:.0f}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search_efficiency", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--seeds", type=seeds_of, default=seeds_of("0-23"), metavar="A-B[:STEP]", help="machines (default 0-23)"
    )
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--budget", type=int, default=50, help="trials after the profile launch (default 50)")
    parser.add_argument("--recorded", type=int, default=0, metavar="N", help="searches of each record too (default 0)")
    parser.add_argument(
        "--records",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="these records, and no machines (default those of the benchmark)",
    )
    parser.add_argument("--results", type=Path, required=True, help="JSON lines: results are read from it and added")
    return parser


if __name__ == "__main__":
    main()
