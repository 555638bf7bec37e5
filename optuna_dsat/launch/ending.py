"""How processes of launches are ended: some are asked first, some have time to clean up, and the others are killed."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from optuna_dsat.launch.processes import (
    ProcessKey,
    children_of,
    end_processes,
    find_leftovers,
    find_marked,
    read_command,
)

__all__ = ["KILL_LIMIT_S", "Ending", "end_with_descendants", "kill_leftovers", "refuse_survivors"]

KILL_LIMIT_S = 10.0
"""Longest time for processes to end after SIGKILL."""

_PROGRAMS_S = 1.0
"""Time that programs have to remove their temporary files once they are asked to end."""

_CLEANERS_S = 1.0
"""Time that cleaners have."""

_CLEANERS = ("multiprocessing.resource_tracker", "torch_shm_manager")
"""Words of the commands of processes that remove shared memory once those that made it are gone."""

_PYTHON = re.compile(r"python|pypy")
"""Matches the name of an interpreter of Python."""

_PYTHON_LIBRARY = re.compile(rb"/lib(?:python|pypy)[^/\n]*$", re.MULTILINE)
"""Matches a line of ``/proc/PID/maps`` that names the library of an interpreter."""


class Ending:
    """Ends processes, called again and again until none of them is left.

    A compiler, or a shell with a trap, removes its temporary files when it is told to end by SIGTERM: programs have a
    moment for that, and so has what they start for it. Python processes of a launch are killed at once: what a handler
    in them does, such as saving a checkpoint, is not wanted. Cleaners wait for the end of all others by themselves, and
    are not asked.
    """

    def __init__(self) -> None:
        self._began: float | None = None
        self._began_ticks = 0
        """The same moment as the starts of processes are counted."""
        self._spared: set[ProcessKey] = set()
        """Programs that have been asked, or that were started since."""

    def end(self, keys: Iterable[ProcessKey]) -> set[ProcessKey]:
        """Ask or kill each process that still runs, all but cleaners; return those. Does not wait."""
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
    """Send SIGTERM to each process that still runs, parents first: a shell goes on when what it waits for has ended."""
    for key in sorted(keys, key=lambda one: (one.start_ticks, one.pid)):
        with contextlib.suppress(psutil.Error):
            psutil.Process(key.pid).terminate()


def _is_cleaner(pid: int) -> bool:
    """Whether a process removes from shared memory by itself what others left there, once all of these are gone."""
    return any(name in word for word in read_command(pid) for name in _CLEANERS)


def _is_program(pid: int) -> bool:
    """Whether a process runs something else than Python; False where that cannot be seen."""
    try:
        if _PYTHON.search(Path(f"/proc/{pid}/exe").readlink().name):
            return False
        return not _PYTHON_LIBRARY.search(Path(f"/proc/{pid}/maps").read_bytes())
    except OSError:  # gone, or another user's
        return False


def refuse_survivors(keys: Iterable[ProcessKey], *, since: float, limit_s: float = KILL_LIMIT_S) -> None:
    """Raise an error if processes that were killed are still there long after a moment of the monotonic clock.

    Raises:
        TimeoutError: If that is more than ``limit_s`` ago, which only an uninterruptible wait in the kernel explains.
    """
    if time.monotonic() - since > limit_s:
        raise TimeoutError(f"Processes {sorted(key.pid for key in keys)} still run {limit_s:g} s after SIGKILL.")


def end_with_descendants(keys: Iterable[ProcessKey]) -> int:
    """End processes and all below them, wait until they are gone, and return how many there were.

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
    """End every process with ``mark``, or for None those of all launches whose tuner is gone.

    Repeats until none is found, since a process may start another while it is ended.

    Args:
        mark: Mark of a launch.
        timeout_s: Longest time to repeat, in seconds.

    Returns:
        The numbers of the processes that were there.

    Raises:
        TimeoutError: If some still run after ``timeout_s``, which only an uninterruptible wait in the kernel explains.
    """
    began, ending = time.monotonic(), Ending()
    ended: set[int] = set()
    while found := find_leftovers() if mark is None else find_marked(mark):
        keys = {process.key for process in found}
        refuse_survivors(keys, since=began, limit_s=timeout_s)
        keys |= children_of(keys)
        ending.end(keys)
        ended |= {key.pid for key in keys}
        time.sleep(0.02)
    return tuple(sorted(ended))
