"""Orphans of a launch: torchrun's agent adopts them, so that they are found whatever they do to be forgotten.

A daemon forks twice, starts a session of its own and may clear its environment: neither parents nor the launch's mark
tell then whose it is. The kernel makes it a child of the nearest ancestor that adopts orphans (prctl(2),
``PR_SET_CHILD_SUBREAPER``): the agent, or where that was killed the process that launches are forked from. What may
outlive them all is noted, so that the next start ends it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from optuna_dsat.launch.ending import KILL_LIMIT_S, Ending, end_with_descendants
from optuna_dsat.launch.processes import ProcessKey, children_of, has_mark
from optuna_dsat.runtime.process_identity import process_space

__all__ = ["OrphanWatch", "adopt_orphans", "end_children", "end_noted", "own_children"]

_PR_SET_CHILD_SUBREAPER = 36
"""``linux/prctl.h``."""

_PAUSE_S = 0.5
"""Pause between two looks at the processes of a launch, each of which takes about a millisecond a rank."""


def adopt_orphans() -> None:
    """Have processes below this one become its children when their parents end. Does nothing outside Linux."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def own_children() -> set[ProcessKey]:
    """Return the living children of this process."""
    return {key for pid in _children(os.getpid()) if (key := ProcessKey.of(pid)) is not None}


def end_children(*, but: Collection[ProcessKey] = ()) -> None:
    """End the children of this process and all below them, and wait until they are gone.

    Args:
        but: Children that are left alone, with all below them.
    """
    began, ending = time.monotonic(), Ending()
    while time.monotonic() - began < KILL_LIMIT_S and (left := own_children() - {*but}):
        ending.end(left | children_of(left))
        time.sleep(0.005)
    for pid in _children(os.getpid()) - {key.pid for key in but}:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)  # an adopted child is a zombie until then


def _children(pid: int) -> set[int]:
    """Return the numbers of a process's children, zombies too; costs little, however many processes there are."""
    found: set[int] = set()
    with contextlib.suppress(OSError, ValueError):  # gone, or a kernel that does not say
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found.update(map(int, (thread / "children").read_text(encoding="ascii").split()))
    return found


class OrphanWatch:
    """Finds the processes of a launch while they live, and notes those that have lost its mark.

    Args:
        roots: Returns the processes that all others descend from.
        mark: Mark of the launch.
        record: File that notes what is found without the mark; None to note nothing.
    """

    def __init__(self, roots: Callable[[], Iterable[ProcessKey]], *, mark: str, record: Path | None = None) -> None:
        self._roots = roots
        self._mark = mark
        self._record = record
        self._found: set[ProcessKey] = set()
        self._look_at = 0.0

    def check(self, now: float) -> Collection[ProcessKey]:
        """Return what was found so far; ``now`` is monotonic."""
        if now >= self._look_at:
            new = self._descendants() - self._found
            self._look_at = now + _PAUSE_S
            self._found |= new
            for key in new:
                if not has_mark(key.pid, self._mark):
                    self._note(key)
        return self._found

    def _descendants(self) -> set[ProcessKey]:
        found: set[ProcessKey] = set()
        ahead = [key for key in self._roots() if key.alive]
        while ahead:
            keys = {key for pid in _children(ahead.pop().pid) if (key := ProcessKey.of(pid)) is not None}
            ahead += keys - found
            found |= keys
        return found

    def _note(self, key: ProcessKey) -> None:
        if self._record is not None:
            line = {"pid": key.pid, "start_ticks": key.start_ticks, "space": process_space()}
            with contextlib.suppress(OSError), self._record.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(line) + "\n")


def end_noted(values: Iterable[Any]) -> int:
    """End what a launch's notes name and all below it, wait until it is gone, and return how many there were.

    Args:
        values: The JSON of the notes' lines; those that name no process of this machine are passed over.

    Raises:
        TimeoutError: If processes outlive SIGKILL, which only an uninterruptible wait in the kernel explains.
    """
    return end_with_descendants(key for value in values if (key := _noted(value)) is not None)


def _noted(value: Any) -> ProcessKey | None:
    if not isinstance(value, dict) or value.get("space") != process_space():
        return None
    pid, start = value.get("pid"), value.get("start_ticks")
    return ProcessKey(pid, start) if isinstance(pid, int) and isinstance(start, int) and pid > 1 else None
