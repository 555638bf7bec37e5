"""Sizes of an engine's inputs, in samples and elements, from the tensors' shapes only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

_DEPTH = 4
"""Maximum nesting depth at which a batch is searched for tensors; deeper tensors count as not observed."""

_PLAIN = frozenset({bool, bytes, float, int, str, type(None)})
"""Types of lists that are not searched: a loader may yield long lists of numbers, in each step."""

_TOKEN_TYPES = ("int16", "int32", "int64")
"""Element types of token tensors, without the library's name; ``uint8`` and ``bool`` are images and masks."""


@dataclass(frozen=True)
class InputSize:
    """Size of the inputs of one or several forward passes."""

    samples: int
    elements: int = 0
    """Elements of the largest token tensor, including padding; unless the first is one, of the largest tensor."""
    are_tokens: bool = False
    """Whether ``elements`` counts tokens: the first tensor has integers of (samples, length)."""
    loaded: int | None = None
    """Samples of the data loader's batch that the inputs are of; None if unknown, or of several passes."""
    drawn: int = 0
    """``BatchNumbers.drawn`` when the inputs were fed."""
    is_ambiguous: bool = False
    """Whether the second dimension may have the samples instead, by the known batch sizes."""

    def __add__(self, other: InputSize) -> InputSize:
        return InputSize(
            samples=self.samples + other.samples,
            elements=self.elements + other.elements,
            are_tokens=self.are_tokens or other.are_tokens,
            is_ambiguous=self.is_ambiguous or other.is_ambiguous,
        )


def micro_batches(sizes: Sequence[InputSize], *, drawn_before: int) -> Sequence[InputSize]:
    """Return the inputs before a backward pass, as one micro-batch as large as the largest unless their samples differ.

    Inputs of the same samples are anchors, positives and negatives, crops of two resolutions, or a discriminator's real
    and fake samples. Samples differ if the inputs are parts of a batch, or have as many samples as loaders have yielded
    since the last backward pass (``drawn_before``): batches of several tasks.
    """
    total = sum(sizes, InputSize(samples=0))
    if total.samples and total.samples in (sizes[0].loaded, sizes[-1].drawn - drawn_before):
        return sizes
    return [replace(total, samples=max(size.samples for size in sizes))] if total.samples else []


def size_of(batch: Any) -> InputSize | None:
    """Return the size of a batch; None without tensors. Integers behind images or sound are labels, not its tokens."""
    tensors = shaped_tensors(batch)
    if not tensors:
        return None
    tokens = [tensor for tensor in tensors if _holds_tokens(tensor)] if _holds_tokens(tensors[0]) else []
    # The shape of torch's ragged tensors has no product.
    counts = [tensor.numel() if hasattr(tensor, "numel") else math.prod(tensor.shape) for tensor in tokens or tensors]
    return InputSize(
        samples=int(tensors[0].shape[0]),
        elements=int(max(counts)),
        are_tokens=bool(tokens),
    )


def leading_dimension(batch: Any) -> int | None:
    """Return the leading dimension of the first tensor in a batch, or None."""
    size = size_of(batch)
    return None if size is None else size.samples


def shaped_tensors(batch: Any) -> list[Any]:
    """Return the tensors in a batch that have a leading dimension."""
    return [tensor for tensor in tensors_of(batch) if len(tensor.shape) > 0]


def _is_sequence(tensor: Any) -> bool:
    return len(tensor.shape) >= 3 and "float" in str(getattr(tensor, "dtype", ""))


def _holds_tokens(tensor: Any) -> bool:
    return len(tensor.shape) == 2 and str(getattr(tensor, "dtype", "")).rpartition(".")[2] in _TOKEN_TYPES


def _has_length(tensor: Any) -> bool:
    return len(tensor.shape) > 2 or _holds_tokens(tensor)


