"""Findings of the doctor, their exit code and JSON form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from optuna_dsat.errors import NothingRunnableError

__all__ = ["Finding", "Status", "exit_code", "to_json"]


class Status(StrEnum):
    """Severity of a finding."""

    FINE = "fine"
    NOTE = "note"
    """Information, not a problem."""
    PROBLEM = "problem"
    """A feature fails or performs poorly; launches can run."""
    FATAL = "fatal"
    """No launch can run until this is fixed."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of a check."""

    area: str
    """``devices``, ``software``, ``host``, ``launches``, ``operators``, ``offload``, ``database`` or ``cluster``."""
    name: str
    """Name of the check, unique within its area."""
    status: Status
    text: str
    """The result, for display."""
    remedy: str = ""
    """How to fix the problem; empty without a problem."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """The result as JSON values, with units in the names."""


def exit_code(findings: Sequence[Finding]) -> int:
    """Return 0 if launches can run, else the exit code of a search that finds no runnable configuration."""
    return NothingRunnableError.exit_code if any(finding.status is Status.FATAL for finding in findings) else 0


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
