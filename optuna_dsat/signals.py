"""Signals: handlers for a block, and what a second one means. Imports nothing of the rest."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["handling", "is_told_again"]


def is_told_again(first: int, number: int) -> bool:
    """Return whether a signal only repeats the first one: it is no second request.

    A batch system sends SIGTERM to every process of a job, and the job's script passes on the one that it got.
    """
    return first == number == signal.SIGTERM


@contextmanager
def handling(numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Within the block, signals come to ``handler``; after it, to whoever had them before.

    A signal that is ignored, as nohup ignores SIGHUP and a shell SIGINT for what runs in its background, stays ignored;
    a handler that Python did not install stays. Only the main thread gets signals; in others this does nothing.

    Args:
        numbers: The signals.
        handler: Called as ``signal.signal`` has it.
    """
    before = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                if (own := signal.getsignal(number)) not in (signal.SIG_IGN, None):
                    before[number] = own
                    signal.signal(number, handler)
        yield
    finally:
        for number, own in before.items():
            signal.signal(number, own)
