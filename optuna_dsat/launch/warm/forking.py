"""Decide whether launches are forked from a warm process: with all modules imported, with fewer, or not at all.

A forked launch may fail just because of the fork, for example if an imported module has touched CUDA. Until a forked
launch has trained, failures are repeated by plain torchrun. If the repetition trains, the next launches are forked with
fewer modules imported, or not at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from optuna_dsat.launch.classify import Verdict
from optuna_dsat.launch.launch import FailedFork, RunningLaunch
from optuna_dsat.launch.protocol import Preload
from optuna_dsat.launch.warm.server import WarmAgent, WarmLaunches, WarmOrder, WarmUnavailableError
from optuna_dsat.outcome import Outcome

__all__ = ["IMPORTING", "Forking"]

IMPORTING = "importing torch, DeepSpeed and what the script imports"
"""Phase shown while the first forked launch waits for imports."""

_POSSIBLY_BY_FORKING = frozenset(
    {
        Outcome.COMMUNICATION_ERROR,
        Outcome.INVALID_CONFIG,  # errors in deepspeed.initialize, including CUDA's rejection of a fork
        Outcome.SCRIPT_ERROR,
        Outcome.STALLED,
        Outcome.TIMEOUT,
    }
)
"""Outcomes of a forked launch that the fork may have caused."""


class Forking:
    """Forks launches as long as that works.

    Args:
        log: File for the output of the imports.
        enabled: Whether to fork at all.
        on_notice: Called when launches will be forked differently, or no longer.
        on_phase: Called with a description of the wait, and with an empty string at its end.
    """

    def __init__(
        self,
        log: Path,
        *,
        enabled: bool,
        on_notice: Callable[[str], None],
        on_phase: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._warm = WarmLaunches(log)
        self._enabled = enabled
        self._notify = on_notice
        self._on_phase = on_phase

    @property
    def enabled(self) -> bool:
        """Whether the next launch is forked if possible."""
        return self._enabled

    @property
    def preload(self) -> Preload:
        """Modules imported in forked launches."""
        return self._warm.preload

    def prepare(self, preload: Preload) -> None:
        """Set the modules to import before a fork."""
        if self._enabled:
            with self._plain_if_unavailable():
                self._warm.prepare(preload)

    def begin(self, environ: Mapping[str, str]) -> None:
        """Start the imports for launches in ``environ``, unless already started; does not wait."""
        if self._enabled:
            with self._plain_if_unavailable():
                self._warm.begin(environ)

    @property
    def is_ready(self) -> bool:
        """Whether ``start`` would not wait for imports."""
        return not self._enabled or self._warm.is_ready

    def start(self, order: WarmOrder) -> WarmAgent | None:
        """Fork a launch; return its agent, or None if it must be started by plain torchrun."""
        if self._enabled:
            with self._plain_if_unavailable(), self._while_importing():
                return self._warm.start(order)
        return None

    @contextlib.contextmanager
    def _while_importing(self) -> Iterator[None]:
        if not self._warm.is_importing:
            yield
            return
        self._on_phase(IMPORTING)
        try:
            yield
        finally:
            self._on_phase("")

    @contextlib.contextmanager
    def _plain_if_unavailable(self) -> Iterator[None]:
        try:
            yield
        except WarmUnavailableError as error:
            self._notify(f"Launches run by plain torchrun, which takes seconds longer for each: {error}.")

    def may_repeat(self, launch: RunningLaunch) -> bool:
        """Return whether the launch may be repeated plainly, or is a repetition. Its outcome is known at its end."""
        return launch.repeats is not None or (self._is_unproven(launch) and not launch.has_trained)

    def _is_unproven(self, launch: RunningLaunch) -> bool:
        """Return whether the launch was forked and no launch with the same modules imported has trained yet."""
        return self._enabled and launch.preloaded is not None and not self._warm.has_proven(launch.preloaded)

    def learn_from(self, launch: RunningLaunch) -> None:
        """Learn from a forked launch whether forks work here."""
        if launch.preloaded is None or not self._enabled:
            return
        if not launch.is_forked:
            self._stop(
                "Something imported before a fork initialises CUDA in torchrun's agent, which no fork survives: all "
                "launches run by plain torchrun, which takes seconds longer for each."
            )
        elif launch.has_trained:
            self.prove(launch.preloaded)

    def prove(self, preload: Preload) -> None:
        """Record that a forked launch with these modules imported has trained."""
        self._warm.prove(preload)

    def suspect(self, launch: RunningLaunch, verdict: Verdict) -> FailedFork | None:
        """Return the failure if the fork may be its cause: neither this launch nor one forked like it has trained."""
        self.learn_from(launch)
        if launch.repeats is not None and launch.has_trained and self._enabled:
            self.retreat(launch.repeats)
        if launch.preloaded is None or not self._is_unproven(launch) or launch.has_trained:
            return None
        if verdict.outcome not in _POSSIBLY_BY_FORKING:
            return None
        return FailedFork(preloaded=launch.preloaded, message=verdict.message)

    def retreat(self, failed: FailedFork) -> None:
        """Import fewer modules before a fork, namely those proven to work, or stop forking."""
        if failed.preloaded != self._warm.preload:
            return  # a concurrent launch failed in the same way and was handled
        why = failed.message
        if self._warm.retreat():
            self._notify(
                "A launch failed when forked with all that your script imports ready, and trains by plain torchrun: "
                f"each imports that for itself from here on, as the profile launch did. Forked, it ended with: {why}"
            )
            return
        self._stop(
            "The first launch failed when forked from a warm process and trains by plain torchrun: all run plainly, "
            f"which takes seconds longer for each. Forked, it ended with: {why}"
        )

    def _stop(self, notice: str) -> None:
        self._warm.retire()
        self._enabled = False
        self._notify(notice)

    def close(self) -> None:
        """End the warm process and all launches forked from it."""
        self._warm.close()
