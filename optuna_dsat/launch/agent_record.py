"""The exit codes of failed ranks, from the record that the agent (``launch/agent.py``) writes."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from optuna_dsat.runtime.regular_file import read_regular

__all__ = ["first_failure_code", "read_exit_codes"]


def _load_failures(record: Path) -> list[Mapping[str, float]]:
    try:
        failures = json.loads(read_regular(record))["failures"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [failure for failure in failures if {"rank", "pid", "exit_code", "time"} <= failure.keys()]


def read_exit_codes(record: Path, *, without: Sequence[int] = ()) -> dict[int, int]:
    """Return rank -> exit code as recorded by the agent, except of the processes in ``without``."""
    return {
        int(failure["rank"]): int(failure["exit_code"])
        for failure in _load_failures(record)
        if failure["pid"] not in without
    }


def first_failure_code(record: Path) -> int | None:
    """Return the exit code (negative: signal) of the rank that failed first; None if the agent recorded none.

    torchrun counts in whole seconds and also lists the ranks that it ended itself (SIGTERM). Of two that ended in the
    same second, one that was killed by a signal is the cause: the other lost its connection to it.
    """

    def order(failure: Mapping[str, float]) -> tuple[bool, float, bool]:
        code = failure["exit_code"]
        killed = code < 0 and -code not in (signal.SIGTERM, signal.SIGABRT)
        return code == -signal.SIGTERM, failure["time"], not killed

    failures = sorted(_load_failures(record), key=order)
    return int(failures[0]["exit_code"]) if failures else None
