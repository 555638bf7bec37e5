"""A study's history for samplers and pruners, and the common evidence of its lineages.

Decisions are functions of the history only, so any worker can continue any study.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from optuna.distributions import CategoricalDistribution
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial

from optuna_dsat.trials.lineage import (
    MICRO_BATCH,
    RETRY_ATTR,
    Lineage,
    agrees,
    group,
    lineage_key,
    structure,
    unreachable,
)


@dataclass(frozen=True, kw_only=True)
class StudyHistory:
    """A snapshot of a study's trials, without the trial to decide on."""

    finished: Sequence[FrozenTrial]
    pending: Sequence[FrozenTrial]
    """The unfinished trials."""
    micro_batch: str
    """Name of the micro-batch's parameter."""

    @cached_property
    def trials(self) -> Sequence[FrozenTrial]:
        """All trials, by number."""
        return sorted([*self.finished, *self.pending], key=lambda trial: trial.number)

    @cached_property
    def lineages(self) -> Mapping[str, Lineage]:
        """The lineages, including lineages of running trials; see ``optuna_dsat.trials.lineage.group``."""
        return group(self.trials, micro_batch=self.micro_batch)

    @cached_property
    def unreachable(self) -> frozenset[str]:
        """Keys of lineages that became another when suggested; see ``optuna_dsat.trials.lineage.unreachable``."""
        return unreachable(self.trials, micro_batch=self.micro_batch)

    def retries_before(self, number: int) -> int:
        """Return the number of trials below ``number`` that are retries of lost trials."""
        return sum(RETRY_ATTR in trial.system_attrs for trial in self.trials if trial.number < number)


def read_history(study: Study, *, micro_batch: str = MICRO_BATCH, without: int | None = None) -> StudyHistory:
    """Return the history of a study, without the trial ``without`` on which to decide."""
    finished: list[FrozenTrial] = []
    pending: list[FrozenTrial] = []
    for trial in study.get_trials(deepcopy=False):
        if trial.number != without:  # read the state once: another thread may finish the trial meanwhile
            (finished if trial.state.is_finished() else pending).append(trial)
    return StudyHistory(finished=finished, pending=pending, micro_batch=micro_batch)


def by_structure(lineages: Mapping[str, Lineage]) -> Mapping[str, Sequence[Lineage]]:
    """Return the lineages by the key of their structure (ZeRO stage and offload)."""
    result: dict[str, list[Lineage]] = {}
    for lineage in lineages.values():
        result.setdefault(lineage.structure_key, []).append(lineage)
    return result


def same_structure(lineages: Mapping[str, Lineage], params: Mapping[str, Any]) -> Sequence[Lineage]:
    """Return the lineages with the structure of some knobs."""
    key = lineage_key(structure(params))
    return [lineage for lineage in lineages.values() if lineage.structure_key == key]


def best_score(lineages: Iterable[Lineage], direction: StudyDirection) -> float | None:
    """Return the best metric of lineages, None without measurements."""
    best = best_lineage(lineages, direction)
    return None if best is None else best.best_score(direction)


def best_lineage(lineages: Iterable[Lineage], direction: StudyDirection) -> Lineage | None:
    """Return the lineage with the best metric, the earliest of ties; None without measurements."""
    sign = -1.0 if direction == StudyDirection.MAXIMIZE else 1.0
    shown = [(sign * value, o) for o in lineages if (value := o.best_score(direction)) is not None]
    return min(shown, key=lambda item: (item[0], item[1].first_number), default=(0.0, None))[1]


def structure_edge(lineage: Lineage, lineages: Mapping[str, Lineage]) -> int | None:
    """Return the smallest micro-batch that was too large for a lineage of the structure and never fitted, or None.

    Memory use depends almost only on the ZeRO stage and offload.
    """
    members = same_structure(lineages, lineage.params)
    fits = max((other.largest_fit for other in members if other.largest_fit is not None), default=0)
    edges = (other.smallest_too_large for other in members)
    return min((edge for edge in edges if edge is not None and edge > fits), default=None)


def all_opened(
    params: Mapping[str, Any], lineages: Iterable[Lineage], hopeless: Sequence[Mapping[str, Any]] = ()
) -> bool:
    """Return whether every lineage that extends partial knobs was opened already or is hopeless.

    The next knob is shared by all known lineages below ``params``; its distribution provides the other choices.
    """
    if any(agrees(params, record, strict=True) for record in hopeless):
        return True
    below = [lineage for lineage in lineages if agrees(lineage.params, params, strict=True)]
    if not below or any(len(lineage.params) == len(params) for lineage in below):
        return bool(below)
    for name in below[0].params:
        distribution = below[0].trials[-1].distributions.get(name)
        shared = name not in params and all(name in lineage.params for lineage in below)
        if shared and isinstance(distribution, CategoricalDistribution):
            return all(all_opened({**params, name: choice}, below, hopeless) for choice in distribution.choices)
    return False
