"""Reason for the end of a search, its remaining potential, and the commands that continue it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from functools import partial
from typing import Any

from optuna.trial import FrozenTrial

from optuna_dsat.config.conditions import OFFLOAD_OPTIMIZER, OFFLOAD_PARAM
from optuna_dsat.store import display_url
from optuna_dsat.study.confirm.verdict import Verdict, VerdictKind
from optuna_dsat.study.options.declaration import stored_command
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.trials.failures import error_of, structure_failures
from optuna_dsat.trials.lineage import MICRO_BATCH, ZERO_STAGE, Feasibility, feasibility


class EndReason(StrEnum):
    """Why a search ended."""

    BUDGET = "--max-trials is reached"
    EARLY_STOPPING = "no new best in as many trials as --early-stopping allows"
    TIMEOUT = "the time of --timeout is over"
    EXHAUSTED = "no further trial is expected to gain enough"
    STOPPED = "a callback called study.stop()"
    INTERRUPTED = "interrupted"


BUDGETS = frozenset({EndReason.BUDGET, EndReason.TIMEOUT})
"""Reasons that end a search although something may be left to gain."""


def headroom_in_words(share: float) -> str:
    """Return what may be left to gain."""
    if share >= 1:
        return "The measurements do not bound the gain that may be left."
    bound = f"{max(share, 0.001):.1%}" if share < 0.1 else f"{share:.0%}"
    return f"With 90% probability nothing is more than {bound} faster than the fastest measured."


def continuing(spec: StudySpec, storage: str, *, reason: str | None, verdict: Verdict | None) -> Iterator[str]:
    """Yield the commands for more trials, if a budget ended the search, and for more rounds, if they are undecided."""
    resume = partial(stored_command, "resume", spec.name, storage=display_url(storage))
    if reason in BUDGETS:
        more = ("--max-trials", str(2 * spec.max_trials)) if reason == EndReason.BUDGET else ()
        yield f"More trials: {resume(*more)}"
    if verdict is not None and verdict.kind is VerdictKind.NOT_CONFIRMED:
        yield f"More rounds: {resume('--confirm-time', '3600')}"


def describe_structure_failures(trials: Sequence[FrozenTrial]) -> str:
    """Return a sentence per error with the structures that never ran for it, then the avoided; empty without any."""
    inside = [trial for trial in trials if ZERO_STAGE in trial.params]
    ran = {_structure(trial.params) for trial in inside if feasibility(trial) is Feasibility.FITS}
    failed: dict[str, dict[str, None]] = {}
    smallest: dict[str, int] = {}
    for trial in inside:
        if feasibility(trial) is Feasibility.BROKEN and (name := _structure(trial.params)) not in ran:
            failed.setdefault(error_of(trial), {})[name] = None
            size = trial.params.get(MICRO_BATCH, 0)
            smallest[name] = min(smallest.get(name, size), size)
    known = structure_failures(trials)
    most = known.proven_size
    beyond = {name for name, size in smallest.items() if most is not None and size > most}
    sentences = [
        f"No launch ran at {', '.join(sorted(structures))}"
        + (f", tried above micro-batch {most} only, the largest that ran" if beyond >= structures.keys() else "")
        + f": {message}."
        for message, structures in failed.items()
    ]
    if known.avoided:
        sentences.append(f"The search tried no more at {', '.join(map(_structure, known.avoided))}.")
    if known.avoided and not ran:
        stages = {str(value) for components in known.ran for name, value in components if name == ZERO_STAGE}
        sentences.append(f"--zero-stages {','.join(sorted(stages))} searches the ZeRO stage that ran.")
    return " ".join(sentences)


def _structure(params: Mapping[str, Any]) -> str:
    offloads = [
        f"{name} offload"
        for name, knob in (("optimizer", OFFLOAD_OPTIMIZER), ("parameter", OFFLOAD_PARAM))
        if params.get(knob) not in (None, "none")
    ]
    return " + ".join([f"ZeRO {params.get(ZERO_STAGE)}", *offloads])
