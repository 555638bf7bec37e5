"""From the name of a search method to its sampler and pruner, and the ceiling on micro-batches that both rely on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.pruners import BasePruner
from optuna.trial import FrozenTrial

from optuna_dsat import ds_config, history, memory
from optuna_dsat.errors import UsageError
from optuna_dsat.lineage import MICRO_BATCH
from optuna_dsat.profiling import Profiled
from optuna_dsat.pruners import AshaPruner, DeepSpeedPruner
from optuna_dsat.samplers import BinarySearchSampler, LineageRandomSampler
from optuna_dsat.space import SearchSpace
from optuna_dsat.spec import StudySpec

__all__ = ["Ceiling", "Method", "hardware_of", "make_method"]


def hardware_of(spec: StudySpec, profiled: Profiled) -> memory.Hardware:
    """Return the hardware of one launch as the memory model wants it."""
    return memory.Hardware(
        world_size=spec.slots_per_trial,
        ranks_per_node=spec.slots_per_trial,
        device_memory_bytes=profiled.profile.device_memory_bytes,
        host_memory_bytes=profiled.profile.host_memory_bytes,
        device=spec.device,
    )


class Ceiling:
    """Largest micro-batch worth trying for given knobs: the memory model, corrected by the peaks measured so far.

    Args:
        spec: The study.
        profiled: What the profile launch taught.
        space: Turns knobs into a DeepSpeed config.
    """

    def __init__(self, spec: StudySpec, profiled: Profiled, space: SearchSpace) -> None:
        self._base = ds_config.effective(spec.ds_config)
        self._profile = profiled.profile
        self._hardware = hardware_of(spec, profiled)
        self._space = space
        self._correction: tuple[int, memory.Correction] | None = None

    def __call__(self, params: Mapping[str, Any], trials: Sequence[FrozenTrial]) -> int:
        """Return the micro-batch; at least 1, since a model may err."""
        config = ds_config.merge(self._base, self._space.overlay({**params, MICRO_BATCH: 1}))
        largest = memory.largest_micro_batch(
            self._profile, config, hardware=self._hardware, correction=self._corrected(trials)
        )
        return max(1, largest)

    def _corrected(self, trials: Sequence[FrozenTrial]) -> memory.Correction:
        """Return the correction for this history; fitted once per history, since many lineages ask."""
        peaks = history.measured_peaks(trials)
        if self._correction is None or self._correction[0] != len(peaks):
            fitted = memory.Correction.fit(peaks, self._profile, self._hardware)
            self._correction = (len(peaks), fitted)
        return self._correction[1]


@dataclass(frozen=True, kw_only=True)
class Method:
    """A search method: an Optuna sampler and the pruner it works with."""

    sampler: LineageRandomSampler | BinarySearchSampler
    pruner: BasePruner
    classes: int
    """Lineages of the space."""

    def exhausted(self, study: optuna.Study) -> bool:
        """Whether nothing is left that may win."""
        return self.sampler.exhausted(study, classes=self.classes)

    def veto(self, study: optuna.Study, trial: FrozenTrial) -> str | None:
        """Return why a trial is not worth its launch, None where it is."""
        if isinstance(self.pruner, AshaPruner | DeepSpeedPruner):
            return self.pruner.reason(study, trial)
        return "held back by the pruner" if self.pruner.prune(study, trial) else None


def _random(spec: StudySpec, space: SearchSpace, ceiling: Ceiling) -> Method:
    limit = spec.options.trials_per_random_config
    return Method(
        sampler=LineageRandomSampler(trials_per_random_config=limit, max_micro_batch=ceiling, seed=spec.random_seed),
        pruner=DeepSpeedPruner(trials_per_random_config=limit),
        classes=space.classes(),
    )


def _bisection(spec: StudySpec, ceiling: Ceiling) -> BinarySearchSampler:
    return BinarySearchSampler(
        search_range_factor=spec.options.search_range_factor, max_micro_batch=ceiling, seed=spec.random_seed
    )


def _binary(spec: StudySpec, space: SearchSpace, ceiling: Ceiling) -> Method:
    return Method(sampler=_bisection(spec, ceiling), pruner=optuna.pruners.NopPruner(), classes=space.classes())


def _asha(spec: StudySpec, space: SearchSpace, ceiling: Ceiling) -> Method:
    options = spec.options
    pruner = AshaPruner(
        max_rungs=options.max_rungs,
        min_binary_search_trials=options.min_binary_search_trials,
        divisor=options.divisor,
        asha_early_stopping=options.asha_early_stopping,
    )
    return Method(sampler=_bisection(spec, ceiling), pruner=pruner, classes=space.classes())


_METHODS: Mapping[str, Callable[[StudySpec, SearchSpace, Ceiling], Method]] = {
    "random": _random,
    "binary": _binary,
    "asha": _asha,
}


def make_method(spec: StudySpec, profiled: Profiled, space: SearchSpace) -> Method:
    """Return the sampler and pruner of ``spec.method``.

    Raises:
        UsageError: If there is no such method.
    """
    if spec.method not in _METHODS:
        raise UsageError(f"There is no method {spec.method!r}; there are {', '.join(_METHODS)}.")
    return _METHODS[spec.method](spec, space, Ceiling(spec, profiled, space))
