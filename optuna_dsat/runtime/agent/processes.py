"""The processes of a launch as any of them sees them: identity, mark, descendants, termination. Linux only.

The standard library suffices: torchrun and the fork server use this module with the interpreter of the script.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from optuna_dsat.runtime.process_identity import read_command, start_ticks, stat_fields

MARK_ENV = "OPTUNA_DSAT_LAUNCH_ID"
"""Environment variable that marks every process of a launch:
``<uuid>:<pid of the tuner>:<its start time>:<boot id>:<PID namespace>``.
"""

_PARENT_FIELD = 1
"""Index of the parent's PID in ``stat_fields``."""

_ENV_START_FIELD = 47
"""Index of the address of the initial environment in ``stat_fields``."""


_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
"""``linux/prctl.h``."""


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
    start = int(stat_fields(os.getpid())[_ENV_START_FIELD])
    ctypes.memmove(start + place, new, length)


def children_of(keys: Iterable[ProcessKey]) -> set[ProcessKey]:
    """Return all living descendants of the given processes."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and (fields := stat_fields(int(entry.name))):
            children.setdefault(int(fields[_PARENT_FIELD]), []).append(int(entry.name))
    pids = [key.pid for key in keys if key.alive]
    processes: set[ProcessKey] = set()
    while pids:
        below = {key for pid in children.get(pids.pop(), ()) if (key := ProcessKey.of(pid)) is not None}
        pids += [key.pid for key in below - processes]
        processes |= below
    return processes


def end_processes(keys: Iterable[ProcessKey]) -> None:
    """Send SIGKILL to each process that is still running. Does not wait."""
    _signal(keys, signal.SIGKILL)


def stop_processes(keys: Iterable[ProcessKey]) -> None:
    """Send SIGSTOP to each process that is still running."""
    _signal(keys, signal.SIGSTOP)


def _signal(keys: Iterable[ProcessKey], number: signal.Signals) -> None:
    for key in keys:
        if key.alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(key.pid, number)


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
            self._began = time.monotonic()
            self._began_ticks = int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))
        waited_s = time.monotonic() - self._began
        ended = {key for key in alive if waited_s >= _CLEANERS_S or not _is_cleaner(key.pid)}
        if waited_s >= _PROGRAMS_S:
            end_processes(ended)
            return ended
        new = {key for key in ended - self._spared if _is_program(key.pid)}
        self._spared |= new
        end_processes(ended - self._spared)
        asked = (key for key in new if is_first or key.start_ticks < self._began_ticks)
        # Parents first: a shell continues when its child ends.
        _signal(sorted(asked, key=lambda key: (key.start_ticks, key.pid)), signal.SIGTERM)
        return ended


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


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel end this process when its parent, as recorded by the parent, ends or has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def adopt_orphans() -> None:
    """Make orphaned descendants children of this process."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def own_children() -> set[ProcessKey]:
    """Return the living children of this process."""
    return {key for pid in child_pids(os.getpid()) if (key := ProcessKey.of(pid)) is not None}


def end_children(*, but: Collection[ProcessKey] = ()) -> None:
    """End the descendants of this process, except for some children and theirs, and wait until they are gone."""
    began, ending = time.monotonic(), Ending()
    while time.monotonic() - began < KILL_LIMIT_S and (left := own_children() - {*but}):
        ending.end(left | children_of(left))
        time.sleep(0.005)
    for pid in child_pids(os.getpid()) - {key.pid for key in but}:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)  # an adopted child remains a zombie until then


def child_pids(pid: int) -> set[int]:
    """Return the PIDs of a process's children, including zombies; cheap with any number of processes."""
    numbers: set[int] = set()
    with contextlib.suppress(OSError, ValueError):  # gone, or not supported by the kernel
        for thread in Path(f"/proc/{pid}/task").iterdir():
            numbers.update(map(int, (thread / "children").read_text(encoding="ascii").split()))
    return numbers
