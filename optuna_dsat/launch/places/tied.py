"""``python -m optuna_dsat.launch.places.tied PID COMMAND...``: run COMMAND and end it when process PID ends.

The kernel sends SIGTERM once the thread that started this process ends, even if it was killed. Otherwise a request
that waits in a queue would outlive the process that made it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
"""``linux/prctl.h``."""


def main(argv: list[str]) -> None:
    """Replace this process by the command in ``argv[1:]``."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(argv[0]):  # the parent has already ended
        sys.exit(1)
    os.execvp(argv[1], argv[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
