"""A terminal for the tests: a pseudo-terminal with a process in it, and the process's output."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
PATIENCE_S = 300.0


class Terminal:
    """A process in a separate pseudo-terminal."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], *, width: int) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background jobs of a shell
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup
            os.execvpe(command[0], list(command), {**os.environ, **environ})
        self.written = ""
        self.resize(width)

    def resize(self, width: int) -> int:
        """Change the terminal's width; return the length of the output before."""
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
        return len(self.written)

    def press_ctrl_c(self) -> None:
        os.write(self._fd, b"\x03")

    def hang_up(self) -> int:
        """Close the terminal, like closing its window; return the exit code of the process."""
        os.close(self._fd)
        self._fd = -1
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        raise AssertionError("the process does not end with its terminal")

    def read(self, timeout_s: float = 0.2) -> bool:
        """Read available output; return whether the process may write more."""
        if not select.select([self._fd], [], [], timeout_s)[0]:
            return True
        try:
            got = os.read(self._fd, 65536)
        except OSError:
            return False  # Linux reports a closed other end like this
        self.written += got.decode(errors="replace")
        return bool(got)

    def wait_for(self, text: str, *, after: int = 0) -> int:
        """Read until a text appears; return the position after it."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.written[after:]:
            if not self.read() or time.monotonic() > deadline:
                raise AssertionError(f"{text!r} was not written:\n{self.plain()[-3000:]}")
        return self.written.index(text, after) + len(text)

    def wait(self) -> int:
        """Read to the end; return the exit code."""
        deadline = time.monotonic() + PATIENCE_S
        while self.read():
            if time.monotonic() > deadline:
                raise AssertionError(f"the process does not end:\n{self.plain()[-3000:]}")
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.pid = 0
        return code

    def plain(self, start: int = 0) -> str:
        """Return the output without control sequences."""
        return CONTROL.sub("", self.written[start:])

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        if self._fd >= 0:
            os.close(self._fd)


@contextmanager
def terminal(command: Sequence[str], *, width: int = 120, **environ: str) -> Iterator[Terminal]:
    """Start a command in a terminal; end it at the end of the block."""
    made = Terminal(command, {"TERM": "xterm-256color", "COLUMNS": "", "LINES": "", **environ}, width=width)
    try:
        yield made
    finally:
        made.close()
