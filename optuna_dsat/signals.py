"""Signal handlers for a block, and the meaning of a repeated signal. Imports nothing of the rest."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

KEYBOARD = frozenset({signal.SIGINT, signal.SIGQUIT})
"""Signals that a person sends by a terminal, to all of its foreground processes: Ctrl-C and Ctrl-\\."""

ENDING = (
    *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU),
)
"""Signals by which a terminal, a batch system (SLURM's --signal, Grid Engine's -notify) or a limit of CPU time has a
process end.
"""


def is_told_again(first: int, number: int) -> bool:
    """Return whether a signal only repeats the first signal and is not a second request.

    A batch system sends SIGTERM to every process of a job, and the job's script passes on the one that it got; a shell
    passes on the SIGHUP of its terminal, systemd sends one after SIGTERM, the kernel SIGXCPU each second. A second
    request comes from a person: by the keyboard, or by ``kill`` where Ctrl-C took too long.
    """
    return number not in KEYBOARD and not (first in KEYBOARD and number == signal.SIGTERM)


@contextmanager
def handling(numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Send signals to ``handler`` within the block, and to their previous handlers afterwards.

    A signal that is ignored, as nohup ignores SIGHUP and a shell SIGINT for what runs in its background, stays ignored;
    a handler that Python did not install stays. Only the main thread gets signals; in others this does nothing.
    """
    before = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                if (previous := signal.getsignal(number)) not in (signal.SIG_IGN, None):
                    before[number] = previous
                    signal.signal(number, handler)
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