def tensors_of(batch: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """Yield the tensors in a batch, down to a depth of containers."""
    if _has_shape(batch):
        yield batch
    elif depth > 0:
        for item in _searched(batch).values():
            yield from tensors_of(item, depth - 1)


def _searched(batch: Any) -> Mapping[Any, Any]:
    return {} if isinstance(batch, (list, tuple)) and _PLAIN.issuperset(map(type, batch)) else contained(batch)


def contained(batch: Any) -> Mapping[Any, Any]:
    """Return the values of a mapping, sequence or dataclass by key, index or field; empty for others."""
    if isinstance(batch, Mapping):
        return batch
    if isinstance(batch, (list, tuple)):
        return dict(enumerate(batch))
    if is_dataclass(batch) and not isinstance(batch, type):
        return {item.name: getattr(batch, item.name, None) for item in fields(batch)}
    return {}


def attributes_in(batch: Any, depth: int = 2) -> list[Any]:
    """Return the attributes of each object in a batch, down to a depth of containers; not of functions and modules."""
    if content := _searched(batch):
        return [each for item in content.values() if depth for each in attributes_in(item, depth - 1)]
    return [vars(batch)] if hasattr(batch, "__dict__") and not callable(batch) else []


def _has_shape(value: Any) -> bool:
    try:
        len(value.shape)
    except Exception:  # noqa: BLE001 - RuntimeError of torch's nested tensors, KeyError of dicts with attributes
        return False
    return True


# Number of samples in the inputs of a forward pass: usually the leading dimension, but not always.
#
# Recurrent models and some transformers take inputs of shape (length, samples, ...); others first take a tensor that
# all samples share. The sample dimension is then identified by known batch sizes: of the configs, of options with such
# names, and of the loader. If a model gets several rows per sample (two views, pairs, frames of a video), the number of
# rows comes from earlier launches at two batch sizes (``optuna_dsat.study.profile.batch_search``).


@dataclass(frozen=True)
class BatchNumbers:
    """Known batch sizes of a launch."""

    configured: Set[int]
    """Micro-batch sizes in the launch's config and the script's config."""
    named: Set[int]
    """Values of options and settings with the name of a batch size."""
    loaded: int | None
    """Samples of the batch that a data loader yielded last; None if unknown."""
    recent: Set[int] = frozenset()
    """Samples of its latest batches: the present one may have been read ahead of others."""
    drawn: int = 0
    """Samples of all batches that the loaders of the training data have yielded so far."""
    packed: int | None = None
    """Samples of the loader's current batch, if its rows are not samples; None for other batches."""


def sample_counter(
    numbers: Callable[[], BatchNumbers], *, rows: Sequence[int] = (1, 1)
) -> Callable[[Any], InputSize | None]:
    """Return a function that computes the size of a forward pass's inputs.

    Inputs without tensors, such as objects of the script's own classes, have the loader's batch size, else that of
    their attributes, or None.
    ``numbers`` returns the currently known batch sizes. ``rows`` are rows of the model's input, and the number of
    samples in them: (2, 1) for pairs.
    """

    def counted(batch: Any) -> InputSize | None:
        size, known = size_of(batch), numbers()
        if size is None and known.loaded is not None:
            return InputSize(samples=known.loaded, loaded=known.loaded, drawn=known.drawn)
        if size is None:
            batch = attributes_in(batch)
            size = size_of(batch)
        if size is None:
            return None
        tensors = shaped_tensors(batch)
        listed = _listed_samples(batch, known)
        if any(item is tensors[0] for item in tensors_of(listed)):
            return InputSize(
                samples=-(-len(listed) * rows[1] // rows[0]),
                elements=sum(item.elements for item in map(size_of, listed) if item is not None),
                are_tokens=size.are_tokens,
            )
        count, is_ambiguous = size.samples, False
        if rows[0] == rows[1]:  # else rows are known to be fed
            count, is_ambiguous = _samples_in(tensors, known) if known.packed is None else (known.packed, False)
        if size.are_tokens and size.samples == 1 and count not in (1, tensors[0].shape[1]):
            # The first tensor has the positions or prompts of all samples.
            size = size_of([item for item in tensors if item.shape[0] == count and len(item.shape) > 1]) or size
        samples = -(-count * rows[1] // rows[0])
        return replace(size, samples=samples, loaded=known.loaded, drawn=known.drawn, is_ambiguous=is_ambiguous)

    return counted


def _samples_in(tensors: Sequence[Any], known: BatchNumbers) -> tuple[int, bool]:
    """Return the samples of a batch: the leading dimension of its first tensor, unless known batch sizes show another.

    Also return whether two dimensions have known batch sizes.

    They may be in its second dimension, (length, samples, ...). The first tensor may also have the same single row for
    all samples (masks, positions, prompts), or belong to no sample (adjacency matrices, noise levels); the other
    tensors then have them.
    """
    first, depth = tensors[0], len(tensors[0].shape)
    loaded = known.recent | {known.loaded}
    count, sizes = int(first.shape[0]), known.configured | known.named | loaded
    likely = (known.configured | known.named if known.loaded is None else loaded) - {1}
    # Without a loader, a vector may be the bounds of the texts in a row.
    others = [tensor for tensor in tensors[1:] if known.loaded is not None or len(tensor.shape) > 1]
    length = first.shape[-1]
    if count == 1 or (count == length and (depth > 1 or known.loaded is not None or count not in sizes)):
        # Masks and positions are as long as the samples, other than prompts; features may be as many as samples.
        alike = [item.shape[0] for item in others if item.shape[1:2] == (length,) and (count == 1 or _has_length(item))]
        shared = [size for size in alike if size in sizes - {1} | {known.loaded}]
        shared += [item.shape[0] for item in others if count == 1 and item.shape[0] in likely]
        if shared and shared[0] != count:
            return int(shared[0]), False
    is_sequence, is_ambiguous = _is_sequence(first), False
    if is_sequence or _holds_tokens(first):
        ambiguous = set() if known.loaded == 1 and (not is_sequence or loaded == {1}) else {1}  # or one channel
        second = loaded if depth > 3 else sizes - ambiguous
        if count in sizes:  # it is the length only if the second dimension is that of a short last batch
            is_ambiguous = count != known.loaded and first.shape[1] in second
            is_short = depth <= 3 and known.loaded != count and known.loaded != max(known.recent, default=None)
            second = {known.loaded} - ambiguous if is_short else set()
        if first.shape[1] in second:
            return int(first.shape[1]), False
    if count not in sizes and known.loaded is not None:
        return next((int(item.shape[0]) for item in others if item.shape[0] in likely), count), False
    return count, is_ambiguous and count > 1


def _listed_samples(batch: Any, known: BatchNumbers, depth: int = _DEPTH) -> Sequence[Any]:
    """Return the first list of a tensor or mapping per sample in ``(args, kwargs)``, as for detection; else empty.

    A list of tensors whose leading dimensions are multiples of its length contains features or views of a batch.
    Without a loader, so does a list whose leading dimensions are known batch sizes.
    """
    if depth == 0:
        return ()
    items = [*_searched(batch).values()]
    sizes = (known.configured | known.named) - {1} if known.loaded is None else {known.loaded}
    if len(items) in sizes and isinstance(batch, (list, tuple)) and depth <= _DEPTH - 2:
        rows = [size.samples for size in map(size_of, items) if size is not None]
        are_tensors = all(getattr(item, "shape", None) for item in items)
        are_samples = are_tensors and (len(items) == 1 or any(row % len(items) for row in rows))
        is_batch = known.loaded is None and {*rows} <= sizes
        if not is_batch and (are_samples or all(isinstance(item, Mapping) for item in items)):
            return items
    return next(filter(None, (_listed_samples(item, known, depth - 1) for item in items)), ())
