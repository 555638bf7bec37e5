"""What an examination finds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

__all__ = ["EXIT_NOTHING_RUNS", "Finding", "Status", "exit_code", "to_json"]

EXIT_NOTHING_RUNS = 3
"""Exit code of the command where no launch can run; it is that of a search that finds nothing runnable."""


class Status(StrEnum):
    """How good or bad a finding is."""

    FINE = "fine"
    NOTE = "note"
    """Worth knowing; nothing is wrong."""
    PROBLEM = "problem"
    """Something will not work, or not well; launches run."""
    FATAL = "fatal"
    """No launch can run before this is mended."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    area: str
    """``devices``, ``software``, ``host``, ``launches``, ``offload`` or ``database``."""
    name: str
    """What was looked at, unique within its area."""
    status: Status
    text: str
    """What was found, in plain words."""
    remedy: str = ""
    """What to do about it; empty where nothing is to be done."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """The same as JSON values, with units in the names."""


def exit_code(findings: Sequence[Finding]) -> int:
    """Return 0 where launches can run, else ``EXIT_NOTHING_RUNS``."""
    return EXIT_NOTHING_RUNS if any(finding.status is Status.FATAL for finding in findings) else 0


def to_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return findings as JSON values."""
    return {
        "can_run": exit_code(findings) == 0,
        "findings": [
            {
                "area": finding.area,
                "name": finding.name,
                "status": finding.status.value,
                "text": finding.text,
                "remedy": finding.remedy,
                "data": dict(finding.data),
            }
            for finding in findings
        ],
    }
