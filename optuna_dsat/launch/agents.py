"""The process at the root of a launch, torchrun, however it was started."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Agent"]


class Agent(Protocol):
    """A running torchrun; what ``subprocess.Popen`` offers of it."""

    @property
    def pid(self) -> int:
        """Process number."""
        ...

    @property
    def returncode(self) -> int | None:
        """Exit code (negative: signal) as the last ``poll`` or ``wait`` saw it, None while it ran."""
        ...

    def poll(self) -> int | None:
        """Look whether it has ended; return the exit code, None while it runs."""
        ...

    def wait(self) -> int:
        """Wait for its end and return the exit code."""
        ...
