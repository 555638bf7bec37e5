"""Tells when launches compile operators: what compiles on first use is not known before."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from optuna_dsat.launch.build_locks import held_locks
from optuna_dsat.launch.built_operators import BUILDING

__all__ = ["BuildWatch"]

_LOOK_S = 1.0
"""Pause between two looks."""


class BuildWatch:
    """Looks for builds in torch's folder of compiled extensions.

    Args:
        environ: Environment of the launches.
        on_phase: Called with what is built, and with nothing once it is over.
        clock: Monotonic time in seconds.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        *,
        on_phase: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._environ = environ
        self._on_phase = on_phase
        self._clock = clock
        self._looked = float("-inf")
        self._told = ""

    def check(self) -> None:
        """Look now and then; call it while launches run."""
        if self._clock() - self._looked < _LOOK_S:
            return
        self._looked = self._clock()
        self._tell(", ".join(sorted({lock.parent.name for lock in held_locks(self._environ)})))

    def end(self) -> None:
        """Note that no launch runs."""
        self._tell("")

    def _tell(self, names: str) -> None:
        if names != self._told:
            self._told = names
            self._on_phase(BUILDING.format(names) if names else "")
