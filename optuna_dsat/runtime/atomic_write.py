"""Atomic writes of text files."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["write_text_atomic"]


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
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            if mode is not None:
                temporary.chmod(mode)
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
