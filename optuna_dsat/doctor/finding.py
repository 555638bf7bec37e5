"""Findings of the doctor, their exit code and JSON form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from optuna_dsat.errors import NothingRunnableError


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
    """``devices``, ``software``, ``host``, ``launches``, ``operators``, ``offload`` or ``database``."""
    name: str
    """Name of the check, unique within its area."""
    status: Status
    text: str
    """The result, for display."""
    remedy: str = ""
    """How to fix the problem; empty without a problem."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """The result as JSON values, with units in the names."""


def finding_of(
    area: str,
    name: str,
    text: str,
    remedy: str = "",
    *,
    status: Status | None = None,
    data: Mapping[str, Any] = MappingProxyType({}),
) -> Finding:
    """Return a finding; without a given status it is a problem if there is a remedy, else fine."""
    status = status or (Status.PROBLEM if remedy else Status.FINE)
    return Finding(area=area, name=name, status=status, text=text, remedy=remedy, data=dict(data))


def exit_code(findings: Sequence[Finding]) -> int:
    """Return 0 if launches can run, else the exit code of a search that finds no runnable configuration."""
    return NothingRunnableError.exit_code if any(finding.status is Status.FATAL for finding in findings) else 0


def to_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return findings as JSON values."""
    return {
        "can_run": exit_code(findings) == 0,
        "findings": [asdict(finding) for finding in findings],
    }
