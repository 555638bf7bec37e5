"""Observations of an ended launch, from which its outcome is decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.events import (
    Event,
)


@dataclass(frozen=True, kw_only=True)
class StopReason:
    """Outcome and message of a launch that the launcher ended itself."""

    outcome: Outcome
    message: str


@dataclass(frozen=True, kw_only=True)
class EndFacts:
    """Facts of a launch's processes, known once all of them are gone."""

    exit_codes: Mapping[int, int] = field(default_factory=dict)
    """Rank -> exit code (negative: signal) of the ranks that torchrun saw fail and the launcher did not kill."""
    agent_exit_code: int | None = None
    """Exit code of torchrun (negative: signal); None if the launcher ended it."""
    oom_kills: int | None = None
    """Processes that the kernel killed for lack of memory during the launch; None if unknown."""
    shared_memory_free: int | None = None
    """Free bytes in shared memory; None if unknown."""


@dataclass(frozen=True, kw_only=True)
class LaunchFacts(EndFacts):
    """Observations of an ended launch."""

    slots: int
    end_profile_step: int
    start_profile_step: int
    micro_batch: int | None
    """Configured ``train_micro_batch_size_per_gpu``; None if not configured."""
    events: Mapping[int, Sequence[Event]]
    """Rank -> events in the order written."""
    stop: StopReason | None = None
    """None if the launcher did not end the launch."""
    config_path: str = "ds_config.json"
    """Path of the user's DeepSpeed config, for the remedy in messages."""
    dropped_lines: int = 0
    """Lines of the event files without an event that this version can read."""
