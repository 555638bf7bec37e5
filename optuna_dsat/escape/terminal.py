"""Escape text for terminals, so that control sequences are shown and not executed."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

from optuna_dsat.runtime.files import shortened

if TYPE_CHECKING:
    from rich.text import Text

CELL_CHARS = 600
"""Longest text in a cell of a table."""

_COMMAND = re.compile(r"`[^`\n]+`")
"""A command within prose, which is not folded, so that it can be copied."""
_NO_BREAK = "\u00a0"
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 except tab and line feed, DEL, C1: escape sequences start with these
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # change the direction of the following text
    "\u2028\u2029\ud800-\udfff]"  # other line ends, halves of surrogate pairs
)


def plain(text: object) -> str:
    """Return text with control characters replaced by escapes; tabs and line ends stay."""
    return _CONTROL.sub(lambda match: _written_out(match[0]), str(text))


def _written_out(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def one_line(text: object, *, limit_chars: int = CELL_CHARS) -> str:
    """Return text as ``plain``, in a single line of limited length."""
    whole = str(text)
    return plain(shortened(" ".join(whole.split()) if "\n" in whole or "\t" in whole else whole, limit_chars))


def cell(value: object) -> Text:
    """Return a cell of a ``rich`` table, without markup; empty for None."""
    from rich.text import Text

    return Text("" if value is None else one_line(value))


def say(text: object, *, file: TextIO | None = None) -> None:
    """Print text as ``plain``; characters missing in the stream's encoding are escaped, closed terminals ignored."""
    stream = sys.stdout if file is None else file
    encoding = stream.encoding or "utf-8"
    with outliving_the_terminal():
        print(plain(text).encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)


def drop_lost_terminal() -> bool:
    """Discard output to closed terminals and pipes, where every write fails; return whether there was any."""
    lost = [descriptor for descriptor in (1, 2) if _is_lost(descriptor)]
    for descriptor in lost:
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(null, descriptor)
        os.close(null)
    return bool(lost)


def _is_lost(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


@contextlib.contextmanager
def outliving_the_terminal() -> Iterator[None]:
    """Ignore a closed terminal within the block, or a pipe of stderr whose reader has ended, as Ctrl-C ends ``tee``.

    A search continues without them.
    """
    try:
        yield
    except OSError as error:
        is_closed = error.errno == errno.EIO or (error.errno == errno.EPIPE and _is_lost(2))
        if not (is_closed and drop_lost_terminal()):
            raise


def say_prose(text: str, *, file: TextIO | None = None) -> None:
    """Print sentences as ``say``; a terminal folds them between words, except within commands in backquotes."""
    stream = sys.stdout if file is None else file
    if stream.isatty():
        kept = _COMMAND.sub(lambda match: match[0].replace(" ", _NO_BREAK), plain(text))
        width = max(20, _columns(stream) - 1)
        folded = [
            part
            for line in kept.split("\n")
            for part in textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) or [""]
        ]
        text = "\n".join(folded).replace(_NO_BREAK, " ")
    say(text, file=stream)


def _columns(stream: TextIO) -> int:
    """Return the columns of a terminal; ``shutil`` queries stdout, which may be a file while stderr is a terminal."""
    with contextlib.suppress(OSError, ValueError):
        if not os.environ.get("COLUMNS"):
            return os.get_terminal_size(stream.fileno()).columns or shutil.get_terminal_size().columns
    return shutil.get_terminal_size().columns
