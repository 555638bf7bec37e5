"""Metrics averaged over a period and over ranks, custom metrics (reducers), and their output as JSON lines."""

from __future__ import annotations

import json
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from optuna_dsat.integrations.deepspeed_trial.checkpoints import STEPS_COMPLETED
from optuna_dsat.integrations.deepspeed_trial.ranks import DistributedContext
from optuna_dsat.runtime.files import write_text_atomic


class MetricReducer(ABC):
    """Collects values on every rank and reduces them over the ranks."""

    @abstractmethod
    def reset(self) -> None:
        """Discard collected values; called before each training period and each validation."""

    @abstractmethod
    def per_slot_reduce(self) -> Any:
        """Return the values collected on this rank, as a picklable object."""

    @abstractmethod
    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> Any:
        """Return the metric over all ranks.

        Args:
            per_slot_metrics: Results of ``per_slot_reduce`` on each reporting rank, ordered by rank.
        """


class FunctionReducer(MetricReducer):
    """Applies a function to the list of values collected on all ranks."""

    def __init__(self, function: Callable[[list[Any]], Any]) -> None:
        self._function = function
        self._values: list[Any] = []

    def update(self, value: Any) -> None:
        """Add a value."""
        self._values.append(value.detach() if hasattr(value, "detach") else value)

    def reset(self) -> None:
        """Discard the values."""
        self._values = []

    def per_slot_reduce(self) -> list[Any]:
        """Return the values, with tensors moved to the CPU."""
        return [value.cpu() if hasattr(value, "cpu") else value for value in self._values]

    def cross_slot_reduce(self, per_slot_metrics: list[list[Any]]) -> Any:
        """Return the function's result for the values of all ranks."""
        return self._function([value for values in per_slot_metrics for value in values])


@dataclass(frozen=True)
class RegisteredReducer:
    """A reducer with its settings."""

    reducer: MetricReducer
    name: str | None
    """Name of its metric; None if it returns a mapping of metrics."""
    for_training: bool
    for_validation: bool

    def serves(self, *, training: bool) -> bool:
        """Return whether it is applied in training or, if ``training`` is False, in validation."""
        return self.for_training if training else self.for_validation

    def reduced(self, per_slot: list[Any]) -> Mapping[str, Any]:
        """Return name -> metric, from the results of ``per_slot_reduce`` on each reporting rank."""
        value = self.reducer.cross_slot_reduce(per_slot)
        if self.name is not None:
            return {self.name: value}
        if not isinstance(value, Mapping):
            raise TypeError(f"A reducer that is wrapped without a name returns metrics by name; got {value!r}.")
        return value


def by_name(metrics: Any, *, where: str) -> Mapping[str, Any]:
    """Return metrics of a model definition by name; a single tensor is the metric ``loss``.

    Raises:
        TypeError: If ``metrics`` is neither a mapping nor a tensor.
    """
    named = {"loss": metrics} if isinstance(metrics, torch.Tensor) else metrics
    if not isinstance(named, Mapping):
        raise TypeError(f"{where} returns metrics by name; got {type(metrics).__name__}.")
    return named


class Averages:
    """Weighted sums of metrics on a rank; the device is not synchronized until they are read."""

    def __init__(self) -> None:
        self._sums: dict[str, Any] = {}
        self._weights: dict[str, float] = {}

    def add(self, metrics: Any, *, weight: float = 1.0, where: str) -> None:
        """Add metrics returned by the method ``where`` of a model definition.

        Raises:
            TypeError: If ``metrics`` is neither a mapping nor a tensor, or a value is neither a number nor a
                single-element tensor.
        """
        for name, value in by_name(metrics, where=where).items():
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


def reduced(
    averages: Averages, reducers: list[RegisteredReducer], ranks: DistributedContext, *, reports: bool
) -> dict[str, Any]:
    """Return the metrics of a period, reduced over all reporting ranks; collective, every rank calls it."""
    local = (averages.read(), [registered.reducer.per_slot_reduce() for registered in reducers])
    everything = [share for share in ranks.allgather(local if reports else None) if share is not None]
    metrics: dict[str, Any] = {}
    for name in dict.fromkeys(name for sums, _ in everything for name in sums):
        shares = [sums[name] for sums, _ in everything if name in sums]
        metrics[name] = sum(value for value, _ in shares) / sum(weight for _, weight in shares)
    for index, registered in enumerate(reducers):
        metrics |= registered.reduced([per_slot[index] for _, per_slot in everything])
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
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # a tensor, a NumPy array or a NumPy scalar
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (str, int, float)) or value is None else str(value)


def _is_before(line: str, steps_completed: int) -> bool:
    try:
        return bool(json.loads(line)[STEPS_COMPLETED] <= steps_completed)
    except (ValueError, KeyError, TypeError):  # truncated when the process was killed
        return False
