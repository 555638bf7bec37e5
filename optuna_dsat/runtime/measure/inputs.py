"""Sizes of the inputs that an engine is fed: samples and elements, by the tensors' shapes alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

__all__ = [
    "BatchNumbers",
    "InputSize",
    "first_tensor",
    "leading_dimension",
    "may_have_time_first",
    "sample_counter",
    "size_of",
]

_DEPTH = 4
"""Maximum nesting depth at which a batch's tensors are searched; deeper ones count as not observed."""

_TOKEN_TYPES = ("int16", "int32", "int64")
"""Element types of token tensors, without their library's name; ``uint8`` and ``bool`` are images and masks."""


@dataclass(frozen=True, kw_only=True)
class InputSize:
    """Size of the inputs of one forward pass, or of several."""

    samples: int
    elements: int = 0
    """Elements of the largest token tensor, padding included, or of the largest tensor if there is none."""
    are_tokens: bool = False
    """Whether ``elements`` counts tokens: an integer tensor of (samples, length)."""

    def __add__(self, other: InputSize) -> InputSize:
        return InputSize(
            samples=self.samples + other.samples,
            elements=self.elements + other.elements,
            are_tokens=self.are_tokens or other.are_tokens,
        )


def size_of(batch: Any) -> InputSize | None:
    """Return the size of a batch; None if it has no tensor.

    Args:
        batch: A tensor, or sequences and mappings of them (a ``BatchEncoding`` is a mapping).
    """
    tensors = _shaped(batch)
    if not tensors:
        return None
    tokens = [tensor for tensor in tensors if _holds_tokens(tensor)]
    return InputSize(
        samples=int(tensors[0].shape[0]),
        elements=max(_elements(tensor) for tensor in tokens or tensors),
        are_tokens=bool(tokens),
    )


def leading_dimension(batch: Any) -> int | None:
    """Return the leading dimension of the first tensor in a batch; None if none is found."""
    size = size_of(batch)
    return None if size is None else size.samples


def first_tensor(batch: Any) -> Any:
    """Return the first tensor of a batch, whose leading dimension is that of its samples; None if there is none."""
    return next(iter(_shaped(batch)), None)


def may_have_time_first(tensor: Any) -> bool:
    """Whether a tensor is of a kind that some models take as (length, samples, ...): tokens, or vectors of floats."""
    if tensor is None:
        return False
    kind = str(getattr(tensor, "dtype", ""))
    return _holds_tokens(tensor) or (len(tensor.shape) == 3 and "float" in kind)


def _shaped(batch: Any) -> list[Any]:
    return [tensor for tensor in _tensors(batch, _DEPTH) if len(tensor.shape) > 0]


def _elements(tensor: Any) -> int:
    if callable(getattr(tensor, "numel", None)):  # torch's; the shape of a ragged one has no product
        return int(tensor.numel())
    return math.prod(tensor.shape)


def _holds_tokens(tensor: Any) -> bool:
    return len(tensor.shape) == 2 and str(getattr(tensor, "dtype", "")).rpartition(".")[2] in _TOKEN_TYPES


def _tensors(batch: Any, depth: int) -> Iterator[Any]:
    """Yield the tensors of a batch in their order."""
    if getattr(batch, "shape", None) is not None:
        yield batch
    elif depth > 0 and isinstance(batch, Mapping | list | tuple):
        for item in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(item, depth - 1)


# How many samples the inputs of a forward pass are: mostly their leading dimension, not always.
#
# Recurrent models and some transformers take time first: (length, samples, ...). Other numbers show which dimension it
# is: the batch sizes of the configs, of options whose names mean one, and of the loader. Where a model gets several
# rows for each sample (two views, pairs, frames of a video), launches at two sizes have shown how many
# (``optuna_dsat.study.profile.batch_search``).


@dataclass(frozen=True, kw_only=True)
class BatchNumbers:
    """Numbers of a launch that mean samples of a batch."""

    configured: Set[int]
    """Micro-batches of the launch's config and of the script's own."""
    named: Set[int]
    """Values of options and settings whose names mean a batch size."""
    loaded: int | None
    """Batch size of the data loader that made the batch in use; None if no data loader is known to have made it."""


def sample_counter(
    numbers: Callable[[], BatchNumbers], *, rows: Sequence[int] = (1, 1)
) -> Callable[[Any], InputSize | None]:
    """Return what tells the size of a forward pass's inputs; None if they have no tensor.

    Args:
        numbers: Returns the numbers that are known at the time.
        rows: Rows that the model is fed, and the samples that they are: (2, 1) for pairs.
    """

    def counted(batch: Any) -> InputSize | None:
        size = size_of(batch)
        if size is None:
            return None
        known = numbers()
        count = _time_first(batch, size.samples, known) or size.samples
        return replace(size, samples=-(-count * rows[1] // rows[0]))

    return counted


def _time_first(batch: Any, leading: int, known: BatchNumbers) -> int | None:
    """Return the second dimension of the inputs if that is the batch size and the leading one is not; else None."""
    tensor = first_tensor(batch)
    if not may_have_time_first(tensor):
        return None
    second = int(tensor.shape[1])
    sizes = known.configured | known.named | {known.loaded}
    return second if second > 1 and second in sizes and leading not in sizes else None
