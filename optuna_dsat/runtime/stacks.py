"""Stacks of a rank on request, also while it waits in a collective."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from pathlib import Path

STACK_SIGNAL = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else None
"""Signal that makes a rank append the stacks of its threads to its file; None on systems without a free signal."""


def stacks_path(log_dir: Path, rank: int | str) -> Path:
    """Return the file for the stacks of a rank; a pattern of all files for ``*``."""
    return log_dir / f"rank{rank}.stacks.log"


def register_stacks(log_dir: Path, rank: int) -> None:
    """Append the stacks of all threads to the rank's file at each ``STACK_SIGNAL``."""
    if STACK_SIGNAL is None:
        return
    with contextlib.suppress(OSError):
        path = stacks_path(log_dir, rank)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        faulthandler.register(STACK_SIGNAL, file=descriptor, all_threads=True)
