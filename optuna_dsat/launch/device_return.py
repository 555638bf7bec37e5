"""Devices of launches whose processes are gone, given back once they are measurably free."""

from __future__ import annotations

import time
from collections.abc import Callable

from optuna_dsat.launch.nvml import DeviceError
from optuna_dsat.launch.running import RunningLaunch
from optuna_dsat.launch.slots import SlotPool

__all__ = ["DeviceReturn"]

_FREE_DEADLINE_S = 60.0
"""Longest time for a GPU's memory to be back after the last process is gone."""


class DeviceReturn:
    """Gives slots back to a pool; withholds those whose devices stay in use.

    Args:
        pool: The slots.
        clock: Monotonic time in seconds.
    """

    def __init__(self, pool: SlotPool, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool = pool
        self._clock = clock
        self._withheld: list[RunningLaunch] = []

    def release(self, launch: RunningLaunch, *, gone_at: float) -> str | None:
        """Give back the slots of a launch, or withhold them once its devices are overdue.

        Args:
            launch: A launch without living processes.
            gone_at: When its last process was seen to be gone, monotonic.

        Returns:
            What a report adds about the devices, empty if they are free; None while they may still become free.
        """
        if self._pool.is_free(launch.lease, launch.known):
            self._pool.give_back(launch.lease)
            return ""
        if self._clock() - gone_at < _FREE_DEADLINE_S:
            return None
        self._withheld.append(launch)
        return f" (not free after {_FREE_DEADLINE_S:g} s: {self._pool.describe_use(launch.lease)})"

    def recheck(self) -> None:
        """Give back the withheld slots whose devices have become free."""
        for launch in list(self._withheld):
            if self._pool.is_free(launch.lease, launch.known):
                self._withheld.remove(launch)
                self._pool.give_back(launch.lease)

    def check(self) -> None:
        """Recheck the withheld slots.

        Raises:
            DeviceError: If some devices are still not free.
        """
        self.recheck()
        if self._withheld:
            launch = self._withheld[0]
            raise DeviceError(
                f"The devices of {launch.request.launch_id} are not free although all its processes are gone "
                f"({self._pool.describe_use(launch.lease)}). See what holds them with nvidia-smi, then resume."
            )

    def close(self) -> None:
        """Give back all withheld slots."""
        for launch in self._withheld:
            self._pool.give_back(launch.lease)
        self._withheld.clear()
