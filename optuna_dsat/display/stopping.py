"""Ctrl-C: once stops cleanly, twice stops immediately."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from optuna_dsat.escape.terminal import drop_lost_terminal
from optuna_dsat.signals import ENDING, handling, is_told_again

EXIT_INTERRUPTED = 130
"""Exit code of an interrupted command, as in shells."""

STOP_MESSAGE = "Stopping: running trials return to the study. Ctrl-C again stops at once."
_OF_PERSONS = (signal.SIGINT, signal.SIGTERM)
_AT_ONCE = "Stopped at once. A resume runs the interrupted trials again."
_SHOW_CURSOR = "\x1b[?25h"


@dataclass(kw_only=True)
class Stopping:
    """Stop request of the user, and how to continue afterwards."""

    by: int | None = None
    """The signal by which the user asked to stop, else None."""
    live: bool = False
    """Whether a live view shows ``STOP_MESSAGE``, so that it need not be written to the terminal."""
    remedy: str = ""
    """The command to continue; empty while unknown."""
    leave: Callable[[int], None] = os._exit
    """Ends the process without cleaning up; the kernel then ends its launches."""

    @property
    def asked(self) -> bool:
        """Whether the user asked to stop."""
        return self.by is not None

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal; the first time raise ``KeyboardInterrupt``."""
        if number == signal.SIGHUP:
            drop_lost_terminal()
        if self.by is not None:
            if is_told_again(self.by, number):
                return
            self._write(f"{_SHOW_CURSOR if self.live else ''}\n{_AT_ONCE}")
            if self.remedy:
                self._write(f"Continue with: {self.remedy}")
            self.leave(EXIT_INTERRUPTED)
            return
        self.by = number
        if number not in _OF_PERSONS:
            self._write(f"{signal.Signals(number).name} came.")
        if not self.live:
            self._write(STOP_MESSAGE)
        raise KeyboardInterrupt

    @staticmethod
    def _write(text: str) -> None:
        """Write a line past all buffers and locks, which the interrupted code may hold."""
        try:
            os.write(2, f"{text}\n".encode())
        except OSError:
            return  # stderr is closed


@contextmanager
def stopping_on_signals() -> Iterator[Stopping]:
    """In the block, the first signal to end (``ENDING``) raises KeyboardInterrupt; a second request ends the process.

    A signal that only repeats the first is not a second request (``is_told_again``). Ignored signals stay ignored, such
    as SIGINT for background processes of a shell.
    """
    stopping = Stopping()
    with handling(ENDING, stopping):
        yield stopping
