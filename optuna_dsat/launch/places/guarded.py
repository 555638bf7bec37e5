"""``python -m optuna_dsat.launch.places.guarded PYTHON WORDS...``: ``PYTHON WORDS...`` that leaves no process behind.

An empty PYTHON is the interpreter of this process.

It ends when its standard input closes, which happens when the process that started it ends, even if it was killed.
Processes started by torchrun have separate sessions and parents by then, so they are found by a mark in their
environment (``launch/machine/processes.py``).
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from optuna_dsat.launch.machine.processes import kill_leftovers, new_mark
from optuna_dsat.runtime.agent.processes import MARK_ENV

_LOOK_S = 0.2
"""Interval between checks for the end."""
_GRACE_S = 3.0
"""Time to exit after SIGTERM."""


def main(words: Sequence[str]) -> int:
    """Run the command and return its exit code in the shell's convention.

    The parent only waits for its child: Ray kills the children of a worker that ends, but not theirs, which clean up.
    """
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # end of input follows
    guard = os.fork()
    if guard:
        return os.waitstatus_to_exitcode(os.waitpid(guard, 0)[1])
    os._exit(_guard(words))


def _guard(words: Sequence[str]) -> int:
    mark = new_mark()
    process = subprocess.Popen(
        [words[0] or sys.executable, *words[1:]],
        stdin=subprocess.DEVNULL,
        env={**os.environ, MARK_ENV: mark},
        start_new_session=True,
    )
    while process.poll() is None and not _input_ended():
        pass
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    with suppress(TimeoutError):  # some are in uninterruptible sleep and cannot be killed
        kill_leftovers(mark)
    code = process.wait()
    return code if code >= 0 else 128 - code


def _input_ended() -> bool:
    """Wait up to ``_LOOK_S``; return whether standard input has ended. Its content is ignored."""
    ready, _, _ = select.select([0], [], [], _LOOK_S)
    return bool(ready) and not os.read(0, 4096)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
