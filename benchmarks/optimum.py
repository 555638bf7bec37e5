"""The true best of a landscape, by enumeration of everything the tuner's search space can reach."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.named_landscapes import Computed
from benchmarks.physics import Settings
from optuna_dsat.config import ds_config
from optuna_dsat.config.space_builder import SearchSpace, SpaceRequest, build_space

_EVERY = 512
"""Micro-batches up to this one are all tried."""
_PER_OCTAVE = 50
"""Beyond it, micro-batches per doubling."""


def search_space(landscape: Computed, *, fix: Mapping[str, Any] = MappingProxyType({})) -> SearchSpace:
    """Return the tuner's own search space for the landscape's user config, all stages, the micro-batch aside.

    Args:
        landscape: The landscape.
        fix: Knobs to hold, for a coarser look.
    """
    return build_space(
        SpaceRequest(
            ds_config=landscape.user_config,
            params=landscape.params,
            device=landscape.kind,
            ranks_per_node=landscape.slots,
            zero_stages=(0, 1, 2, 3),
            fix=fix,
        )
    )


@dataclass(frozen=True, kw_only=True)
class Reach:
    """What one lineage reaches."""

    params: dict[str, Any]
    settings: Settings
    largest: int
    """Largest micro-batch that fits; 0 for none."""
    micro_batch: int
    """Fastest micro-batch."""
    throughput: float
    """Samples per second at the fastest micro-batch; 0 for none."""


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """The best configuration of a landscape."""

    best: Reach
    lineages: int
    runnable: int
    """Lineages that fit at micro-batch 1."""
    near: int
    """Lineages within 1 % of the best, at their own best micro-batch."""


def reaches(landscape: Computed, space: SearchSpace | None = None) -> Iterator[Reach]:
    """Yield every lineage with its largest and its fastest micro-batch, of those that ``_sizes`` names.

    Lineages that read as the same settings are computed once.
    """
    space = space or search_space(landscape)
    base = ds_config.effective(landscape.user_config)
    sizes = _sizes(landscape)
    known: dict[Settings, Reach] = {}
    for lineage in space.lineages():
        params = {**lineage, ds_config.MICRO_BATCH: space.micro_batches[0]}
        settings = Settings.of(ds_config.merge(base, space.overlay(params)))
        if settings not in known:
            known[settings] = _reach(landscape, params, settings, sizes)
        yield replace(known[settings], params=params)


def _reach(landscape: Computed, params: dict[str, Any], settings: Settings, sizes: NDArray[np.float64]) -> Reach:
    fits = sizes[landscape.fits(settings, sizes)]
    if not len(fits):
        return Reach(params=params, settings=settings, largest=0, micro_batch=0, throughput=0.0)
    rates = fits * landscape.slots / landscape.step_s(settings, fits)
    fastest = int(np.argmax(rates))
    return Reach(
        params=params,
        settings=settings,
        largest=int(fits[-1]),
        micro_batch=int(fits[fastest]),
        throughput=float(rates[fastest]),
    )


def _sizes(landscape: Computed) -> NDArray[np.float64]:
    """Return the micro-batches that are tried: all up to 512, beyond them 50 per doubling and multiples of 64."""
    every = np.arange(1, min(landscape.most, _EVERY) + 1)
    if landscape.most <= _EVERY:
        return every.astype(np.float64)
    beyond = np.geomspace(_EVERY, landscape.most, 1 + math.ceil(_PER_OCTAVE * math.log2(landscape.most / _EVERY)))
    return np.unique(np.concatenate([every, beyond.astype(int), (beyond / 64).astype(int) * 64])).astype(np.float64)


def optimum(landscape: Computed) -> Optimum:
    """Return the true best of a landscape over all lineages and all micro-batches."""
    result = list(reaches(landscape))
    best = max(result, key=lambda reach: reach.throughput)
    return Optimum(
        best=best,
        lineages=len(result),
        runnable=sum(reach.largest > 0 for reach in result),
        near=sum(reach.throughput >= 0.99 * best.throughput for reach in result),
    )
