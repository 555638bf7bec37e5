"""Atomic writes of text files.

A file is written as ``.NAME.RANDOM.PID`` and locked until it is renamed. The next writer of the same file removes
unlocked temporary files, which killed processes left behind; the lock works across namespaces and machines, in which
processes may have the same number.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import sys
from io import BufferedReader
from pathlib import Path
from typing import TextIO


def write_text_atomic(path: Path, text: str, *, durable: bool = False, mode: int | None = None) -> None:
    """Write a UTF-8 file atomically: readers see either the old or the new content.

    ``durable`` syncs it to disk before it replaces the old. ``mode`` are permission bits, else the umask's default.
    """
    _remove_abandoned(path)
    temporary = path.with_name(f".{path.name}.{int.from_bytes(os.urandom(4), 'big')}.{os.getpid()}")
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
    """Write a UTF-8 file named by the user like a shell redirection: links, pipes and devices are kept.

    A regular file is replaced atomically and keeps its permissions. It is written in place if it has several hard links
    or belongs to another user.

    Raises:
        OSError: If the file cannot be written, or is a block device.
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
    """Return the standard stream behind a path such as ``/dev/stdout``; None for other paths."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            if os.path.samestat(path.stat(), os.fstat(stream.fileno())):
                return stream
    return None


def set_aside(path: Path) -> Path:
    """Rename a file or folder to ``NAME.old-N``, with the first free N; return the new path."""
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.old-{number}")):
        number += 1
    return path.rename(aside)


def _open_locked(temporary: Path) -> TextIO:
    """Open a file for writing and lock it; retry if another process removed it as abandoned before it was locked."""
    while True:
        file = temporary.open("w", encoding="utf-8", errors="surrogateescape")  # bytes of variables that are not UTF-8
        with contextlib.suppress(OSError):  # a file system without locks: no process removes the file there
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()


def _remove_abandoned(path: Path) -> None:
    """Remove temporary files of killed processes that were writing a file."""
    prefix = f".{path.name}."
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        names = [entry.name for entry in entries if entry.name.startswith(prefix)]
        left = [path.with_name(name) for name in names if re.fullmatch(r"(\d+\.)?\d+", name[len(prefix) :])]
        for name in left:
            with contextlib.suppress(OSError):
                remove_unlocked(name)


def remove_unlocked(path: Path) -> None:
    """Remove a file; raise ``OSError`` for a link or a folder, and if a process has locked or removed it."""
    descriptor = try_lock(path)
    if descriptor is None:
        raise BlockingIOError(errno.EWOULDBLOCK, "locked, gone, or not a file", str(path))
    try:
        path.unlink()
    finally:
        os.close(descriptor)


def try_lock(path: Path) -> int | None:
    """Lock a file; return its descriptor, or None if another process holds or has removed it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), path.lstat()):
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


_MOST_BYTES = 16 * 2**20


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a regular file for non-blocking reading; ``read`` returns None if no data is available yet.

    Opening a pipe would block. So would reading a kernel log in ``/proc``, which has the mode of a regular file.

    Raises:
        OSError: If the file cannot be opened, or is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: str | os.PathLike[str], *, most_bytes: int = _MOST_BYTES) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: If the file cannot be opened or read, is not a regular file, is larger, or has no data available yet.
    """
    with open_regular(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        content: bytes | None = file.read(most_bytes + 1) if size_bytes <= most_bytes else b""
    if content is None:
        raise BlockingIOError(errno.EAGAIN, "it has nothing yet, as a log of the kernel in /proc", os.fspath(path))
    if max(size_bytes, len(content)) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes} bytes", os.fspath(path))
    return content


def home() -> Path:
    """Return the user's home folder; ``/`` for a user of a container who has none, as container runtimes set it."""
    path = os.path.expanduser("~")  # noqa: PTH111 - Path.home() raises RuntimeError without one
    return Path("/" if path == "~" else path)


def mount_points(table: str = "/proc/self/mountinfo") -> dict[str, str]:
    """Return mount point -> type of file system (proc(5)); of several mounts on the same path, the last."""
    result: dict[str, str] = {}
    with Path(table).open("rb") as lines:
        for line in lines:
            words = line.split(b" ")
            path = words[4].decode("unicode_escape").encode("latin-1")  # \040 for a blank
            result[os.fsdecode(path)] = words[words.index(b"-") + 1].decode("ascii", errors="replace")
    return result


def file_system(folder: Path) -> str:
    """Return the type of the file system that contains a folder; empty if unknown."""
    with contextlib.suppress(OSError):
        points, path = mount_points(), folder.resolve()
        return next((points[str(place)] for place in (path, *path.parents) if str(place) in points), "")
    return ""


MESSAGE_CHARS = 2_000
"""Maximum length of an error message stored with a launch; the launch's log contains the full message."""
TEXT_CHARS = 8_000
"""Maximum length of an event's texts, such as a traceback."""

_SURROGATE = re.compile("[\ud800-\udfff]")


def storable(text: str) -> str:
    """Return the text without characters that databases and encodings reject: NUL and unpaired surrogates."""
    return _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", text.replace("\x00", "\N{SYMBOL FOR NULL}"))


def shortened(text: str, limit_chars: int) -> str:
    """Return the text; of a longer text, ``limit_chars`` from beginning and end, with the number of omitted ones."""
    if len(text) <= limit_chars:
        return text
    head = limit_chars // 3
    left_out = len(text) - limit_chars
    return f"{text[:head]} [... {left_out} characters left out ...] {text[head + left_out :]}"
