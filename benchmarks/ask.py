"""Time of one ask of guided search, with a long history in a large space.

    python -m benchmarks.ask [--trials 500] [--rounds 9]

Prints the median and the largest time of an ask and its suggestions, in milliseconds, on Optuna's storage in memory,
and how long the space's table takes, which a process builds once.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import optuna
from optuna.trial import TrialState

from benchmarks.named_landscapes import LANDSCAPES, Trained, throughput
from benchmarks.optimum import search_space
from optuna_dsat.config import ds_config
from optuna_dsat.config.search_space import SearchSpace
from optuna_dsat.cost.memory import Hardware, ModelProfile
from optuna_dsat.guided.planner import GuidedPlanner
from optuna_dsat.guided.problem import Problem
from optuna_dsat.outcome import Outcome
from optuna_dsat.samplers import GuidedSampler
from optuna_dsat.trials import attributes

__all__ = ["main"]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ask", description=__doc__.split("\n")[0])
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    landscape = LANDSCAPES["fast-links"]
    space = search_space(landscape)
    began = time.perf_counter()
    planner = _planner(landscape, space)
    built_s = time.perf_counter() - began
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0))
    for _ in range(args.trials):
        _answer(study, space, landscape)
    study.sampler = GuidedSampler(planner=planner, seed=0)
    seconds = [_answer(study, space, landscape) for _ in range(args.rounds)]
    print(
        f"{len(planner.problem.table.lineages)} lineages, {args.trials} trials: "
        f"the table took {1e3 * built_s:.0f} ms; an ask"
    )
    print(f"{1e3 * statistics.median(seconds):.0f} ms (median of {args.rounds}), at most {1e3 * max(seconds):.0f} ms")


def _planner(landscape: Trained, space: SearchSpace) -> GuidedPlanner:
    known = vars(landscape.profile(landscape.slots))
    profile = ModelProfile.from_json({**known, "device_name": ""})
    machine = landscape.machine
    return GuidedPlanner(
        Problem(
            profile=profile,
            hardware=Hardware(
                world_size=machine.gpus,
                ranks_per_node=machine.gpus_per_node,
                device_memory_bytes=machine.device_bytes,
                host_memory_bytes=machine.host_bytes,
            ),
            config=landscape.user_config,
            space=space,
            metric="throughput",
        )
    )


def _answer(study: optuna.Study, space: SearchSpace, landscape: Trained) -> float:
    """Ask, tell what the landscape says, and return the seconds that ask and suggestions took."""
    began = time.perf_counter()
    trial = study.ask()
    params = space.suggest(trial)
    seconds = time.perf_counter() - began
    config = ds_config.merge(ds_config.effective(landscape.user_config), space.overlay(params))
    result = landscape.run(config, landscape.slots)
    trial.set_user_attr(attributes.OUTCOME, result.outcome.value)
    if result.outcome is not Outcome.MEASURED:
        study.tell(trial, state=TrialState.PRUNED)
        return seconds
    phases: dict[str, Any] = {"forward": result.forward_s, "backward": result.backward_s, "step": result.step_s}
    trial.set_user_attr(attributes.METRICS, {**phases, "latency": result.latency_s})
    trial.set_user_attr(attributes.PEAK_BYTES, result.peak_bytes)
    study.tell(trial, throughput(landscape, config))
    return seconds


if __name__ == "__main__":
    main()
