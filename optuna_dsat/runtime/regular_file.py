"""Reading files of others: only what is there at once, and no more than a bound."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader

__all__ = ["open_regular", "read_regular"]

_MOST_BYTES = 16 * 2**20


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a regular file for reading; reading gives None where it has nothing yet.

    A pipe blocks who opens it, and a log of the kernel in ``/proc``, a regular file by its mode, who reads it.

    Raises:
        OSError: If it cannot be opened, or is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", os.fspath(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: str | os.PathLike[str], *, most_bytes: int = _MOST_BYTES) -> bytes:
    """Return the content of a regular file.

    Args:
        path: The file.
        most_bytes: Largest size that is read.

    Raises:
        OSError: If it cannot be opened or read, is no regular file, is larger, or has nothing yet.
    """
    with open_regular(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        content: bytes | None = file.read(most_bytes + 1) if size_bytes <= most_bytes else b""
    if content is None:
        raise BlockingIOError(errno.EAGAIN, "it has nothing yet, as a log of the kernel in /proc", os.fspath(path))
    if max(size_bytes, len(content)) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes} bytes", os.fspath(path))
    return content
