"""``memory.Correction.fit`` for peaks that arrive one by one: the same answer, without beginning anew each time."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from optuna_dsat.cost.memory import Correction, Hardware, ModelProfile, Sample, _moments, _Point

__all__ = ["CorrectionFit"]

Numbers = npt.NDArray[np.int64]


class CorrectionFit:
    """Measured peaks, and what they teach.

    ``Correction.fit`` compares all pairs of peaks of a lineage and predicts every peak again. Here each peak is
    modelled once when it is added; slopes of pairs are kept in order, and the residuals that a new slope leaves are
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
        """Per peak: lineage, measured bytes, micro-batch, forward bytes at micro-batch 0, bytes at other moments."""
        self._lineages: dict[str, int] = {}
        self._members: dict[str, list[_Point]] = {}
        """Points by lineage that tell a slope."""
        self._slopes: list[float] = []
        """Of all pairs of points of one lineage, ascending."""
        self._answer: Correction | None = None

    def __len__(self) -> int:
        return len(self._points)

    def add(self, samples: Iterable[Sample]) -> None:
        """Add measured peaks, in any order."""
        slopes: list[float] = []
        for sample in samples:
            self._answer = None
            point = _Point.of(sample, self._profile, self._hardware)
            self._points.append(point)
            config, micro_batch, peak = sample
            moments = _moments(self._profile, config, self._hardware, None)
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
        """Return what ``Correction.fit`` would of all peaks."""
        if self._answer is None:
            self._answer = self._fit()
        return self._answer

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
        if self._slopes:
            return max(0, round(_middle(self._slopes)))
        usable = [point for point in self._points if point.sloped]
        if len({point.micro_batch for point in usable}) < 2:
            return None
        line = statistics.linear_regression(
            [point.micro_batch for point in usable], [point.above_intercept for point in usable]
        )
        return max(0, round(line.slope))


def _middle(ascending: Sequence[float]) -> float:
    """Return the median of ascending numbers."""
    return statistics.median(ascending[(len(ascending) - 1) // 2 : len(ascending) // 2 + 1])


def _medians(groups: Numbers, values: Numbers) -> list[int]:
    """Return the rounded median of the values of each group; groups are numbered from 0 without gaps."""
    order = np.lexsort((values, groups))
    counts = np.bincount(groups)
    starts = np.cumsum(counts) - counts
    ordered = values[order]
    low, high = ordered[starts + (counts - 1) // 2], ordered[starts + counts // 2]
    found: list[int] = np.rint((low + high) / 2).astype(np.int64).tolist()
    return found
