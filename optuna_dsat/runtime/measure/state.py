"""State of a rank's training steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from optuna_dsat.runtime.measure.engine import MOST_SKIPPED_STEPS
from optuna_dsat.runtime.user_code import Place

__all__ = ["RankState"]


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
    script_facts: dict[str, Any] = field(default_factory=dict)
    """Fields of ``EngineReady`` with what the runtime has found out about the script."""
    fed: int = 0
    """Number of training inputs of the engine or its module."""
    fed_size: int = 0
    """Samples of the largest input."""
    fed_from: Sequence[Place] = ()
    """Places in the user's code that led to the first input, innermost first."""

    def has_measured(self, last_step: int) -> bool:
        """Return whether a launch up to ``last_step`` ends here."""
        return self.steps >= last_step or self.skipped >= MOST_SKIPPED_STEPS
