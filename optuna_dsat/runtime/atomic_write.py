"""Atomic writes of text files.

A file is written under another name, ``.NAME.PID``, and locked until it takes its own: whoever writes the same file
next tells by that what a killed process left, in every namespace and on every machine, and removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import sys
from pathlib import Path
from typing import TextIO

__all__ = ["set_aside", "stream_of", "write_output", "write_text_atomic"]


def write_text_atomic(path: Path, text: str, *, durable: bool = False, mode: int | None = None) -> None:
    """Write a UTF-8 file atomically: readers see the old content or the new, never a part.

    Args:
        path: The file.
        text: Its new content.
        durable: Whether to fsync the new content before it replaces the old.
        mode: Permission bits of the file; None for the umask's default.

    Raises:
        OSError: If the folder cannot be written; the temporary file is removed.
    """
    _remove_abandoned(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with _open_locked(temporary) as file:
            if mode is not None:
                temporary.chmod(mode)
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
            temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_output(path: Path, text: str) -> None:
    """Write a UTF-8 file that the user named, as a shell's redirection would: links, pipes and devices stay.

    A regular file is replaced atomically, with its permissions; it is written in place if it has several names or
    belongs to another user.

    Args:
        path: The file, or a link to it, a pipe or a device.
        text: Its new content.

    Raises:
        OSError: If it cannot be written, or is a block device.
    """
    try:
        state = path.stat()
    except FileNotFoundError:
        write_text_atomic(path.resolve(), text)
        return
    if stat.S_ISBLK(state.st_mode):
        raise OSError(0, "it is a block device", str(path))
    if (stream := stream_of(path)) is not None:
        stream.write(text)
        stream.flush()
        return
    if stat.S_ISREG(state.st_mode) and state.st_nlink == 1 and state.st_uid == os.geteuid():
        write_text_atomic(path.resolve(), text, mode=stat.S_IMODE(state.st_mode))
        return
    with path.open("w", encoding="utf-8") as file:
        file.write(text)


def stream_of(path: Path) -> TextIO | None:
    """Return the standard stream that a path names, such as ``/dev/stdout``; None if it names none."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            if os.path.samestat(path.stat(), os.fstat(stream.fileno())):
                return stream
    return None


def set_aside(path: Path) -> Path:
    """Rename a file or folder to ``NAME.old-N``, with the first N that is free; return the new path.

    Raises:
        OSError: If it cannot be renamed.
    """
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.old-{number}")):
        number += 1
    return path.rename(aside)


def _open_locked(temporary: Path) -> TextIO:
    """Open a file for writing and lock it, again if it was taken for an abandoned one before that."""
    while True:
        file = temporary.open("w", encoding="utf-8")
        with contextlib.suppress(OSError):  # a file system without locks: nobody removes it there
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()


def _remove_abandoned(path: Path) -> None:
    """Remove what killed processes left of a file that they were writing."""
    prefix = f".{path.name}."
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        left = [one.path for one in entries if one.name.startswith(prefix) and one.name[len(prefix) :].isdigit()]
        for name in left:
            with contextlib.suppress(OSError):
                _remove_unlocked(Path(name))


def _remove_unlocked(path: Path) -> None:
    """Remove a file that nobody has locked.

    Raises:
        OSError: If it is locked, or cannot be.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), path.lstat()):
            path.unlink()
    finally:
        os.close(descriptor)
