"""Clocks that time a training step: the host's, and the device's if it executes asynchronously."""

from __future__ import annotations

from time import perf_counter  # the function itself: a script may replace it in the module
from typing import Any


class Clock:
    """Clock of devices that execute synchronously (the CPU)."""

    def synchronize(self) -> None:
        """Wait until the device has completed all queued work."""

    def now(self) -> float:
        """Return the host's monotonic time in seconds."""
        return perf_counter()

    def mark(self) -> Any:
        """Return a timestamp in the device's work queue, without waiting for the device."""
        return perf_counter()

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks; valid only after ``synchronize``."""
        return float(end - start)


class DeviceClock(Clock):
    """Clock of devices that execute asynchronously: phases are timed by events on the device's current stream.

    Synchronizing after every phase would keep the host from running ahead and so change the measurement;
    events do not. The device is synchronized once per step, at the step boundary.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def synchronize(self) -> None:
        """Wait for the device."""
        self._accelerator.synchronize()

    def mark(self) -> Any:
        """Record an event on the current stream."""
        event = self._accelerator.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two events on the device."""
        return float(start.elapsed_time(end)) / 1000.0
