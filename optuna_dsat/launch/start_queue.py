"""Launches accepted before their slots are free: those of settled launches whose processes still end."""

from __future__ import annotations

from collections.abc import Iterator

from optuna_dsat.launch.protocol import LaunchReport, LaunchRequest, SlotsBusyError
from optuna_dsat.launch.reports import report_of_unstarted
from optuna_dsat.launch.run_directory import RunDirectory
from optuna_dsat.launch.slots import SlotLease, SlotPool
from optuna_dsat.outcome import Outcome

__all__ = ["StartQueue"]


class StartQueue:
    """Requests in the order of their arrival, each with its run directory written."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[LaunchRequest, RunDirectory]] = {}
        self._stopped: list[LaunchReport] = []

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the waiting launches."""
        return tuple(self._waiting)

    @property
    def slots(self) -> int:
        """Slots that the waiting launches need."""
        return sum(request.slots for request, _ in self._waiting.values())

    def add(self, request: LaunchRequest, directory: RunDirectory) -> None:
        """Append a launch."""
        self._waiting[request.launch_id] = (request, directory)

    def take_startable(self, pool: SlotPool) -> Iterator[tuple[SlotLease, LaunchRequest, RunDirectory]]:
        """Remove and yield launches with the slots taken for them, until too few slots are free."""
        for request, directory in list(self._waiting.values()):
            try:
                lease = pool.take(request.slots)
            except SlotsBusyError:
                return
            del self._waiting[request.launch_id]
            yield lease, request, directory

    def stop(self, launch_id: str, *, outcome: Outcome, message: str) -> None:
        """Remove a launch if it waits; its report is among those of ``take_stopped``."""
        if launch_id in self._waiting:
            request, directory = self._waiting.pop(launch_id)
            self._stopped.append(report_of_unstarted(request, directory, outcome, message))

    def take_stopped(self) -> list[LaunchReport]:
        """Return the reports of launches stopped since the last call."""
        stopped, self._stopped = self._stopped, []
        return stopped

    def clear(self) -> None:
        """Forget all waiting launches."""
        self._waiting.clear()
