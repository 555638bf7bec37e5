"""Incremental fit of the memory model's correction to measured peaks.

The slope is the median over all pairs of samples of the same lineage whose predicted peak depends on the activations
(Theil 1950, Sen 1968: robust against 29% of wrong samples). Without such a pair, with two different micro-batches, it
is the least-squares slope of the residuals over all lineages. It is never negative. Offsets are the medians of the
remaining residuals.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from optuna_dsat.cost.memory import Correction, Hardware, ModelProfile, Sample, batch_free_key, rank_moments
from optuna_dsat.cost.zero_states import Moment

__all__ = ["CorrectionFit"]

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class _Point:
    """A sample relative to the predicted line ``intercept + slope * micro_batch`` of the forward pass."""

    lineage: str
    micro_batch: int
    above_intercept: int
    """Measured peak less the predicted bytes at micro-batch 0."""
    sloped: bool
    """Whether the predicted peak is at a moment with activations."""


class CorrectionFit:
    """Incremental fit of a :class:`~optuna_dsat.cost.memory.Correction` to measured peaks.

    Each peak is modelled once, when it is added; slopes of pairs are kept sorted, and the residuals of a new slope are
    computed for all peaks at once.

    Args:
        profile: The model.
        hardware: Where the peaks were measured.
    """

    def __init__(self, profile: ModelProfile, hardware: Hardware) -> None:
        self._profile = profile
        self._hardware = hardware
        self._points: list[_Point] = []
        self._lines: list[tuple[int, int, int, int, int]] = []
        """Per peak: lineage index, measured bytes, micro-batch, forward intercept, bytes at other moments."""
        self._lineages: dict[str, int] = {}
        self._members: dict[str, list[_Point]] = {}
        """Sloped points by lineage."""
        self._slopes: list[float] = []
        """Bytes per sample of all pairs of sloped points of the same lineage, ascending."""
        self._cached: Correction | None = None

    def __len__(self) -> int:
        return len(self._points)

    def add(self, samples: Iterable[Sample]) -> None:
        """Add measured peaks, in any order."""
        slopes: list[float] = []
        for sample in samples:
            self._cached = None
            config, micro_batch, peak = sample
            moments = rank_moments(self._profile, config, self._hardware)
            point = _point(sample, moments)
            self._points.append(point)
            forward = sum(moment.bytes_at(0) for moment in moments if moment.name == "forward")
            others = [moment.bytes_at(micro_batch) for moment in moments if moment.name != "forward"]
            lineage = self._lineages.setdefault(point.lineage, len(self._lineages))
            self._lines.append((lineage, peak, micro_batch, forward, max(others)))
            if point.sloped:
                before = self._members.setdefault(point.lineage, [])
                slopes += [
                    (point.above_intercept - other.above_intercept) / (point.micro_batch - other.micro_batch)
                    for other in before
                    if other.micro_batch != point.micro_batch
                ]
                before.append(point)
        if slopes:
            self._slopes = sorted([*self._slopes, *slopes])

    def correction(self) -> Correction:
        """Return the correction fitted to all peaks; the identity without peaks."""
        if self._cached is None:
            self._cached = self._fit()
        return self._cached

    def _fit(self) -> Correction:
        if not self._points:
            return Correction()
        slope = self._slope()
        lineage, peak, micro_batch, forward, others = np.array(self._lines, dtype=np.int64).T
        each = self._profile.activation_bytes_per_sample if slope is None else slope
        residuals = peak - np.maximum(forward + each * micro_batch, others)
        values = _medians(lineage, residuals)
        offsets = dict(zip(self._lineages, values, strict=True))
        return Correction(
            bytes_per_sample=slope,
            offsets=MappingProxyType(offsets),
            default_offset=round(statistics.median(values)),
        )

    def _slope(self) -> int | None:
        """Return the bytes per sample, None if the points do not determine them."""
        if self._slopes:
            return max(0, round(statistics.median(self._slopes)))
        usable = [point for point in self._points if point.sloped]
        if len({point.micro_batch for point in usable}) < 2:
            return None
        line = statistics.linear_regression(
            [point.micro_batch for point in usable], [point.above_intercept for point in usable]
        )
        return max(0, round(line.slope))


def _point(sample: Sample, moments: Sequence[Moment]) -> _Point:
    config, micro_batch, peak = sample
    with_activations = [moment for moment in moments if moment.bytes_per_sample > 0] or list(moments)
    line = max(with_activations, key=lambda moment: moment.bytes_at(micro_batch))
    return _Point(
        lineage=batch_free_key(config),
        micro_batch=micro_batch,
        above_intercept=peak - line.bytes_at(0),
        sloped=line.bytes_at(micro_batch) >= max(moment.bytes_at(micro_batch) for moment in moments),
    )


def _medians(groups: Numbers, values: Numbers) -> list[int]:
    """Return the rounded median of the values of each group; groups are numbered from 0 without gaps."""
    order = np.lexsort((values, groups))
    counts = np.bincount(groups)
    starts = np.cumsum(counts) - counts
    ordered = values[order]
    low, high = ordered[starts + (counts - 1) // 2], ordered[starts + counts // 2]
    numbers: list[int] = np.rint((low + high) / 2).astype(np.int64).tolist()
    return numbers
