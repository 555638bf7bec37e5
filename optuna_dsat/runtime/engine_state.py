"""What a DeepSpeed engine, and what it returns, says of itself."""

from __future__ import annotations

from typing import Any

__all__ = ["global_steps", "is_pipeline", "is_update_step", "loss_of"]


def is_pipeline(engine: Any) -> bool:
    """Return whether an engine is a pipeline engine, whose ``train_batch`` runs a whole step."""
    return any(cls.__name__ == "PipelineEngine" for cls in type(engine).__mro__)


def global_steps(engine: Any) -> int | None:
    """Return the engine's own count of optimizer steps, with those of a loaded checkpoint; None if it keeps none."""
    count = getattr(engine, "global_steps", None)
    return count if isinstance(count, int) else None


def is_update_step(engine: Any) -> bool:
    """Return whether the next ``engine.step()`` updates the parameters."""
    managed = getattr(engine, "managed_gradient_accumulation", None)
    if managed is not None and not managed():
        return True  # the script accumulates gradients itself: every step() is an update
    return bool(engine.is_gradient_accumulation_boundary())


def loss_of(output: Any) -> Any:
    """Return the detached loss of a model's output (the output itself or its ``loss``); None if there is none."""
    loss = getattr(output, "loss", output)
    if hasattr(loss, "detach") and getattr(loss, "numel", lambda: 0)() == 1:
        return loss.detach()
    return None
