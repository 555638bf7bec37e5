"""Custom metrics: values collected on all ranks and reduced to a single result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["FunctionReducer", "MetricReducer", "RegisteredReducer", "cross_reduced"]


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
    """Applies a function to the values collected on all ranks.

    Args:
        function: Returns the metric, given the list of all values.
    """

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


@dataclass(frozen=True, kw_only=True)
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


def cross_reduced(registered: RegisteredReducer, per_slot: list[Any]) -> dict[str, Any]:
    """Return name -> metric of a reducer.

    Args:
        registered: The reducer.
        per_slot: Results of ``per_slot_reduce`` on each reporting rank, ordered by rank.

    Raises:
        TypeError: If a reducer without a name does not return a mapping.
    """
    value = registered.reducer.cross_slot_reduce(per_slot)
    if registered.name is not None:
        return {registered.name: value}
    if not isinstance(value, Mapping):
        raise TypeError(f"A reducer that is wrapped without a name returns metrics by name; got {value!r}.")
    return dict(value)
