"""State of a rank's training steps, and the interface of their observers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from optuna_dsat.runtime.measure.engine import (
    MOST_SKIPPED_STEPS,
)
from optuna_dsat.runtime.user_code import Place

__all__ = []


@dataclass
class RankState:
    """Current state of this rank; updated by hook and meter, read when the rank fails."""

    phase: str = "script"
    """See ``RankFailed.phase``."""
    steps: int = 0
    """Global steps completed, without steps that the loss scaler skipped."""
    skipped: int = 0
    """Global steps that the loss scaler skipped."""
    steps_completed: int | None = None
    """Batches completed, as counted by the script around its current step; None if not reported."""
    device: str = ""
    """``cuda`` or ``cpu``; empty before DeepSpeed was imported."""
    limited: bool = False
    """Whether this rank's host memory is limited."""
    takes_local_rank: bool = False
    """Whether the script has an option ``--local_rank``."""
    starts_ranks: bool = False
    """Whether the script spawns its ranks with ``torch.multiprocessing``; this process then runs one of them."""
    joins_ranks: bool = False
    """Whether the runtime set accelerate's backend; without a backend, each rank would train alone."""
    config_option: str = ""
    """The script's option for its DeepSpeed config whose default was set to the launch's; empty if not found."""
    config_read: bool | None = None
    """Whether the launch's config was read by its own path; False if only by the user's path, None if not read."""
    fed: int = 0
    """Number of training inputs of the engine or its module."""
    fed_size: int = 0
    """Samples of the largest input."""
    fed_from: Sequence[Place] = ()
    """Places in the user's code that led to the first input, innermost first."""

    def has_measured(self, last_step: int) -> bool:
        """Return whether a launch up to ``last_step`` ends here."""
        return self.steps >= last_step or self.skipped >= MOST_SKIPPED_STEPS


class StepObserver(Protocol):
    """Observes the phases of steps (implemented by the profiler)."""

    def observe(self, phase: str, step: int) -> Any:
        """Return a context manager around a phase (``forward``, ``backward``, ``step``, ``batch``) of a step."""
        ...

    def boundary(self, step: int, samples: int) -> None:
        """Called after a step was measured and recorded."""
        ...

    def discard(self) -> None:
        """Called after a step that the loss scaler skipped; the next step has the same number."""
        ...
