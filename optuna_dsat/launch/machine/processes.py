"""The processes of a launch: mark, find and signal them, even after the tuner was killed.

torchrun puts every rank into a separate session, a rank may start data loaders, and orphans are re-parented, so
process groups do not identify the processes of a launch. An environment variable does: descendants inherit it, and
``/proc`` shows it (Linux). Its value contains the tuner's PID and PID namespace, so that another process in the same
namespace can find launches whose tuner is gone. Processes without the variable are found by their ancestors
(``launch/machine/tree.py``).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from optuna_dsat.runtime.process_identity import process_space, start_ticks

__all__ = [
    "KILL_LIMIT_S",
    "MARK_ENV",
    "Ending",
    "LaunchProcess",
    "ProcessKey",
    "children_of",
    "end_processes",
    "end_with_descendants",
    "exit_code_of",
    "find_leftovers",
    "find_marked",
    "has_mark",
    "kernel_oom_kills",
    "kill_leftovers",
    "new_mark",
    "read_command",
    "refuse_survivors",
    "stop_processes",
    "take_mark",
]

MARK_ENV = "OPTUNA_DSAT_LAUNCH_ID"
"""Environment variable that marks every process of a launch:
``<uuid>:<pid of the tuner>:<its start time>:<boot id>:<PID namespace>``.
"""

_START_TIME_FIELD = 19
"""Index of the start time (clock ticks since boot) after the command's name in ``/proc/PID/stat``: proc(5)."""

_EXIT_STATUS_FIELD = 49
"""Index of the exit status, as of ``wait``, in the same file."""

_CPU_TIME_FIELDS = (11, 12)
"""Indices of the CPU time (clock ticks) in user and in kernel mode, in the same file."""

_ENV_START_FIELD = 47
"""Index of the address of the initial environment after the command's name in ``/proc/PID/stat``: proc(5)."""


@dataclass(frozen=True)
class ProcessKey:
    """Identity of a process, distinct from a later process with the same PID."""

    pid: int
    start_ticks: int
    """Clock ticks between the machine's boot and the process's start."""

    @classmethod
    def of(cls, pid: int) -> ProcessKey | None:
        """Return the key of a living process; None if there is no such process (zombies count as dead)."""
        start = start_ticks(pid)
        return None if start is None else cls(pid, start)

    @property
    def alive(self) -> bool:
        """Whether the process is still running."""
        return ProcessKey.of(self.pid) == self


