"""Warm launches against plain ones, in turns: what each costs beside its steps, and whether the losses are the same."""

from __future__ import annotations

import contextlib
import io
import math
import shutil
import statistics
from typing import Any

from benchmarks.launch_overhead import EXAMPLES, PHASES, Launch, measure
from benchmarks.prove_gpu.context import Context
from benchmarks.prove_gpu.proof import Status, Verdict
from optuna_dsat.runtime.events import RankStarted, StepMeasured

__all__ = ["losses_apart", "turns"]

PAIRS = 5


def turns(context: Context) -> Verdict:
    """Launch ``examples/gpt`` by torchrun and warm in turns."""
    folder = context.folder("turns")
    for old in folder.iterdir():
        shutil.rmtree(old)
    with contextlib.redirect_stdout(io.StringIO()) as words:
        result = measure(EXAMPLES["gpt"], launches=PAIRS, devices=context.devices, folder=folder)
    outside = {kind: [launch.outside() for launch in launches] for kind, launches in result.items()}
    medians = {kind: statistics.median(values) for kind, values in outside.items()}
    losses = {kind: [_losses(launch) for launch in launches] for kind, launches in result.items()}
    forked = sum(_is_forked(launch) for launch in result["warm"])
    apart = max(losses_apart(*pair) for pair in zip(losses["torchrun"], losses["warm"], strict=True))
    own = max(losses_apart(losses["torchrun"][0], other) for other in losses["torchrun"])
    figures: dict[str, Any] = {
        "pairs": PAIRS,
        "torchrun_outside_steps_s": medians["torchrun"],
        "warm_outside_steps_s": medians["warm"],
        "warm_over_torchrun": medians["warm"] / medians["torchrun"],
        "forked": forked,
        "losses_apart": apart if math.isfinite(apart) else "not comparable",
        "torchrun_runs_apart": own if math.isfinite(own) else "not comparable",
        "outside_steps_s": outside,
        "phases_s": {kind: _median_phases(launches) for kind, launches in result.items()},
        "losses": {kind: rows[0] for kind, rows in losses.items()},
        "notices": words.getvalue().splitlines()[-4:],
    }
    shown = "python -m benchmarks.launch_overhead --examples gpt"
    ratio = f"Warm takes {figures['warm_over_torchrun']:.1%} of torchrun's {medians['torchrun']:.1f} s outside of steps"
    if forked < PAIRS:
        why = f"Only {forked} of {PAIRS} warm launches were forked."
        return Verdict(status=Status.FELL_SHORT, why=why, figures=figures, command=shown)
    if not losses["warm"][0] or apart > own:
        why = f"{ratio}; losses differ by {apart:.2e}, those of torchrun's own runs by {own:.2e}."
        return Verdict(status=Status.FELL_SHORT, why=why, figures=figures, command=shown)
    same = "the same to the last bit" if apart == 0 else f"as far apart as torchrun's own runs ({own:.2e})"
    why = f"{ratio}; the losses are {same}."
    faster = medians["warm"] < medians["torchrun"]
    return Verdict(status=Status.PROVEN if faster else Status.FELL_SHORT, why=why, figures=figures, command=shown)


def _losses(launch: Launch) -> list[float | None]:
    steps = sorted(
        (event for event in launch.events if isinstance(event, StepMeasured) and event.rank == 0),
        key=lambda event: event.step,
    )
    return [step.loss for step in steps]


def losses_apart(first: list[float | None], second: list[float | None]) -> float:
    """Return the largest relative difference of two rows of losses; infinite where a step is in one alone."""
    if len(first) != len(second):
        return math.inf
    apart = [0.0]
    for item, other in zip(first, second, strict=True):
        if item is None or other is None or not (math.isfinite(item) and math.isfinite(other)):
            apart.append(0.0 if repr(item) == repr(other) else math.inf)
        elif item != other:
            apart.append(abs(item - other) / max(abs(item), abs(other)))
    return max(apart)


def _is_forked(launch: Launch) -> bool:
    started = [event for event in launch.events if isinstance(event, RankStarted)]
    return bool(started) and all(event.forked for event in started)


def _median_phases(launches: list[Launch]) -> dict[str, float]:
    rows = [launch.phases() for launch in launches]
    return {phase: statistics.median(row[phase] for row in rows) for phase in PHASES}
