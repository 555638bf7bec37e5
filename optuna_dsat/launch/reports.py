"""Reports of launches."""

from __future__ import annotations

import contextlib
import shutil
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from optuna_dsat.launch.launch import Launch
from optuna_dsat.launch.protocol import LaunchFacts, LaunchReport, LaunchRequest, Verdict
from optuna_dsat.launch.run_directory import OutputError, RunDirectory
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.events import Event, RankFailed, StepMeasured
from optuna_dsat.runtime.files import open_regular
from optuna_dsat.runtime.process import EXIT_EVENTS_LOST
from optuna_dsat.secrecy.references import hidden_text

_EXPLAINED_BY_LOG = frozenset({Outcome.COMMUNICATION_ERROR, Outcome.SCRIPT_ERROR, Outcome.STALLED, Outcome.TIMEOUT})
"""Outcomes whose report quotes the end of the log if no rank recorded a traceback."""

_FULL_DISK_BYTES = 2**20
"""Free space below which a full disk is assumed to explain a rank that ended without a record."""

_EXCERPT_BYTES = 8192
_EXCERPT_LINES = 20
_CLOCK_SET_S = 2.0
"""Maximum difference of two clocks over a launch."""


def report_of(launch: Launch, facts: LaunchFacts, verdict: Verdict, *, note: str, exit_s: float) -> LaunchReport:
    """Return the report of a launch that ended ``exit_s`` after the last event of a rank."""
    startup_s, measured_s = _spent(launch, facts.of(Event))
    log = _log_of(launch.directory, verdict.rank)
    return LaunchReport(
        launch_id=launch.request.launch_id,
        outcome=verdict.outcome,
        message=hidden_text(verdict.message) + note,
        exit_code=facts.agent_exit_code,
        error_excerpt=hidden_text(
            verdict.error_excerpt or (_last_lines(log) if verdict.outcome in _EXPLAINED_BY_LOG else "")
        ),
        missing_bytes=verdict.missing_bytes,
        log_path=str(log),
        command=launch.command,
        host=launch.processes.host,
        devices=launch.devices,
        pids=launch.pids,
        started_at=launch.started_unix,
        startup_s=startup_s,
        measured_s=measured_s,
        exit_s=exit_s,
        conditions=launch.conditions,
        root=launch.root,
    )


def _spent(launch: Launch, recorded: Sequence[Event]) -> tuple[float, float]:
    """Return the seconds of a launch before the end of its first step, and from there to its last event.

    Ranks date events by the system clock; if that was set, or the machine slept, the times of reading are used.
    """
    now, ended = time.monotonic(), time.time()
    if abs((ended - launch.started_unix) - (now - launch.started)) > _CLOCK_SET_S:
        first = launch.log.first_step
        return (now - launch.started, 0.0) if first is None else (first - launch.started, launch.log.last_event - first)
    boundaries = [event.time for event in recorded if isinstance(event, StepMeasured)]
    startup_s = max(0.0, min(boundaries, default=ended) - launch.started_unix)
    return startup_s, max(event.time for event in recorded) - min(boundaries) if boundaries else 0.0


def report_of_unstarted(
    request: LaunchRequest, directory: RunDirectory, outcome: Outcome, message: str
) -> LaunchReport:
    """Return the report of a launch that was stopped before it had started."""
    return LaunchReport(
        launch_id=request.launch_id,
        outcome=outcome,
        message=message,
        log_path=str(directory.agent_log),
        host=socket.gethostname(),
        started_at=time.time(),
    )


def complete_report(settled: LaunchReport, directory: RunDirectory, *, note: str, exit_s: float) -> LaunchReport:
    """Return the final report of a launch that was settled before it ended; also write it if possible."""
    report = replace(settled, message=settled.message + note, exit_s=exit_s)
    with contextlib.suppress(OutputError):  # returned anyway; the next launch will find the same disk
        directory.write_report(report)
    return report


def write_report(report: LaunchReport, directory: RunDirectory, *, facts: LaunchFacts, output_dir: Path) -> None:
    """Write the report of a launch that ran.

    Raises:
        OutputError: If a full disk or a folder that is not writable explains a failure that no rank recorded.
    """
    unrecorded = report.outcome is Outcome.SCRIPT_ERROR and not facts.of(RankFailed)
    try:
        directory.write_report(report)
    except OutputError:
        if unrecorded:
            raise
        return  # the report has the measurements; the next launch will find the same disk
    lost = EXIT_EVENTS_LOST in facts.exit_codes.values()
    if unrecorded and (lost or shutil.disk_usage(output_dir).free < _FULL_DISK_BYTES):
        raise OutputError(
            f"No space left in {output_dir}, or the size of files is limited (ulimit -f): a launch could not write "
            "what it measured. Make room, then resume."
        )


def _log_of(directory: RunDirectory, rank: int) -> Path:
    """Return the most informative log: the rank's standard error, else its output, else torchrun's output."""
    for path in (directory.stderr(rank), directory.stdout(rank)):
        with contextlib.suppress(OSError):
            if path.stat().st_size:
                return path
    return directory.agent_log


def _last_lines(path: Path) -> str:
    try:
        with open_regular(path) as file:
            file.seek(max(0, path.stat().st_size - _EXCERPT_BYTES))
            text = (file.read() or b"").decode("utf-8", errors="replace")
    except OSError:
        return ""
    return "\n".join(text.rstrip().splitlines()[-_EXCERPT_LINES:])
