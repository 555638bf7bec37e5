"""``python -m optuna_dsat.launch.places.tied PID COMMAND...``: becomes a command that is told to end when PID does.

The kernel sends it SIGTERM once the thread that started it ends, also if that is killed: a request that waits in a
queue would otherwise outlive whoever made it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1
"""``linux/prctl.h``."""


def main(argv: list[str]) -> None:
    """Replace this process by the command after the first argument."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(argv[0]):  # it ended before
        sys.exit(1)
    os.execvp(argv[1], argv[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
