"""Validation of engines, and default data of pipeline engines."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from optuna_dsat.runtime.measure.engine import is_pipeline

__all__ = ["check_engine", "feed_pipeline"]


def check_engine(engine: Any, *, measuring: bool) -> None:
    """Reject configurations that DeepSpeed does not support or silently ignores.

    Verified with DeepSpeed 0.19: pipelines run with ZeRO 0 and 1; the optimizer is offloaded to the CPU at ZeRO 1 to
    3, to NVMe only at ZeRO 3.

    Args:
        engine: The first return value of ``deepspeed.initialize``.
        measuring: Whether this launch is part of a search. A search varies the ZeRO stage, so offloads that a stage
            does not use are then allowed.

    Raises:
        TypeError: If ``engine`` is not an engine.
        ValueError: If the configuration is not supported.
    """
    if not all(hasattr(engine, name) for name in ("train_batch_size", "zero_optimization_stage", "module")):
        raise TypeError(f"wrap_model_engine takes the engine that deepspeed.initialize returns first; got {engine!r}.")
    stage = int(engine.zero_optimization_stage())
    if is_pipeline(engine) and stage > 1:
        raise ValueError(
            f"A pipeline runs with ZeRO 0 or 1, not {stage}: it accumulates whole gradients over its micro-batches, "
            "which higher stages partition."
        )
    if measuring:
        return
    param, optimizer = _device(engine.zero_offload_param()), _device(engine.zero_offload_optimizer())
    if param != "none" and stage != 3:
        raise ValueError(
            f"offload_param is for ZeRO 3, not {stage}: only there are parameters partitioned, and DeepSpeed would "
            "keep them on the device without a word."
        )
    if optimizer != "none" and stage == 0:
        raise ValueError(
            "offload_optimizer is for ZeRO 1, 2 and 3: without ZeRO there is no optimizer of DeepSpeed's to offload."
        )
    if optimizer == "nvme" and stage != 3:
        raise ValueError(
            f"offload_optimizer to NVMe is for ZeRO 3, not {stage}: ZeRO 1 and 2 offload to the CPU alone."
        )


def feed_pipeline(engine: Any, batches: Callable[[], Iterator[Any] | None]) -> None:
    """Make ``train_batch()`` and ``eval_batch()`` of a pipeline engine read the trial's data unless given an iterator.

    Args:
        engine: A pipeline engine; its methods are wrapped on the instance.
        batches: Returns the iterator of the current phase (training or validation).
    """
    train, evaluate = engine.train_batch, engine.eval_batch

    @functools.wraps(train)
    def train_batch(data_iter: Iterator[Any] | None = None) -> Any:
        return train(batches() if data_iter is None else data_iter)

    @functools.wraps(evaluate)
    def eval_batch(data_iter: Iterator[Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        return evaluate(batches() if data_iter is None else data_iter, *args, **kwargs)

    engine.train_batch, engine.eval_batch = train_batch, eval_batch


def _device(offload: Any) -> str:
    device = getattr(offload, "device", None)
    return "none" if device is None else str(getattr(device, "value", device))
