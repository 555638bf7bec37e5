"""Metrics averaged over a period and over ranks, and their output as JSON lines."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from optuna_dsat.integrations.deepspeed_trial.checkpoints import steps_completed_of
from optuna_dsat.integrations.deepspeed_trial.reducers import RegisteredReducer, cross_reduced
from optuna_dsat.runtime.files import write_text_atomic

__all__ = ["Averages", "MetricsFile", "gathered", "reduced"]


def gathered(value: Any) -> list[Any]:
    """Return the values of all ranks, ordered by rank; collective, every rank calls it."""
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


class Averages:
    """Weighted sums of metrics on a rank; the device is not synchronized until they are read."""

    def __init__(self) -> None:
        self._sums: dict[str, Any] = {}
        self._weights: dict[str, float] = {}

    def add(self, metrics: Any, *, weight: float = 1.0, where: str) -> None:
        """Add metrics returned by a model definition.

        Args:
            metrics: Mapping of name -> value; a single tensor is the metric ``loss``.
            weight: Weight of the values in the average.
            where: Name of the method that returned them, for error messages.

        Raises:
            TypeError: If ``metrics`` is neither a mapping nor a tensor, or a value is neither a number nor a
                single-element tensor.
        """
        named = {"loss": metrics} if isinstance(metrics, torch.Tensor) else metrics
        if not isinstance(named, Mapping):
            raise TypeError(f"{where} returns metrics by name; got {type(metrics).__name__}.")
        for name, value in named.items():
            number = _number(value)
            if number is None:
                raise TypeError(f"{where} returns numbers or tensors of one element; {name!r} is {value!r}.")
            self._sums[name] = self._sums.get(name, 0.0) + number * weight
            self._weights[name] = self._weights.get(name, 0.0) + weight

    def read(self) -> dict[str, tuple[float, float]]:
        """Return name -> (weighted sum, total weight), and reset."""
        read = {name: (float(value), self._weights[name]) for name, value in self._sums.items()}
        self._sums, self._weights = {}, {}
        return read


def reduced(averages: Averages, reducers: list[RegisteredReducer], *, training: bool, reports: bool) -> dict[str, Any]:
    """Return the metrics of a period, reduced over all reporting ranks; collective, every rank calls it.

    Args:
        averages: Metrics of this rank; reset by the call.
        reducers: All registered reducers; only reducers for the kind of period are applied.
        training: Whether the period is a training period, else a validation.
        reports: Whether to include this rank's metrics.
    """
    serving = [registered for registered in reducers if registered.serves(training=training)]
    own = (averages.read(), [registered.reducer.per_slot_reduce() for registered in serving])
    everything = [share for share in gathered(own if reports else None) if share is not None]
    metrics: dict[str, Any] = {}
    for name in dict.fromkeys(name for sums, _ in everything for name in sums):
        shares = [sums[name] for sums, _ in everything if name in sums]
        metrics[name] = sum(value for value, _ in shares) / sum(weight for _, weight in shares)
    for index, registered in enumerate(serving):
        metrics |= cross_reduced(registered, [per_slot[index] for _, per_slot in everything])
    return {name: _plain(value) for name, value in metrics.items()}


class MetricsFile:
    """Prints records as JSON lines and appends them to a file.

    Args:
        path: The file; None to print only.
        steps_completed: Completed global batches at the start of training; a previous run's later records are removed.
    """

    def __init__(self, path: Path | None, *, steps_completed: int) -> None:
        self._path = path
        if path is not None and path.exists():
            kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _is_before(line, steps_completed)]
            write_text_atomic(path, "".join(f"{line}\n" for line in kept))

    def write(self, record: Mapping[str, Any]) -> None:
        """Write a record."""
        line = json.dumps(record)
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")


def _number(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().double().reshape(()) if value.numel() == 1 else None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _plain(value: Any) -> Any:
    """Return a metric as JSON values; non-finite numbers become text, such as ``nan``."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # a tensor, a NumPy array or a NumPy scalar
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)


def _is_before(line: str, steps_completed: int) -> bool:
    try:
        return steps_completed_of(json.loads(line)) <= steps_completed
    except (ValueError, KeyError, TypeError):  # truncated when the process was killed
        return False
