"""Runs checks one after the other, for the time of one part, and goes on where the last part stopped."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from benchmarks.prove_gpu.proof import (
    STAND_IN_NOTE,
    NotRunError,
    OverrunError,
    PartOverError,
    Proof,
    Record,
    Status,
    Verdict,
)

__all__ = ["Check", "run_part"]

C = TypeVar("C")

MOST_BEGINNINGS = 3
"""A check that was begun so often and never came to an end is given up: it, or what it started, hangs the machine."""

MOST_S = 3600.0
"""Seconds after which a check that gives way from part to part is given up."""


@dataclass(frozen=True, kw_only=True)
class Check(Generic[C]):
    """One thing to be shown."""

    name: str
    asked: str
    """What is to be shown, as a sentence."""
    run: Callable[[C], Verdict]
    """Raises ``PartOverError`` to go on in the next part, ``NotRunError`` where something is missing."""
    needs_s: float
    """Time that must be left for it to be begun, but for the first of a part."""
    values: bool = False
    """Whether it is about what kernels compute, or how long that takes, or what NVML measures of it."""


def run_part(
    checks: Sequence[Check[C]],
    proof: Proof,
    context: C,
    *,
    deadline: float,
    stand_in: bool = False,
    clock: Callable[[], float] = time.monotonic,
    say: Callable[[str], None] = print,
) -> int:
    """Run the checks that are not over yet until the time is up; return how many are left.

    A check that the rest of the part is too short for is passed over; shorter ones that come after it may still run.

    Args:
        checks: In the order in which they run.
        proof: What is over already; gets each record as it comes.
        context: What the checks are given.
        deadline: When the part is over, by ``clock``.
        stand_in: Whether kernels compute nothing on this machine.
        clock: Monotonic time in seconds.
        say: Told one line before and after each check.
    """
    waiting = [check for check in checks if check.name not in proof.records]
    for position, check in enumerate(waiting):
        if position and deadline - clock() < check.needs_s:
            continue
        say(f"{check.name} ...")
        started = clock()
        try:
            verdict = _verdict(check, proof, context)
        except (PartOverError, KeyboardInterrupt) as over:
            proof.pause(check.name, clock() - started, cut_off=isinstance(over, OverrunError))
            if isinstance(over, KeyboardInterrupt):
                raise
            break
        seconds = proof.spent_s.get(check.name, 0.0) + clock() - started
        record = _record(check, verdict, seconds=round(seconds, 1), stand_in=stand_in)
        proof.end(record)
        say(f"{check.name}: {record.status.value}, {seconds:.0f} s. {record.why}")
    return sum(check.name not in proof.records for check in waiting)


def _verdict(check: Check[C], proof: Proof, context: C) -> Verdict:
    """Return what a check found, or what its error says of it.

    Raises:
        PartOverError: If it goes on in the next part.
    """
    beginnings = proof.begin(check.name)
    try:
        return _given_up(beginnings, proof.spent_s.get(check.name, 0.0)) or check.run(context)
    except PartOverError:
        raise
    except NotRunError as error:
        return Verdict(status=Status.NOT_RUN, why=f"not run: {error}")
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a check raises is its result
        return Verdict(status=Status.FAILED, why=_reason(error), figures={"traceback": _tail()})


def _given_up(beginnings: int, spent_s: float) -> Verdict | None:
    if beginnings > MOST_BEGINNINGS:
        return Verdict(status=Status.FAILED, why=f"begun {MOST_BEGINNINGS} times, and never came to an end")
    if spent_s > MOST_S:
        return Verdict(status=Status.FAILED, why=f"not at its end after {spent_s:.0f} s in several parts")
    return None


def _record(check: Check[C], verdict: Verdict, *, seconds: float, stand_in: bool) -> Record:
    unproven = stand_in and check.values
    if unproven and verdict.status in (Status.PROVEN, Status.FELL_SHORT):
        verdict = replace(verdict, status=Status.RAN)
    return Record(
        name=check.name,
        status=verdict.status,
        asked=check.asked,
        why=verdict.why,
        figures=verdict.figures,
        seconds=seconds,
        command=verdict.command,
        note=STAND_IN_NOTE if unproven and verdict.status is Status.RAN else "",
    )


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")


def _tail() -> list[str]:
    return traceback.format_exc().rstrip().splitlines()[-6:]
