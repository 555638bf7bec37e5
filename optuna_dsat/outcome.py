"""Outcomes of launches."""

from __future__ import annotations

from enum import Enum


class Outcome(str, Enum):
    """Outcome of a launch; its value is stored and shown."""

    __str__ = str.__str__

    MEASURED = "measured"
    """All profile steps ran; the metric is the trial's value."""
    OUT_OF_MEMORY = "out_of_memory"
    """The device (or a CPU rank's limit) had too little memory: a result, not a failure."""
    HOST_OUT_OF_MEMORY = "host_out_of_memory"
    """The host had too little memory (offload, pinned buffers, or the kernel's OOM killer)."""
    OUT_OF_DATA = "out_of_data"
    """The script ended by itself before the last profile step: too little data for this batch size."""
    INVALID_CONFIG = "invalid_config"
    """DeepSpeed refused the configuration, or the script did not apply it (observed batch differs)."""
    SCRIPT_ERROR = "script_error"
    """The script raised an error of its own, or exited without training."""
    COMMUNICATION_ERROR = "communication_error"
    """Rendezvous, NCCL or gloo failed, and no rank reported another cause."""
    STALLED = "stalled"
    """No sign of life from any rank for longer than ``--stall-timeout``, or for many steps while none moves."""
    TIMEOUT = "timeout"
    """The launch took longer than ``--trial-timeout``."""
    KILLED = "killed"
    """Something else on the machine ended a process of the launch by a signal: the script is not to blame."""
    PRUNED = "pruned"
    """Stopped in flight by the pruner, or returned to the study by the user."""
    LOST = "lost"
    """The worker that ran the launch died."""

    @property
    def infeasible(self) -> bool:
        """Whether the configuration did not fit in memory; it is never retried, and samplers use the result."""
        return self in (Outcome.OUT_OF_MEMORY, Outcome.HOST_OUT_OF_MEMORY)

    @property
    def retryable(self) -> bool:
        """Whether the same configuration may succeed when launched again (``study.tuner`` says how often)."""
        return self in (Outcome.COMMUNICATION_ERROR, Outcome.TIMEOUT, Outcome.KILLED)
