"""Writes the event file of a rank."""

from __future__ import annotations

import os
from pathlib import Path

from optuna_dsat.runtime.events import Event, encode_event

__all__ = ["EventWriteError", "EventWriter", "events_path"]


class EventWriteError(OSError):
    """An event could not be written (disk full, directory removed), so the launch cannot be recorded."""


def events_path(events_dir: str | Path, rank: int) -> Path:
    """Return the path of a rank's event file."""
    return Path(events_dir) / f"rank{rank}.jsonl"


class EventWriter:
    """Appends one JSON line per event; a line left incomplete by an error is terminated before the next.

    Scripts that close all open files, as daemons do, also close the event file. It is then reopened; another file that
    got its descriptor number in the meantime is not written to.

    Raises:
        EventWriteError: If the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.begin(path)

    def begin(self, path: Path) -> None:
        """Write to another file from here on."""
        self._path = path
        self._torn = False
        try:
            self._open()
        except OSError as error:
            raise self._failure(error) from error

    def _open(self) -> None:
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._file = _identity(self._fd)

    def write(self, event: Event) -> None:
        """Append an event, unbuffered.

        Raises:
            EventWriteError: If it could not be written completely.
        """
        line = f"{encode_event(event)}\n".encode()
        data = memoryview(b"\n" + line if self._torn else line)
        self._torn = True
        try:
            if _identity(self._fd) != self._file:
                self._open()
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            raise self._failure(error) from error
        self._torn = False

    def _failure(self, error: OSError) -> EventWriteError:
        return EventWriteError(
            error.errno,
            f"optuna-dsat cannot record this rank's events ({error.strerror}). "
            "Free space there or choose another --output-dir",
            str(self._path),
        )


def _identity(descriptor: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_dev, status.st_ino
