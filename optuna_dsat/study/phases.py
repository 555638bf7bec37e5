"""The phases of a launch before its steps, by the events of its first rank."""

from __future__ import annotations

from optuna_dsat.runtime.events import EngineReady, Event, RankStarted

__all__ = ["phase_of"]


def phase_of(event: Event) -> str | None:
    """Return what a launch does from this event on; None if that is what it did before, or if it tells nothing."""
    if event.rank != 0:
        return None
    if isinstance(event, RankStarted):
        return "loading" if event.forked else "importing"
    return "first step" if isinstance(event, EngineReady) else None
