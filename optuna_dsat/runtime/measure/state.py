"""Where a rank is in its steps, and who observes them."""

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
    """Global steps completed, without those that the loss scaler skipped."""
    skipped: int = 0
    """Global steps that the loss scaler skipped."""
    steps_completed: int | None = None
    """Batches completed as the script counts them around its current step; None if it does not say."""
    device: str = ""
    """``cuda`` or ``cpu``; empty before DeepSpeed was imported."""
    limited: bool = False
    """Whether this rank's host memory is limited."""
    takes_local_rank: bool = False
    """Whether the script has an option ``--local_rank``."""
    starts_ranks: bool = False
    """Whether the script starts its ranks by ``torch.multiprocessing``; one of them runs here then."""
    joins_ranks: bool = False
    """Whether the runtime gave accelerate the backend without which each rank trains alone."""
    config_option: str = ""
    """The script's option for its DeepSpeed config whose default is the launch's; empty if there is none."""
    config_read: bool | None = None
    """Whether the launch's config was read by its own name; False by the user's alone, None not at all."""
    fed: int = 0
    """Inputs that the engine, or its module, was fed in training."""
    fed_size: int = 0
    """Samples of the largest of them."""
    fed_from: Sequence[Place] = ()
    """Places of the user's code that led to the first of them, the innermost first."""

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
        """Called after a step that the loss scaler skipped: the next one has its number."""
        ...
