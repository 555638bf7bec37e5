"""Structures at which the script fails with any micro-batch, inferred from the launches of a study.

A structure has components: its ZeRO stage, each lower bound of the stage, whether it is below 3, and its offloads.
Components that ran are not at fault. Suspects are the other components shared by two launches with the same error, all
other components of a stalled launch, because a stall costs far more time than an error, and a component that an error
names itself: a stage below 3 if the model is built within ``deepspeed.zero.Init``. Launches at larger micro-batches
than any that ran may have failed because of their size, so at least one of the two launches must have a size that ran.
While nothing ran, nothing is compared: a structure is given up after ``_HOPELESS`` launches.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from optuna.distributions import CategoricalDistribution
from optuna.trial import FrozenTrial

from optuna_dsat.config.ds_config import AUTO
from optuna_dsat.config.structures import Structure
from optuna_dsat.outcome import Outcome
from optuna_dsat.trials import attributes
from optuna_dsat.trials.lineage import (
    MICRO_BATCH,
    OFFLOAD_OPTIMIZER,
    OFFLOAD_PARAM,
    ZERO_STAGE,
    Feasibility,
    feasibility,
    structure,
)

_RANK = re.compile(r"^rank \d+: ")
_VARYING = re.compile(r"(_?[Ss]tage)?\d+")
"""Parts of a message that may differ between structures and micro-batches: ``DeepSpeedZeroOptimizer_Stage3``."""

_OFFLOADS = {OFFLOAD_OPTIMIZER: 1, OFFLOAD_PARAM: 3}
"""Offload -> lowest ZeRO stage that has the knob."""
_NONE = "none"
"""Value of the knob without offload."""

_HOPELESS = 3
"""Failed launches of a structure after which it is given up although none of another structure ran."""

_Component = tuple[str, Any]
_BELOW_3 = ("stage below", 3)
_TELLING = {
    "PartitionedModelError": _BELOW_3,
    "Direct calls to tensor.backward() are not supported": (ZERO_STAGE, 0),
    "no_sync context manager is incompatible": ("least stage", 2),
}
"""Errors of ``runtime/trial_config.py`` and of DeepSpeed 0.19.8 -> the component that they name as the cause."""


@dataclass(frozen=True, kw_only=True)
class StructureFailures:
    """Evidence from failed launches against structures."""

    avoided: Sequence[Mapping[str, Any]] = ()
    """Structures (partial knobs) at which a launch is expected to fail."""
    proven_size: int | None = None
    """Largest micro-batch that ran, if launches failed at larger ones of structures that never ran; else None."""
    ran: frozenset[frozenset[_Component]] = frozenset()
    """Structures that ran, by their components."""

    def largest_first(self, params: Mapping[str, Any]) -> int | None:
        """Return the largest micro-batch for a structure that never ran, None for any: failures there are due to it."""
        return None if _components(params) in self.ran else self.proven_size


def error_of(trial: FrozenTrial) -> str:
    """Return the error of a failed trial, without the rank that reported it."""
    return _RANK.sub("", trial.user_attrs.get(attributes.MESSAGE, "")).rstrip(".")


def structure_failures(trials: Iterable[FrozenTrial], *, micro_batch: str = MICRO_BATCH) -> StructureFailures:
    """Return the evidence from a study's failed launches against structures."""
    ran: set[frozenset[_Component]] = set()
    failed: list[tuple[FrozenTrial, frozenset[_Component], int]] = []
    largest, stages = 0, dict[Any, None]()
    for trial in trials:
        shown, config = feasibility(trial), trial.user_attrs.get(attributes.CONFIG, {})
        size = trial.params.get(micro_batch, config.get(MICRO_BATCH))
        if shown not in (Feasibility.FITS, Feasibility.BROKEN) or not isinstance(size, int):
            continue
        whole = Structure.of(config)
        of_config = {ZERO_STAGE: whole.stage, **{name: getattr(whole, name) for name in _OFFLOADS}}
        components = _components(trial.params if ZERO_STAGE in trial.params else of_config)
        if shown is Feasibility.FITS:
            ran.add(components)
            largest = max(largest, size)
        else:
            failed.append((trial, components, size))
            if isinstance(choices := trial.distributions.get(ZERO_STAGE), CategoricalDistribution):
                stages.update(dict.fromkeys(choices.choices))
    if not failed:
        return StructureFailures()
    if not ran:
        times = Counter(components for _, components, _ in failed)
        hopeless = {components for components, count in times.items() if count >= _HOPELESS}
        return StructureFailures(avoided=_matching(hopeless, stages))
    beyond = any(size > largest and components not in ran for _, components, size in failed)
    return StructureFailures(
        avoided=_matching(_suspects(failed, frozenset().union(*ran), largest), stages),
        proven_size=largest if beyond else None,
        ran=frozenset(ran),
    )


def _components(knobs: Mapping[str, Any]) -> frozenset[_Component]:
    """Return the components of a configuration's structure; a missing offload knob means no offload."""
    parts = structure(knobs)
    if parts.get(ZERO_STAGE) == AUTO:  # a library fills it in
        parts[ZERO_STAGE] = 0
    least = (("least stage", stage) for stage in range(1, int(parts.get(ZERO_STAGE, 0)) + 1))
    below = [_BELOW_3] if int(parts.get(ZERO_STAGE, 0)) < 3 else []
    return frozenset({**dict.fromkeys(_OFFLOADS, _NONE), **parts}.items()).union(least, below)


def _suspects(
    failed: Sequence[tuple[FrozenTrial, frozenset[_Component], int]], innocent: frozenset[_Component], largest: int
) -> set[frozenset[_Component]]:
    """Return sets of components; a structure that contains a whole set fails."""
    by_error: dict[str, dict[frozenset[_Component], list[int]]] = {}
    errors = [error_of(trial) for trial, *_ in failed]
    result = {
        frozenset({cause}) - innocent for text, cause in _TELLING.items() if any(text in error for error in errors)
    }
    innocent |= {_BELOW_3}
    for trial, components, size in failed:
        if trial.user_attrs.get(attributes.OUTCOME) == Outcome.STALLED:
            result.add(components - innocent)
        else:
            by_error.setdefault(_VARYING.sub("", error_of(trial)), {}).setdefault(components, []).append(size)
    for error, sizes in by_error.items():
        if not error:
            continue
        repeated = [(components, at) for components, at in sizes.items() if len(at) > 1]
        shared = [(first & other, sizes[first] + sizes[other]) for first, other in combinations(sizes, 2)]
        result |= {components - innocent for components, at in (*repeated, *shared) if min(at) <= largest}
    return result - {frozenset()}


def _matching(suspects: Iterable[frozenset[_Component]], stages: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the partial knobs that have all components of one of the sets."""
    result = set()
    for components in suspects:
        offloads = {name: value for name, value in components if name in _OFFLOADS}
        for stage in stages:
            if components <= _components({ZERO_STAGE: stage, **offloads}):
                named = ((n, value) for n, value in offloads.items() if value != _NONE or stage >= _OFFLOADS[n])
                result.add(((ZERO_STAGE, stage), *sorted(named)))
    return [dict(knobs) for knobs in sorted(result)]
