"""Ctrl-C between two steps that belong together comes after the second."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from optuna_dsat.signals import ENDING, handling, is_told_again

__all__ = ["uninterrupted"]


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Within the block, a first signal to end (``ENDING``) waits for its end; a second request does not.

    Only the main thread gets signals; elsewhere this does nothing.

    Raises:
        KeyboardInterrupt: At the end, if one came whose handler raises it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in ENDING}
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        handler = handlers[signal.Signals(number)]
        if came and callable(handler) and not is_told_again(came[0], number):
            handler(number, frame)
        came.append(number)

    try:
        with handling([number for number, handler in handlers.items() if callable(handler)], note):
            yield
    finally:
        for one in came[:1]:
            handler = handlers[signal.Signals(one)]
            if callable(handler):
                handler(one, None)
