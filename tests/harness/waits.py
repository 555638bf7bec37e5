"""Waiting for conditions and ends of processes, for processes of tests as well: imports neither stores nor pytest."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

import psutil

HANG_S = 300.0
"""Time after which a test that waits for something has waited in vain, on the slowest machine."""

_USUAL_START_S = 0.06
"""Duration of five starts of a bare interpreter on a machine of usual speed that does nothing else."""


def assert_within(took_s: float, limit_s: float) -> None:
    """Check a time limit of the product, which is longer where interpreters start more slowly than usual just now."""
    if took_s < limit_s:
        return
    began = time.monotonic()
    for _ in range(5):
        subprocess.run([sys.executable, "-I", "-S", "-c", ""], check=True)
    assert took_s < limit_s * max(1.0, (time.monotonic() - began) / _USUAL_START_S)


def wait_until(condition: Callable[[], bool], *, what: str) -> None:
    deadline = (looked := time.monotonic()) + HANG_S
    while not condition():
        if (now := time.monotonic()) > deadline:
            raise AssertionError(f"Not within {HANG_S:g} s: {what}.")
        time.sleep(min(0.2, max(0.02, 4 * (now - looked))))  # a look at all processes of a machine takes a while
        looked = time.monotonic()


def ended(pid: int) -> bool:
    """Return whether a process has ended; the kernel ends a killed process shortly after the signal."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
