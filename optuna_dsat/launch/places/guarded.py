"""``python -m optuna_dsat.launch.places.guarded WORDS...``: ``python WORDS...`` that leaves no process behind.

It ends with its standard input, which is open as long as whoever started it lives, also if that is killed. What a
torchrun starts has sessions and parents of its own by then, so it is found by a mark (``launch/machine/processes.py``).
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from optuna_dsat.launch.machine.processes import MARK_ENV, kill_leftovers, new_mark

__all__ = ["main"]

_LOOK_S = 0.2
"""Time between two looks at whether it has ended."""
_GRACE_S = 3.0
"""Time to end by itself after SIGTERM."""


def main(words: Sequence[str]) -> int:
    """Run; return the exit code, of a shell's kind.

    Two processes: Ray kills the children of a worker that ends, and would kill with them whoever is to clean up. The
    first one therefore only waits for the second one.
    """
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the end of the input comes with it
    guard = os.fork()
    if guard:
        return os.waitstatus_to_exitcode(os.waitpid(guard, 0)[1])
    os._exit(_guard(words))


def _guard(words: Sequence[str]) -> int:
    mark = new_mark()
    process = subprocess.Popen(
        [sys.executable, *words], stdin=subprocess.DEVNULL, env={**os.environ, MARK_ENV: mark}, start_new_session=True
    )
    while process.poll() is None and not _input_ended():
        pass
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    with suppress(TimeoutError):  # the kernel holds some; nobody can end them
        kill_leftovers(mark)
    code = process.wait()
    return code if code >= 0 else 128 - code


def _input_ended() -> bool:
    """Wait a moment; return whether the input has ended. What comes by it means nothing."""
    ready, _, _ = select.select([0], [], [], _LOOK_S)
    return bool(ready) and not os.read(0, 4096)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
