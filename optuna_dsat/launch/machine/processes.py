"""The processes of a launch: mark, find and signal them, even after the tuner was killed.

torchrun puts every rank into a separate session, a rank may start data loaders, and orphans are re-parented, so
process groups do not identify the processes of a launch. An environment variable does: descendants inherit it, and
``/proc`` shows it (Linux). Its value contains the tuner's PID and PID namespace, so that another process in the same
namespace can find launches whose tuner is gone. Processes without the variable are found by their ancestors
(``launch/machine/tree.py``).
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from optuna_dsat.runtime.agent.processes import KILL_LIMIT_S, MARK_ENV, Ending, ProcessKey, children_of
from optuna_dsat.runtime.measure.memory import control_groups
from optuna_dsat.runtime.process_identity import START_TIME_FIELD, process_space, stat_fields

_SEARCH_LIMIT_S = 6 * KILL_LIMIT_S
"""Limit of the search for further processes of a launch, which a busy machine delays."""
_EXIT_STATUS_FIELD = 49
"""Index of the exit status, as of ``wait``, in ``stat_fields``."""

_CPU_TIME_FIELDS = (11, 12)
"""Indices of the CPU time (clock ticks) in user and in kernel mode, in ``stat_fields``."""


def cpu_seconds(key: ProcessKey) -> float | None:
    """Return the CPU time of a process without descendants, also of a zombie; None if it is gone."""
    fields = stat_fields(key.pid)
    if not fields or int(fields[START_TIME_FIELD]) != key.start_ticks:
        return None
    return sum(int(fields[index]) for index in _CPU_TIME_FIELDS) / os.sysconf("SC_CLK_TCK")


def exit_code_of(key: ProcessKey) -> int | None:
    """Return the exit code (negative: signal) of a zombie process; None while it runs, and once it was waited for."""
    fields = stat_fields(key.pid)
    if not fields or fields[0] != "Z" or int(fields[START_TIME_FIELD]) != key.start_ticks:
        return None
    return os.waitstatus_to_exitcode(int(fields[_EXIT_STATUS_FIELD]))


@dataclass(frozen=True)
class LaunchProcess:
    """A process of a launch."""

    key: ProcessKey
    mark: str

    @property
    def orphaned(self) -> bool:
        """Whether the tuner that started the launch is gone; False if unknown, in another PID namespace."""
        _, _, tuner = self.mark.partition(":")
        pid, start, *place = tuner.split(":", 2) if tuner.count(":") > 1 else ("", "", "")
        if not (pid.isdigit() and start.isdigit()) or place != [process_space()]:
            return False
        return not ProcessKey(int(pid), int(start)).alive


def new_mark() -> str:
    """Return a unique mark for a launch started by this process."""
    tuner = ProcessKey.of(os.getpid())
    start = tuner.start_ticks if tuner is not None else 0
    return f"{uuid.uuid4()}:{os.getpid()}:{start}:{process_space()}"


def _mark_of(pid: int) -> str | None:
    """Return the mark of a process; None if it has none, is gone, or belongs to another user."""
    prefix = f"{MARK_ENV}=".encode()
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next((os.fsdecode(item[len(prefix) :]) for item in variables if item.startswith(prefix)), None)


def has_mark(pid: int, mark: str) -> bool:
    """Return whether a process has a mark."""
    return _mark_of(pid) == mark


def find_marked(mark: str | None = None) -> list[LaunchProcess]:
    """Return this user's living processes with ``mark`` (any mark for None), except for this process."""
    processes: list[LaunchProcess] = []
    for pid in psutil.pids():
        value = None if pid == os.getpid() else _mark_of(pid)
        key = None if value is None else ProcessKey.of(pid)
        if value is not None and key is not None and mark in (None, value):
            processes.append(LaunchProcess(key, value))
    return processes


def find_leftovers() -> list[LaunchProcess]:
    """Return the living processes of launches whose tuner is gone."""
    return [process for process in find_marked() if process.orphaned]


def kernel_oom_kills() -> int | None:
    """Return how many processes the kernel's OOM killer has killed; None if unknown.

    Counted for this control group (``memory.events`` of version 2), else for the machine (``/proc/vmstat``).
    """
    *_, group = (folder for controller, folder in control_groups("memory") if not controller)
    for path in (group / "memory.events", Path("/proc/vmstat")):
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        counts = dict(line.split(" ", 1) for line in lines if " " in line)
        if counts.get("oom_kill", "").strip().isdigit():
            return int(counts["oom_kill"])
    return None


def refuse_survivors(keys: Iterable[ProcessKey], *, since: float) -> None:
    """Raise if killed processes are still there a long time after ``since`` (monotonic).

    Raises:
        TimeoutError: After more than ``KILL_LIMIT_S``, which only an uninterruptible wait in the kernel explains.
    """
    pids, waited_s = sorted(key.pid for key in keys), time.monotonic() - since
    if waited_s > KILL_LIMIT_S and (pids or waited_s > _SEARCH_LIMIT_S):
        raise TimeoutError(f"Processes {pids} still run {waited_s:.0f} s after SIGKILL.")


def end_with_descendants(keys: Iterable[ProcessKey]) -> int:
    """End processes and their descendants, wait until they are gone, and return their number.

    Raises:
        TimeoutError: If processes outlive SIGKILL, which only an uninterruptible wait in the kernel explains.
    """
    began, ending = time.monotonic(), Ending()
    left, ended = {*keys}, set[ProcessKey]()
    while left := {key for key in left | children_of(left) if key.alive}:
        refuse_survivors(left, since=began)
        ending.end(left)
        ended |= left
        time.sleep(0.02)
    return len(ended)


def kill_leftovers(mark: str | None = None) -> tuple[int, ...]:
    """End all processes with ``mark``; for None, all processes of launches whose tuner is gone.

    Repeats until none is found, since a process may start another while it is ended.

    Returns:
        The PIDs of the ended processes.

    Raises:
        TimeoutError: If processes outlive SIGKILL, which only an uninterruptible wait in the kernel explains.
    """
    began, ending = time.monotonic(), Ending()
    ended: set[int] = set()
    while processes := find_leftovers() if mark is None else find_marked(mark):
        keys = {process.key for process in processes}
        refuse_survivors(keys, since=began)
        keys |= children_of(keys)
        ending.end(keys)
        ended |= {key.pid for key in keys}
        time.sleep(0.02)
    return tuple(sorted(ended))
