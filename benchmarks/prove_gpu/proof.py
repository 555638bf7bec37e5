"""What was proven so far, in one JSON file, and the run of the checks that fill it."""

from __future__ import annotations

import json
import re
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Generic, TypeVar

from optuna_dsat.runtime.files import write_text_atomic

ROOT = Path(__file__).resolve().parents[2]
FORMAT = 2
STAND_IN_NOTE = "Ran on a stand-in: nothing about values or speed is proven."
MOST_BEGINNINGS = 3
"""A check that was begun so often and never came to an end is given up: it, or what it started, hangs the machine."""
MOST_S = 3600.0
"""Seconds after which a check that gives way from part to part is given up."""
_PATH = re.compile(r"(?<![\w.:/-])(?:sqlite:/{3})?/(?:[\w.+@%-]+/)+(?P<last>[\w.+@%-]*)")
"""An absolute path of two folders or more."""
C = TypeVar("C")


class Status(StrEnum):
    """State of a check, in the order of the page."""

    PROVEN = "proven"
    RAN = "ran"
    """On a stand-in, where it ran through but what it is about cannot be proven."""
    FELL_SHORT = "fell short"
    """It ran, and the result is not what was asked for."""
    FAILED = "failed"
    """It did not come to an answer."""
    NOT_RUN = "not run"
    """Something that it needs is not on this machine."""


class PartOverError(Exception):
    """The time of this part is over; the check continues in the next part, or begins anew if it was cut off."""

    def __init__(self, *, cut_off: bool = False) -> None:
        super().__init__("the time of this part is over")
        self.cut_off = cut_off


class NotRunError(Exception):
    """Something that a check needs is missing; the text names it."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Result of a check."""

    status: Status
    why: str
    """One line for people."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """The measurements, as JSON values with units in the names."""
    command: str = ""
    """The command that was run, from the checkout, as a user would type it."""


@dataclass(frozen=True, kw_only=True)
class Check(Generic[C]):
    """One thing to be shown."""

    name: str
    asked: str
    """What is to be shown, as a sentence."""
    run: Callable[[C], Verdict]
    """Raises ``PartOverError`` to continue in the next part, ``NotRunError`` if something is missing."""
    needs_s: float
    """Time that must be left for it to be begun, unless it is the first of a part."""
    values: bool = False
    """Whether it is about the values or speed of kernels, or about NVML's measurements of them."""


class Proof:
    """Verdicts and the machine they were made on, kept in one file.

    Args:
        path: The file. Its content is read.

    Raises:
        ValueError: If the file is of another format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.machine: dict[str, Any] = {}
        self.begun: dict[str, int] = {}
        """Check -> how often it was begun without coming to an end or giving way to the next part."""
        self.seconds: dict[str, float] = {}
        """Check -> seconds in all parts."""
        self.verdicts: dict[str, Verdict] = {}
        if path.is_file():
            self._read()

    def _read(self) -> None:
        record = json.loads(self.path.read_text(encoding="utf-8"))
        if record.get("format") != FORMAT:
            raise ValueError(f"{self.path.name} has format {record.get('format')}; this version reads {FORMAT}.")
        self.machine, self.begun, self.seconds = record["machine"], record["begun"], record["seconds"]
        self.verdicts = {
            name: Verdict(**{**verdict, "status": Status(verdict["status"])})
            for name, verdict in record["verdicts"].items()
        }

    def begin(self, name: str) -> int:
        """Record that a check begins; return how often it has begun so far, this time included."""
        self.begun[name] = self.begun.get(name, 0) + 1
        self.write()
        return self.begun[name]

    def leave(self, name: str, seconds: float, *, verdict: Verdict | None = None, cut_off: bool = False) -> None:
        """Record the end of a check in this part: with a verdict, or to be continued in the next part."""
        if not cut_off:
            self.begun.pop(name, None)
        self.seconds[name] = round(self.seconds.get(name, 0.0) + seconds, 1)
        if verdict is not None:
            self.verdicts[name] = verdict
        self.write()

    def forget(self, name: str) -> None:
        """Let a check begin anew."""
        for kept in (self.verdicts, self.begun, self.seconds):
            kept.pop(name, None)

    def write(self) -> None:
        """Write the file in one piece, without paths of the machine."""
        record = {
            "format": FORMAT,
            "written": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            "machine": self.machine,
            "verdicts": {name: asdict(verdict) for name, verdict in self.verdicts.items()},
            "begun": self.begun,
            "seconds": self.seconds,
        }
        write(self.path, json.dumps(scrubbed(record), indent=1) + "\n")


def write(path: Path, text: str) -> None:
    """Write a file in one piece, and its folder where that is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(path, text)


