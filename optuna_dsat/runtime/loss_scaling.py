"""Steps that a loss scaler skipped: gradients were not finite, and no parameter was updated."""

from __future__ import annotations

from typing import Any

__all__ = ["MOST_SKIPPED_STEPS", "SkipDetector"]

MOST_SKIPPED_STEPS = 33
"""Skipped steps after which a launch goes on no longer: from 2^32, the largest initial scale that DeepSpeed's defaults
have had, a scaler with a hysteresis of 2 needs 33 to arrive at 1."""


class SkipDetector:
    """Tells whether the engine's last update was skipped.

    DeepSpeed counts the steps that its own scaler skipped (fp16, and non-finite gradients with bf16); at ZeRO 0 with
    ``torch_autocast`` the scaler is torch's, which lowers its scale whenever it skips.

    Args:
        engine: What ``deepspeed.initialize`` returned.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._counted = self._count()
        self._scale = self._torch_scale()

    def skipped(self, *, by_script: bool) -> bool:
        """Return whether the update that has just ended was skipped; called once per update.

        Args:
            by_script: Whether the script stepped the optimizer itself, which the engine then does not count.
        """
        counted, self._counted = self._counted, self._count()
        scale, self._scale = self._scale, self._torch_scale()
        if by_script:
            return bool(getattr(self._engine.optimizer, "overflow", False))
        return self._counted > counted or self._scale < scale

    def _count(self) -> int:
        count = getattr(self._engine, "skipped_steps", 0)
        return count if isinstance(count, int) else 0

    def _torch_scale(self) -> float:
        scaler = getattr(self._engine, "torch_autocast_z0_gradscaler", None)
        return 0.0 if scaler is None else float(scaler.get_scale())
