"""What became of a launch."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Outcome"]


class Outcome(StrEnum):
    """What became of a launch. The value is what is stored and shown."""

    MEASURED = "measured"
    """All profile steps were run; the metric is the trial's value."""
    OUT_OF_MEMORY = "out_of_memory"
    """The device (or a CPU rank's limit) had too little memory: knowledge, not a failure."""
    HOST_OUT_OF_MEMORY = "host_out_of_memory"
    """The host had too little memory (offload, pinned buffers, or the kernel's OOM killer)."""
    OUT_OF_DATA = "out_of_data"
    """The script ended by itself before the last profile step: too little data for steps of this batch."""
    INVALID_CONFIG = "invalid_config"
    """DeepSpeed refused the configuration, or the script did not follow it (observed batch differs)."""
    SCRIPT_ERROR = "script_error"
    """The script raised for a reason of its own, or left without training."""
    COMMUNICATION_ERROR = "communication_error"
    """Rendezvous, NCCL or gloo failed and no rank had a cause of its own."""
    STALLED = "stalled"
    """No sign of life from any rank for longer than ``--stall-timeout``."""
    TIMEOUT = "timeout"
    """The launch took longer than ``--trial-timeout``."""
    PRUNED = "pruned"
    """Stopped in flight by the pruner (or returned to the study by the user)."""
    LOST = "lost"
    """Its worker died."""

    @property
    def infeasible(self) -> bool:
        """Whether the configuration did not fit in memory: never retried, samplers learn from it."""
        return self in (Outcome.OUT_OF_MEMORY, Outcome.HOST_OUT_OF_MEMORY)

    @property
    def retryable(self) -> bool:
        """Whether the same configuration may succeed when launched again (up to ``--max-retries``)."""
        return self in (Outcome.COMMUNICATION_ERROR, Outcome.STALLED, Outcome.TIMEOUT)
