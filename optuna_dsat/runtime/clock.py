"""Clocks of a step: the host's, and the device's own where work runs asynchronously."""

from __future__ import annotations

import time
from typing import Any, Protocol

__all__ = ["Clock", "DeviceClock", "HostClock"]


class Clock(Protocol):
    """Measures the phases of a step."""

    def synchronize(self) -> None:
        """Wait until the device has done all it was given."""
        ...

    def now(self) -> float:
        """Return the host's monotonic time in seconds."""
        ...

    def mark(self) -> Any:
        """Return a mark of this moment in the device's own order of work; costs no waiting."""
        ...

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks; only after ``synchronize``."""
        ...


class HostClock:
    """For devices that work synchronously: the CPU."""

    def synchronize(self) -> None:
        """Nothing is pending."""

    def now(self) -> float:
        """Return the host's monotonic time in seconds."""
        return time.perf_counter()

    def mark(self) -> float:
        """Return the present time."""
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        """Return the seconds between two marks."""
        return end - start


class DeviceClock:
    """For devices that work asynchronously: phases are timed by events on the device's current stream.

    Waiting at the end of every phase would keep the host from running ahead, and so change what is measured;
    events do not. The device is waited for once a step, at its boundary.

    Args:
        accelerator: DeepSpeed's accelerator of this rank.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def synchronize(self) -> None:
        """Wait for the device."""
        self._accelerator.synchronize()

    def now(self) -> float:
        """Return the host's monotonic time in seconds."""
        return time.perf_counter()

    def mark(self) -> Any:
        """Record an event on the current stream."""
        event = self._accelerator.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Return the device's seconds between two events."""
        return float(start.elapsed_time(end)) / 1000.0
