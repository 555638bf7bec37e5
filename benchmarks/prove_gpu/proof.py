"""What was proven so far: one record a check, in one JSON file that is written anew after each of them."""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from optuna_dsat.runtime.files import write_text_atomic

__all__ = [
    "STAND_IN_NOTE",
    "NotRunError",
    "OverrunError",
    "PartOverError",
    "Proof",
    "Record",
    "Status",
    "Verdict",
    "scrubbed",
]

ROOT = Path(__file__).resolve().parents[2]
FORMAT = 1
STAND_IN_NOTE = "Ran on a stand-in: nothing about values or speed is proven."

_PATH = re.compile(r"(?<![\w.:/-])(?:sqlite:/{3})?/(?:[\w.+@%-]+/)+(?P<last>[\w.+@%-]*)")
"""An absolute path of two folders or more."""


class Status(StrEnum):
    """What became of a check."""

    PROVEN = "proven"
    RAN = "ran"
    """On a stand-in, where it ran through but what it is about cannot be proven."""
    FELL_SHORT = "fell_short"
    """It ran, and what came out is not what was asked for."""
    FAILED = "failed"
    """It did not come to an answer."""
    NOT_RUN = "not_run"
    """Something that it needs is not on this machine."""


class PartOverError(Exception):
    """The time of this part is nearly over; the check goes on in the next one."""


class OverrunError(PartOverError):
    """The end of the part cut a check off, which can only be begun anew."""


class NotRunError(Exception):
    """What a check needs is not there; the text says what."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a check found."""

    status: Status
    why: str
    """One line for people."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """What was measured, as JSON values with units in the names."""
    command: str = ""
    """What was run, from the checkout, as one would type it."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """A check that is over."""

    name: str
    status: Status
    asked: str
    """What was to be shown."""
    why: str
    figures: Mapping[str, Any]
    seconds: float
    """What the check took, over all parts."""
    command: str
    note: str = ""
    """``STAND_IN_NOTE`` where it applies."""


class Proof:
    """Records and what they were made on, kept in one file.

    Args:
        path: The file. What it holds is read.

    Raises:
        ValueError: If the file is of another format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.machine: dict[str, Any] = {}
        self.begun: dict[str, int] = {}
        """Check -> how often it was begun without coming to an end or giving way to the next part."""
        self.spent_s: dict[str, float] = {}
        """Check -> seconds in earlier parts."""
        self.records: dict[str, Record] = {}
        if path.is_file():
            self._read()

    def _read(self) -> None:
        result = json.loads(self.path.read_text(encoding="utf-8"))
        if result.get("format") != FORMAT:
            raise ValueError(f"{self.path.name} has format {result.get('format')}; this version reads {FORMAT}.")
        self.machine, self.begun, self.spent_s = result["machine"], result["begun"], result["spent_s"]
        for item in result["records"]:
            self.records[item["name"]] = Record(**{**item, "status": Status(item["status"])})

    def begin(self, name: str) -> int:
        """Note that a check begins; return how often it has begun so far, this time included."""
        self.begun[name] = self.begun.get(name, 0) + 1
        self.write()
        return self.begun[name]

    def pause(self, name: str, seconds: float, *, cut_off: bool = False) -> None:
        """Note that a check gives way to the next part after so many seconds; what was cut off has begun in vain."""
        if not cut_off:
            self.begun.pop(name, None)
        self.spent_s[name] = self.spent_s.get(name, 0.0) + seconds
        self.write()

    def end(self, record: Record) -> None:
        """Keep a record."""
        self.begun.pop(record.name, None)
        self.spent_s.pop(record.name, None)
        self.records[record.name] = record
        self.write()

    def forget(self, name: str) -> None:
        """Let a check begin anew."""
        for kept in (self.records, self.begun, self.spent_s):
            kept.pop(name, None)

    def write(self) -> None:
        """Write the file in one piece; no path of the machine gets into it."""
        record = {
            "format": FORMAT,
            "written": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            "machine": self.machine,
            "records": [asdict(item) for item in self.records.values()],
            "begun": self.begun,
            "spent_s": self.spent_s,
        }
        text = json.dumps(scrubbed(record, state=self.path.parent), indent=1) + "\n"
        replace(self.path, text)


def replace(path: Path, text: str) -> None:
    """Write a file in one piece."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(path, text)


def scrubbed(value: Any, *, state: Path) -> Any:
    """Return JSON values without paths of this machine: those of the checkout are relative to it, others are cut.

    Args:
        value: JSON values; texts and keys in them are looked at.
        state: Folder of the proof, shown as ``STATE``.
    """
    if isinstance(value, str):
        return _scrub(value, state)
    if isinstance(value, Mapping):
        return {_scrub(str(key), state): scrubbed(item, state=state) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [scrubbed(item, state=state) for item in value]
    return value


def _scrub(text: str, state: Path) -> str:
    known = {
        str(state.resolve()): "STATE",
        str(state): "STATE",
        sys.executable: "python",
        sys.prefix: "PREFIX",
        str(ROOT): "CHECKOUT",
        str(Path.home()): "HOME",
        tempfile.gettempdir(): "TMP",
    }
    for folder, name in sorted(known.items(), key=lambda pair: -len(pair[0])):
        if folder.strip("/"):
            text = re.sub(rf"{re.escape(folder)}(?=[/\s'\":,;)\]]|$)", name, text)
    text = text.replace("CHECKOUT/", "")
    return _PATH.sub(lambda match: f".../{match['last']}", text)
