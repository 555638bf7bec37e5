"""Metrics that are no averages: what all ranks saw, made into one value."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["FunctionReducer", "MetricReducer", "RegisteredReducer", "cross_reduced"]


class MetricReducer(ABC):
    """Collects on every rank, then makes what the ranks collected into one value."""

    @abstractmethod
    def reset(self) -> None:
        """Forget what was collected; called before each period of training and each validation."""

    @abstractmethod
    def per_slot_reduce(self) -> Any:
        """Return what this rank collected, as something that can be pickled."""

    @abstractmethod
    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> Any:
        """Return the metric.

        Args:
            per_slot_metrics: What ``per_slot_reduce`` returned on each rank that reports, in the order of ranks.
        """


class FunctionReducer(MetricReducer):
    """Collects values; the function gets those of all ranks as one list.

    Args:
        function: Makes the list into the metric.
    """

    def __init__(self, function: Callable[[list[Any]], Any]) -> None:
        self._function = function
        self._values: list[Any] = []

    def update(self, value: Any) -> None:
        """Collect a value."""
        self._values.append(value.detach() if hasattr(value, "detach") else value)

    def reset(self) -> None:
        """Forget the values."""
        self._values = []

    def per_slot_reduce(self) -> list[Any]:
        """Return the values, tensors on the CPU."""
        return [value.cpu() if hasattr(value, "cpu") else value for value in self._values]

    def cross_slot_reduce(self, per_slot_metrics: list[list[Any]]) -> Any:
        """Return the function of all values."""
        return self._function([value for values in per_slot_metrics for value in values])


@dataclass(frozen=True, kw_only=True)
class RegisteredReducer:
    """A reducer and what it is for."""

    reducer: MetricReducer
    name: str | None
    """Name of its metric; None where it returns several by name."""
    for_training: bool
    for_validation: bool

    def serves(self, *, training: bool) -> bool:
        """Return whether it takes part in training or in validation."""
        return self.for_training if training else self.for_validation


def cross_reduced(registered: RegisteredReducer, per_slot: list[Any]) -> dict[str, Any]:
    """Return the metrics of a reducer by name.

    Raises:
        TypeError: If a reducer without a name returns no mapping.
    """
    value = registered.reducer.cross_slot_reduce(per_slot)
    if registered.name is not None:
        return {registered.name: value}
    if not isinstance(value, Mapping):
        raise TypeError(f"A reducer that is wrapped without a name returns metrics by name; got {value!r}.")
    return dict(value)