def cpu_seconds(key: ProcessKey) -> float | None:
    """Return the CPU time of a process without descendants, also of a zombie; None if it is gone."""
    try:
        text = Path(f"/proc/{key.pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    if not fields or int(fields[_START_TIME_FIELD]) != key.start_ticks:
        return None
    return sum(int(fields[index]) for index in _CPU_TIME_FIELDS) / os.sysconf("SC_CLK_TCK")


def exit_code_of(key: ProcessKey) -> int | None:
    """Return the exit code (negative: signal) of a zombie process.

    None while it runs, and after its parent has waited for it.
    """
    try:
        text = Path(f"/proc/{key.pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    if not fields or fields[0] != "Z" or int(fields[_START_TIME_FIELD]) != key.start_ticks:
        return None
    return os.waitstatus_to_exitcode(int(fields[_EXIT_STATUS_FIELD]))


def read_command(pid: int) -> list[str]:
    """Return the command line of a process; empty if it is gone or has none."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []
    return [os.fsdecode(word) for word in words if word]


@dataclass(frozen=True)
class LaunchProcess:
    """A process of a launch."""

    key: ProcessKey
    mark: str

    @property
    def orphaned(self) -> bool:
        """Whether the tuner that started the launch is gone; False if that cannot be determined from here.

        PIDs are valid only within their namespace. Containers that use the host's PID namespace see each other's
        processes, so processes of tuners in other namespaces are never judged.
        """
        _, _, tuner = self.mark.partition(":")
        pid, start, *place = tuner.split(":", 2) if tuner.count(":") > 1 else ("", "", "")
        if not (pid.isdigit() and start.isdigit()) or place != [process_space()]:
            return False
        return not ProcessKey(int(pid), int(start)).alive


def new_mark() -> str:
    """Return a unique mark for a launch started by this process."""
    own = ProcessKey.of(os.getpid())
    start = own.start_ticks if own is not None else 0
    return f"{uuid.uuid4()}:{os.getpid()}:{start}:{process_space()}"


def take_mark(mark: str) -> None:
    """Replace this process's mark by another mark of the same tuner.

    ``/proc`` shows the environment that a process was *started* with, read from the process's memory. A fork has its
    parent's, so the old mark is overwritten in memory (proc(5): ``environ``, field 50 of ``stat``).

    Raises:
        ValueError: If this process has no mark, or a mark of different length.
        OSError: If ``/proc`` cannot be read.
    """
    initial = Path("/proc/self/environ").read_bytes()
    place = initial.find(f"{MARK_ENV}=".encode())
    if place < 0:
        raise ValueError("this process was started without a mark")
    place += len(MARK_ENV) + 1
    length = initial.index(b"\0", place) - place
    new = mark.encode()
    if len(new) != length:
        raise ValueError(f"a mark of {len(new)} bytes cannot take the place of one of {length}")
    stat = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
    start = int(stat.rpartition(")")[2].split()[_ENV_START_FIELD])
    ctypes.memmove(start + place, new, length)


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
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        value = _mark_of(int(entry.name))
        key = ProcessKey.of(int(entry.name)) if value is not None else None
        if value is not None and key is not None and (mark is None or value == mark):
            processes.append(LaunchProcess(key, value))
    return processes


def find_leftovers() -> list[LaunchProcess]:
    """Return the living processes of launches whose tuner is gone."""
    return [process for process in find_marked() if process.orphaned]


def children_of(keys: Iterable[ProcessKey]) -> set[ProcessKey]:
    """Return all living descendants of the given processes."""
    processes: set[ProcessKey] = set()
    for key in keys:
        if not key.alive:
            continue
        with contextlib.suppress(psutil.Error):
            pids = [child.pid for child in psutil.Process(key.pid).children(recursive=True)]
            processes.update(child for pid in pids if (child := ProcessKey.of(pid)) is not None)
    return processes


def end_processes(keys: Iterable[ProcessKey]) -> None:
    """Send SIGKILL to each process that is still running. Does not wait."""
    for key in keys:
        if key.alive:
            with contextlib.suppress(psutil.Error):
                psutil.Process(key.pid).kill()


def stop_processes(keys: Iterable[ProcessKey]) -> None:
    """Send SIGSTOP to each process that is still running."""
    for key in keys:
        if key.alive:
            with contextlib.suppress(psutil.Error):
                psutil.Process(key.pid).suspend()


def kernel_oom_kills() -> int | None:
    """Return how many processes the kernel's OOM killer has killed; None if unknown.

    Counted for this process's control group if version 2 is in use (``memory.events``), else for the whole machine
    (``/proc/vmstat``, Linux 4.13 or newer).
    """
    candidates: list[Path] = []
    with contextlib.suppress(OSError):
        groups = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        candidates = [
            Path("/sys/fs/cgroup", group[len("0::/") :], "memory.events")
            for group in groups
            if group.startswith("0::/")
        ]
    for path in (*candidates, Path("/proc/vmstat")):
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        counts = dict(line.split(" ", 1) for line in lines if " " in line)
        if counts.get("oom_kill", "").strip().isdigit():
            return int(counts["oom_kill"])
    return None


KILL_LIMIT_S = 10.0
"""Longest time for processes to end after SIGKILL."""

_PROGRAMS_S = 1.0
"""Time for programs to remove their temporary files after SIGTERM."""

_CLEANERS_S = 1.0
"""Time for cleaners."""

_CLEANERS = ("multiprocessing.resource_tracker", "torch_shm_manager")
"""Commands of processes that remove shared memory once the processes that created it are gone."""

_PYTHON = re.compile(r"python|pypy")
"""Matches the name of a Python interpreter."""

_PYTHON_LIBRARY = re.compile(rb"/lib(?:python|pypy)[^/\n]*$", re.MULTILINE)
"""Matches a line of ``/proc/PID/maps`` that names the library of a Python interpreter."""


class Ending:
    """Terminate processes. Call ``end`` repeatedly until it returns an empty set.

    Programs such as compilers, or shells with a trap, remove their temporary files on SIGTERM. They and their
    children have ``_PROGRAMS_S`` for this. Python processes of a launch are killed at once: their handlers, which may
    save a checkpoint, should not run. Cleaners exit when all other processes have ended, and get no signal before
    ``_CLEANERS_S``.
    """

    def __init__(self) -> None:
        self._began: float | None = None
        self._began_ticks = 0
        """The same time in clock ticks since boot, as for process starts."""
        self._spared: set[ProcessKey] = set()
        """Programs that have received SIGTERM, or have been started since."""

    def end(self, keys: Iterable[ProcessKey]) -> set[ProcessKey]:
        """Terminate or kill each running process except cleaners; return these processes. Does not wait."""
        alive = {key for key in keys if key.alive}
        if not alive:
            return set()
        is_first = self._began is None
        if self._began is None:
            self._began, self._began_ticks = time.monotonic(), _ticks()
        waited_s = time.monotonic() - self._began
        ended = {key for key in alive if waited_s >= _CLEANERS_S or not _is_cleaner(key.pid)}
        if waited_s >= _PROGRAMS_S:
            end_processes(ended)
            return ended
        new = {key for key in ended - self._spared if _is_program(key.pid)}
        self._spared |= new
        end_processes(ended - self._spared)
        _ask({key for key in new if is_first or key.start_ticks < self._began_ticks})
        return ended


def _ticks() -> int:
    """Return the clock ticks since the machine's boot."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def _ask(keys: Iterable[ProcessKey]) -> None:
    """Send SIGTERM to each running process, parents first: a shell continues when its child ends."""
    for key in sorted(keys, key=lambda process: (process.start_ticks, process.pid)):
        with contextlib.suppress(psutil.Error):
            psutil.Process(key.pid).terminate()


def _is_cleaner(pid: int) -> bool:
    """Return whether a process removes leftover shared memory of other processes when these are gone."""
    return any(name in word for word in read_command(pid) for name in _CLEANERS)


def _is_program(pid: int) -> bool:
    """Return whether a process runs a program other than Python; False if unknown."""
    try:
        if _PYTHON.search(Path(f"/proc/{pid}/exe").readlink().name):
            return False
        return not _PYTHON_LIBRARY.search(Path(f"/proc/{pid}/maps").read_bytes())
    except OSError:  # gone, or another user's process
        return False


def refuse_survivors(keys: Iterable[ProcessKey], *, since: float, limit_s: float = KILL_LIMIT_S) -> None:
    """Raise if killed processes are still there a long time after ``since`` (monotonic).

    Raises:
        TimeoutError: After more than ``limit_s``, which only an uninterruptible wait in the kernel explains.
    """
    if time.monotonic() - since > limit_s:
        raise TimeoutError(f"Processes {sorted(key.pid for key in keys)} still run {limit_s:g} s after SIGKILL.")


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


def kill_leftovers(mark: str | None = None, *, timeout_s: float = KILL_LIMIT_S) -> tuple[int, ...]:
    """End all processes with ``mark``; for None, all processes of launches whose tuner is gone.

    Repeats until none is found, since a process may start another while it is ended.

    Args:
        mark: Mark of a launch.
        timeout_s: Time limit in seconds.

    Returns:
        The PIDs of the ended processes.

    Raises:
        TimeoutError: If some still run after ``timeout_s``, which only an uninterruptible wait in the kernel explains.
    """
    began, ending = time.monotonic(), Ending()
    ended: set[int] = set()
    while processes := find_leftovers() if mark is None else find_marked(mark):
        keys = {process.key for process in processes}
        refuse_survivors(keys, since=began, limit_s=timeout_s)
        keys |= children_of(keys)
        ending.end(keys)
        ended |= {key.pid for key in keys}
        time.sleep(0.02)
    return tuple(sorted(ended))
