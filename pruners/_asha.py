"""Asynchronous successive halving over lineages.

Li et al. 2018, "A System for Massively Parallel Hyperparameter Tuning" (arXiv:1810.05934), algorithm 2, with
the launches of a lineage as the resource. Rung k has ``r * eta ** (s + k)`` launches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optuna.pruners import BasePruner
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial

from optuna_dsat.pruners._inflight import below_rung, cannot_win, chosen_by_user, lineage_of
from optuna_dsat.trials.bisection import ended
from optuna_dsat.trials.history import best_score, read_history
from optuna_dsat.trials.lineage import MICRO_BATCH, Lineage
from optuna_dsat.words import things_in_words


@dataclass(frozen=True, kw_only=True)
class Rungs:
    """Sizes of the rungs, in launches."""

    max_rungs: int
    """Number of rungs; the last rung is never left."""
    min_launches: int
    """Launches of the lowest rung, before ``early_stopping`` (``r`` in the paper)."""
    divisor: int
    """Inverse share of lineages promoted to the next rung (``eta`` in the paper)."""
    early_stopping: int
    """Raises all rungs by this power of the divisor (``s`` in the paper)."""

    def size(self, rung: int) -> int:
        """Return the total launches of a lineage that completed a rung."""
        return self.min_launches * int(self.divisor ** (self.early_stopping + rung))


def build_rungs(
    lineages: Mapping[str, Lineage],
    *,
    rungs: Rungs,
    direction: StudyDirection,
    ended: frozenset[str] = frozenset(),
) -> list[frozenset[str]]:
    """Return the keys of the lineages promoted from each rung, from the lowest.

    A lineage completes a rung when it has the launches of the rung, or when its search ended with fewer. It is
    ranked by its best metric within the launches of the rung, so a longer search is not an advantage. A lineage
    without a metric counts as completed but is never promoted.
    """
    remaining = list(lineages)
    result = []
    for index in range(rungs.max_rungs):
        size = rungs.size(index)
        completed = [key for key in remaining if len(lineages[key].conclusive) >= size or key in ended]
        scores = {key: lineages[key].best_score(direction, first=size) for key in completed}
        top = survivors(scores, keep=len(completed) // rungs.divisor, direction=direction)
        already_promoted = [key for key in completed if len(lineages[key].conclusive) > size]
        promoted = frozenset([*top, *already_promoted]) if index < rungs.max_rungs - 1 else frozenset[str]()
        result.append(promoted)
        remaining = [key for key in remaining if key in promoted]
    return result


def survivors(scores: Mapping[str, float | None], *, keep: int, direction: StudyDirection) -> list[str]:
    """Return the keys of the ``keep`` best scores, best first; ties keep their order."""
    sign = -1.0 if direction == StudyDirection.MAXIMIZE else 1.0
    scored = [(sign * score, key) for key, score in scores.items() if score is not None]
    return [key for _, key in sorted(scored, key=lambda item: item[0])][:keep]


class AshaPruner(BasePruner):
    """Pruner that allocates more launches to lineages with better metrics.

    Asynchronous successive halving (Li et al. 2018, arXiv:1810.05934) with lineages as the candidates and
    launches as the resource. A lineage completes rung k when it has ``min_binary_search_trials * divisor **
    (asha_early_stopping + k)`` launches, or when its search ended earlier. Of the n lineages that completed a
    rung the best ``n // divisor`` are promoted to the next; the others wait, and are promoted later if they are among
    the best of a rung that has grown. The top rung, ``max_rungs - 1``, is never left. Launches that failed for
    reasons unrelated to the configuration do not count.

    With ``BinarySearchSampler`` this is the search of Determined AI's ``dsat asha``: the sampler asks which lineages to
    continue, highest rung first, and opens a new lineage if all wait. With other samplers, a trial of a waiting lineage
    is pruned before its launch; enqueued trials and retries of lost trials are never pruned.

    Within a launch the same rule applies to the reported steps: after ``divisor ** (asha_early_stopping + k)`` reports
    a trial must be among the best ``1 / divisor`` of all trials at that step. It is not stopped while it is within
    ``stop_margin`` (or three standard errors) of the best, so that noise does not decide between good configurations.

    Args:
        max_rungs: Number of rungs.
        min_binary_search_trials: Launches of the lowest rung (``r`` in the paper).
        divisor: Inverse share of lineages to promote (``eta`` in the paper).
        asha_early_stopping: Raises all rungs by this power of the divisor (``s`` in the paper).
        stop_margin: Minimum relative distance from the best at which a running trial is stopped.
        micro_batch: Name of the micro-batch's parameter.

    Raises:
        ValueError: If a number is out of range.
    """

    def __init__(
        self,
        *,
        max_rungs: int = 5,
        min_binary_search_trials: int = 3,
        divisor: int = 2,
        asha_early_stopping: int = 0,
        stop_margin: float = 0.1,
        micro_batch: str = MICRO_BATCH,
    ) -> None:
        for name, value, least in (
            ("max_rungs", max_rungs, 1),
            ("min_binary_search_trials", min_binary_search_trials, 1),
            ("divisor", divisor, 2),
            ("asha_early_stopping", asha_early_stopping, 0),
            ("stop_margin", stop_margin, 0),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        self._rungs = Rungs(
            max_rungs=max_rungs,
            min_launches=min_binary_search_trials,
            divisor=divisor,
            early_stopping=asha_early_stopping,
        )
        self._stop_margin = stop_margin
        self._micro_batch = micro_batch

    def prune(self, study: Study, trial: FrozenTrial) -> bool:
        """Return whether to veto a trial (nothing reported yet) or to stop a running trial."""
        if trial.intermediate_values:
            return self._stops(study, trial)
        return self.reason(study, trial) is not None

    def reason(self, study: Study, trial: FrozenTrial) -> str | None:
        """Return why a trial should not be launched, None if it should be."""
        if chosen_by_user(trial):
            return None
        lineages = read_history(study, micro_batch=self._micro_batch, without=trial.number).lineages
        lineage = lineage_of(trial, lineages, micro_batch=self._micro_batch)
        if lineage is None or lineage.key not in lineages or lineage.key in self.continuable(study, lineages):
            return None
        if lineage.broken:
            return "this configuration failed whatever its micro-batch"
        return f"other configurations did better with {things_in_words(len(lineage.conclusive), 'launch')}"

    def continuable(self, study: Study, lineages: Mapping[str, Lineage]) -> Sequence[str]:
        """Return the keys of the lineages that may continue: highest rung first, then most launches."""
        direction = study.direction
        best = best_score(lineages.values(), direction)
        over = frozenset(key for key, lineage in lineages.items() if ended(lineage, direction, best))
        lowest = self._rungs.size(0)
        started = {key: o for key, o in lineages.items() if key in over or len(o.conclusive) >= lowest}
        rungs = build_rungs(started, rungs=self._rungs, direction=direction, ended=over)
        continuing = []
        for key, lineage in lineages.items():
            done = len(lineage.conclusive)
            rung = next((k for k, r in enumerate(rungs) if key not in r), 0) if key in started else 0
            if key not in over and done < self._rungs.size(rung):
                continuing.append((-rung, -done, lineage.first_number, key))
        return [key for *_, key in sorted(continuing)]

    def hopeless(self, study: Study, lineages: Mapping[str, Lineage]) -> Sequence[Mapping[str, Any]]:
        """Return no structures: every new lineage starts at the lowest rung."""
        del study, lineages
        return ()

    def _stops(self, study: Study, trial: FrozenTrial) -> bool:
        history = read_history(study, micro_batch=self._micro_batch, without=trial.number)
        return below_rung(
            trial,
            history.finished,
            history.pending,
            direction=study.direction,
            divisor=self._rungs.divisor,
            early_stopping=self._rungs.early_stopping,
        ) and cannot_win(trial, history.finished, direction=study.direction, margin=self._stop_margin)