def scrubbed(value: Any) -> Any:
    """Return JSON values without paths of this machine: paths in the checkout are relative to it, others are cut."""
    if isinstance(value, str):
        return _PATH.sub(lambda match: f".../{match['last']}", value.replace(f"{ROOT}/", ""))
    if isinstance(value, Mapping):
        return {scrubbed(str(key)): scrubbed(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [scrubbed(item) for item in value]
    return value


def run_part(
    checks: Sequence[Check[C]],
    proof: Proof,
    context: C,
    *,
    deadline: float,
    stand_in: bool = False,
    clock: Callable[[], float] = time.monotonic,
    say: Callable[[str], None] = print,
) -> list[str]:
    """Run the checks that are not over yet until the time is up; return the names of those that are left.

    A check that the rest of the part is too short for is passed over; shorter ones that come after it may still run.

    Args:
        checks: In the order in which they run.
        proof: What is over already; gets each verdict as it comes.
        context: What the checks are given.
        deadline: When the part is over, by ``clock``.
        stand_in: Whether kernels compute nothing on this machine.
        clock: Monotonic time in seconds.
        say: Called with one line before and after each check.
    """
    waiting = [check for check in checks if check.name not in proof.verdicts]
    for position, check in enumerate(waiting):
        if position and deadline - clock() < check.needs_s:
            continue
        say(f"{check.name} ...")
        started = clock()
        try:
            verdict = _verdict(check, proof, context)
        except (PartOverError, KeyboardInterrupt) as over:
            proof.leave(check.name, clock() - started, cut_off=isinstance(over, PartOverError) and over.cut_off)
            if isinstance(over, KeyboardInterrupt):
                raise
            break
        if stand_in and check.values and verdict.status in (Status.PROVEN, Status.FELL_SHORT):
            verdict = replace(verdict, status=Status.RAN)
        proof.leave(check.name, clock() - started, verdict=verdict)
        say(f"{check.name}: {verdict.status.value}, {proof.seconds[check.name]:.0f} s. {verdict.why}")
    return [check.name for check in waiting if check.name not in proof.verdicts]


def _verdict(check: Check[C], proof: Proof, context: C) -> Verdict:
    """Return the result of a check, or what its error says of it.

    Raises:
        PartOverError: If it continues in the next part.
    """
    spent_s = proof.seconds.get(check.name, 0.0)
    if proof.begin(check.name) > MOST_BEGINNINGS:
        return Verdict(status=Status.FAILED, why=f"begun {MOST_BEGINNINGS} times, and never came to an end")
    if spent_s > MOST_S:
        return Verdict(status=Status.FAILED, why=f"not at its end after {spent_s:.0f} s in several parts")
    try:
        return check.run(context)
    except PartOverError:
        raise
    except NotRunError as error:
        return Verdict(status=Status.NOT_RUN, why=f"not run: {error}")
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a check raises is its result
        text, _, _ = str(error).strip().partition("\n")
        why = f"{type(error).__name__}: {text}".rstrip(": ")
        tail = traceback.format_exc().rstrip().splitlines()[-6:]
        return Verdict(status=Status.FAILED, why=why, figures={"traceback": tail})


def page(proof: Proof, checks: Sequence[Check[Any]]) -> str:
    """Return one page of what a proof says, as Markdown: what was proven, on which GPU, and what fell short."""
    machine, left = proof.machine, [check.name for check in checks if check.name not in proof.verdicts]
    shown = ", ".join(f"{machine['gpus'].count(name)} x {name}" for name in sorted(set(machine["gpus"])))
    statuses = [verdict.status for verdict in proof.verdicts.values()]
    lines = [
        "# What was proven on a GPU\n",
        f"{shown}, {machine['memory_bytes'] / 2**30:.1f} GiB each; driver {machine['driver']}, "
        f"CUDA {machine['cuda']}; {machine['cores']} cores, {machine['host_memory_bytes'] / 2**30:.0f} GiB of host "
        "memory.",
        ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        + time.strftime("; %Y-%m-%d %H:%M UTC.\n", time.gmtime()),
        f"**The GPU is a stand-in, whose kernels compute nothing.** {STAND_IN_NOTE}\n" if machine["stand_in"] else "",
        ", ".join(f"{statuses.count(status)} {status}" for status in Status if status in statuses) + ".",
        f"**Not at its end: {len(left)} checks are still to do ({', '.join(left)}).**" if left else "",
    ]
    asked = {check.name: check.asked for check in checks}
    for status in Status:
        if status in statuses:
            lines.append(f"\n## {status.capitalize()}\n\n| check | asked | result | s |\n|---|---|---|--:|")
        for name, verdict in proof.verdicts.items():
            if verdict.status is status:
                cells = (name, asked.get(name, ""), verdict.why, f"{proof.seconds.get(name, 0.0):.0f}")
                lines.append("| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*filter(None, lines), "\nFigures and commands of each check are in proof.json.\n"])
