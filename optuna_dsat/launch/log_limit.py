"""Limit on the size of a launch's logs: each keeps its beginning and its end.

While the ranks write, the middle of a log is freed by a hole in the file, which changes neither the offsets of its
writers nor of its readers. After the launch the hole is replaced by a line that gives its size. File systems without
holes (``fallocate``, man 2 fallocate) shorten logs only after the launch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
from collections.abc import Iterable
from pathlib import Path

__all__ = ["END_BYTES", "START_BYTES", "LogLimit", "dropped_in_words"]

START_BYTES = 2**20
"""Bytes kept of the beginning of a log."""
END_BYTES = 31 * 2**20
"""Bytes kept of its end: 64 MiB a rank, with its standard output and standard error."""
_INTERVAL_S = 1.0
_BLOCK_BYTES = 512
"""Unit of ``st_blocks`` (man 2 stat)."""
_KEEP_SIZE_AND_PUNCH_HOLE = 0x01 | 0x02
"""``FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE`` of ``linux/falloc.h``."""


def dropped_in_words(size: int) -> str:
    """Return the line that a log has in place of ``size`` bytes."""
    return f"optuna-dsat dropped {size} bytes here"


class LogLimit:
    """Keeps the logs of one launch within ``START_BYTES + END_BYTES`` each.

    Args:
        paths: The logs; they need not exist yet. Links and files with several names are left as they are: a script
            may have put them there.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = tuple(paths)
        self._checked_at = float("-inf")

    def check(self, now: float) -> None:
        """Free the middle of logs that are too long, at most once a second.

        Args:
            now: Monotonic time, in seconds.
        """
        if now - self._checked_at < _INTERVAL_S:
            return
        self._checked_at = now
        for path in self._paths:
            with contextlib.suppress(OSError), _Log(path) as log:
                if log.allocated_bytes > START_BYTES + END_BYTES:
                    log.free_middle()

    def close(self) -> None:
        """Replace the middle of logs that are too long by a line; call it once their writers are gone."""
        for path in self._paths:
            with contextlib.suppress(OSError), _Log(path) as log:
                if log.size > START_BYTES + END_BYTES:
                    log.shorten()


class _Log:
    """A log, open for reading and writing.

    Raises:
        OSError: If it cannot be opened, or is not a regular file with a single name.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        self._state = os.fstat(self._descriptor)

    def __enter__(self) -> _Log:
        if not stat.S_ISREG(self._state.st_mode) or self._state.st_nlink != 1:
            os.close(self._descriptor)
            raise OSError(f"{self._path} is not a regular file with a single name")
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    @property
    def size(self) -> int:
        return self._state.st_size

    @property
    def allocated_bytes(self) -> int:
        return self._state.st_blocks * _BLOCK_BYTES

    def free_middle(self) -> None:
        length = ctypes.c_int64(self.size - END_BYTES - START_BYTES)
        if length.value > 0:
            libc = ctypes.CDLL(None, use_errno=True)
            libc.fallocate64(self._descriptor, _KEEP_SIZE_AND_PUNCH_HOLE, ctypes.c_int64(START_BYTES), length)

    def shorten(self) -> None:
        dropped = self.size - START_BYTES - END_BYTES
        line = f"\n{dropped_in_words(dropped)}: a log keeps its first 1 MiB and its last 31 MiB.\n".encode()
        os.pwrite(self._descriptor, line, START_BYTES)
        to, source = START_BYTES + len(line), self.size - END_BYTES
        while data := os.pread(self._descriptor, 2**20, source):
            os.pwrite(self._descriptor, data, to)
            to, source = to + len(data), source + len(data)
        os.ftruncate(self._descriptor, to)
