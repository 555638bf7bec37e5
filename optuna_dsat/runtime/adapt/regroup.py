"""Batches of another size than the script makes: of a loader's indices, joined and cut, or the same batch repeated.

The order of the samples is kept. The rest of an epoch that is smaller than a batch is left out, unless the size is
the loader's own.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any
from weakref import ref

from optuna_dsat.runtime.measure.inputs import contained, leading_dimension, tensors_of
from optuna_dsat.runtime.measure.live import NotLiveError


class RegroupedIndices:
    """The batches of indices of a data loader; ``scale`` returns the present ratio of their size to its sampler's.

    ``taken`` gets the number of indices of each batch when the data loader takes it.
    """

    def __init__(self, batches: Any, *, scale: Callable[[], Fraction], taken: Callable[[int], object]) -> None:
        self._batches = batches
        self._scale = scale
        self._taken = taken

    def __iter__(self) -> Iterator[Any]:
        for indices in self._regrouped():
            self._taken(len(indices))
            yield indices

    def _regrouped(self) -> Iterator[Any]:
        size, rest = 0, list[Any]()
        for indices in self._batches:
            size = max(size, len(indices))  # the last batch of an epoch may be smaller
            if self._scale() == 1 and not rest:
                yield indices
                continue
            rest += indices
            while len(rest) >= (wanted := max(1, int(size * self._scale()))):
                yield rest[:wanted]
                rest = rest[wanted:]

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


class RegroupedBatches:
    """The batches of a data loader whose dataset yields batches; ``scale`` returns the present ratio to their size.

    Raises:
        NotLiveError: In iteration, if batches cannot be joined.
    """

    def __init__(self, batches: Iterator[Any], *, scale: Callable[[], Fraction]) -> None:
        self._batches = batches
        self._scale = scale
        self._size = 0
        self._rest: Any = None
        """Samples joined so far, as a batch; None for none."""

    def __iter__(self) -> RegroupedBatches:
        return self

    def __next__(self) -> Any:
        while self._rest is None or self._samples(self._rest) < self._wanted:
            batch = next(self._batches)
            if self._scale() == 1 and self._rest is None:
                return batch
            self._size = max(self._size, self._samples(batch))
            self._rest = batch if self._rest is None else _joined([self._rest, batch])
        wanted, joined = self._wanted, self._rest
        self._rest = _cut(joined, wanted, None) if self._samples(joined) > wanted else None
        return _cut(joined, 0, wanted)

    @property
    def _wanted(self) -> int:
        return max(1, int(self._size * self._scale()))

    @staticmethod
    def _samples(batch: Any) -> int:
        size = leading_dimension(batch)
        if size is None:
            raise NotLiveError("the data loader's batches have no tensors")
        return size

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


class RepeatedInputs:
    """The inputs of an engine in the present batch size, if the script feeds the same tensors in every forward pass.

    As in benchmarks that make their inputs once: nothing but the model then depends on the batch, so a step takes the
    time that it takes in a launch of this size. If the script compares the output with labels outside of the model, it
    fails. ``scale`` returns the present ratio of the batch size to the script's.
    """

    def __init__(self, *, scale: Callable[[], Fraction]) -> None:
        self._scale = scale
        self._last: tuple[ref[Any], ...] = ()
        """Tensors of the last forward pass."""

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a forward pass."""
        torch: Any = sys.modules["torch"]
        tensors = [tensor for tensor in tensors_of((args, kwargs)) if isinstance(tensor, torch.Tensor)]
        last = [known() for known in self._last]
        self._last = tuple(map(ref, tensors))
        sizes = [*filter(None, map(leading_dimension, tensors))]
        size, scale = next((size for size in sizes if size > 1), min(sizes, default=0)), self._scale()
        if not size or scale == 1 or [*map(id, last)] != [*map(id, tensors)]:
            return args, kwargs
        wanted = max(1, int(size * scale))

        def repeated(value: Any) -> Any:
            if leading_dimension(value) != size:
                return value
            return _cut(_joined([value] * -(-wanted // size)), 0, wanted)

        return tuple(map(repeated, args)), {key: repeated(value) for key, value in kwargs.items()}


def _joined(batches: Sequence[Any]) -> Any:
    """Return batches joined along the first dimension of their tensors, at any depth."""
    first = batches[0]
    if hasattr(first, "shape"):
        if len({tuple(batch.shape[1:]) for batch in batches}) > 1:
            raise NotLiveError("the data loader's batches are padded to different lengths")
        torch: Any = sys.modules["torch"]
        result = torch.cat(list(batches))
        return result.pin_memory() if first.is_pinned() else result
    if _lists_samples(first):
        return _like(first, [item for batch in batches for item in batch])
    if contents := [contained(batch) for batch in batches if contained(batch)]:
        return _like(first, {key: _joined([content[key] for content in contents]) for key in contents[0]})
    return first


def _cut(batch: Any, start: int, end: int | None) -> Any:
    """Return the samples from ``start`` to ``end`` of a batch."""
    if hasattr(batch, "shape"):
        return batch[start:end]
    if _lists_samples(batch):
        return _like(batch, list(batch[start:end]))
    if content := contained(batch):
        return _like(batch, {key: _cut(value, start, end) for key, value in content.items()})
    return batch


def _lists_samples(batch: Any) -> bool:
    """Return whether a batch is a list of texts, one per sample."""
    return isinstance(batch, (list, tuple)) and not any(hasattr(item, "shape") for item in batch)


def _like(batch: Any, content: Any) -> Any:
    """Return content in a container of a batch's type: ``BatchEncoding``, a named tuple, a dict, a dataclass.

    ``content`` is a list, or as of ``contained``.
    """
    if not isinstance(batch, (Mapping, list, tuple)):
        result = copy.copy(batch)
        for name, value in content.items():
            object.__setattr__(result, name, value)  # it may be frozen
        return result
    if isinstance(content, dict) and not isinstance(batch, Mapping):
        content = list(content.values())
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*content)
    return type(batch)(content)
