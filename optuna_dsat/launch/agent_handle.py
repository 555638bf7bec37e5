"""Handle of a launch's root process, torchrun: started or forked."""

from __future__ import annotations

from typing import Protocol

__all__ = ["AgentHandle"]


class AgentHandle(Protocol):
    """A running torchrun; ``subprocess.Popen`` is one."""

    @property
    def pid(self) -> int:
        """Process number."""
        ...

    @property
    def returncode(self) -> int | None:
        """Exit code (negative: signal) at the last ``poll`` or ``wait``; None if it was running."""
        ...

    def poll(self) -> int | None:
        """Check whether it has ended; return the exit code, None while it runs."""
        ...

    def wait(self) -> int:
        """Wait for its end and return the exit code."""
        ...
