"""The true best of a machine, by enumeration of everything the tuner's search space can reach."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.random_machines.machine import RandomMachine
from benchmarks.random_machines.settings import Settings
from optuna_dsat.config import ds_config
from optuna_dsat.config.search_space import SearchSpace
from optuna_dsat.config.space_builder import SpaceRequest, build_space

_EVERY = 512
"""Micro-batches up to this one are all tried."""
_PER_OCTAVE = 50
"""Beyond it, micro-batches per doubling."""


def search_space(machine: RandomMachine) -> SearchSpace:
    """Return the tuner's own search space for the machine's user config, all stages, the micro-batch aside."""
    return build_space(
        SpaceRequest(
            ds_config=machine.user_config,
            params=machine.params,
            device=machine.kind,
            ranks_per_node=machine.slots,
            zero_stages=(0, 1, 2, 3),
        )
    )


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """The fastest configuration of a machine."""

    params: dict[str, Any]
    """Knobs of the search space, without the micro-batch."""
    settings: Settings
    micro_batch: int
    throughput: float
    """Samples per second."""


def optimum(machine: RandomMachine, *, samples: int | None = None) -> Optimum:
    """Return the true best over all lineages, and all micro-batches that ``_sizes`` names.

    With ``samples`` per rank and step, over the micro-batches that divide them; accumulation makes up the rest.

    Raises:
        ValueError: If nothing runs.
    """
    space, base = search_space(machine), ds_config.effective(machine.user_config)
    sizes = _sizes(machine)
    if samples is not None:
        sizes = np.array([size for size in range(1, samples + 1) if samples % size == 0], dtype=np.float64)
    known: dict[Settings, Optimum] = {}
    for lineage in space.lineages():
        params = {**lineage, ds_config.MICRO_BATCH: space.micro_batches[0]}
        settings = Settings.of(ds_config.merge(base, space.overlay(params)))
        fits = sizes[:0] if settings in known else sizes[machine.fits(settings, sizes)]
        if len(fits):
            rates = _rates(machine, settings, fits, samples)
            fastest = int(np.argmax(rates))
            known[settings] = Optimum(
                params=dict(lineage),
                settings=settings,
                micro_batch=int(fits[fastest]),
                throughput=float(rates[fastest]),
            )
    return max(known.values(), key=lambda each: each.throughput)


def _rates(
    machine: RandomMachine, settings: Settings, sizes: NDArray[np.float64], samples: int | None
) -> NDArray[np.float64]:
    """Return samples per second of micro-batches, accumulated to ``samples`` if given; shape of ``sizes``."""
    if samples is None:
        return sizes * machine.slots / machine.step_s(settings, sizes)
    steps = [replace(settings, accumulation=samples // int(size)) for size in sizes]
    return samples * machine.slots / np.concatenate(list(map(machine.step_s, steps, sizes[:, None])))


def _sizes(machine: RandomMachine) -> NDArray[np.float64]:
    """Return the micro-batches that are tried: all up to 512, beyond them 50 per doubling and multiples of 64."""
    every = np.arange(1, min(machine.most, _EVERY) + 1)
    if machine.most <= _EVERY:
        return every.astype(np.float64)
    beyond = np.geomspace(_EVERY, machine.most, 1 + math.ceil(_PER_OCTAVE * math.log2(machine.most / _EVERY)))
    return np.unique(np.concatenate([every, beyond.astype(int), (beyond / 64).astype(int) * 64])).astype(np.float64)
