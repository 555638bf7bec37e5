"""Launches the configuration that a fitted cost model and memory model promise most of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optuna.study import Study
from optuna.trial import FrozenTrial

from optuna_dsat.guided.planner import GuidedPlanner
from optuna_dsat.samplers._base import MaxMicroBatch
from optuna_dsat.samplers._binary import BinarySearchSampler
from optuna_dsat.samplers._draw import Usual
from optuna_dsat.trials.lineage import MICRO_BATCH
from optuna_dsat.trials.lineage_cache import StudyHistory, read_history

__all__ = ["GuidedSampler"]


class GuidedSampler(BinarySearchSampler):
    """Plans every launch from what is known of DeepSpeed and of the launches before.

    After the profile launch the landscape is known but for a few coefficients: memory is nearly linear in the
    micro-batch, the step time is computation plus communication plus the optimizer step. Each launch measures peak
    memory and the phases of a step; the coefficients are fitted to these, what the formulas miss is learnt per
    structure (ZeRO stage and offload), knob and lineage, and of all configurations the one with the largest expected
    improvement per second is launched, the risk to run out of memory priced in. The formulas and their sources are in
    ``optuna_dsat.guided.planner`` (which launch is next), ``optuna_dsat.cost.step_time`` (times) and
    ``optuna_dsat.cost.memory_posterior`` (memory).

    Nothing is drawn at random: the plan follows from the study's trials alone, so a study that is resumed goes on as if
    never stopped. A launch in flight counts as if measured as foreseen, and its lineage is left alone. Trials of
    lineages outside the space, and whatever failed for a reason that is not the configuration's, are passed over.

    Trials are read through the user attributes ``metrics`` and ``peak_memory_bytes``
    (``optuna_dsat.trials.attributes``). Where they are not set, the value alone teaches: less, but enough to go on.

    Without a ``planner`` there is nothing to plan with, and lineages are bisected as ``BinarySearchSampler`` does; so
    are those that the planner does not know.

    Example:
        .. code-block:: python

            planner = GuidedPlanner(Problem(profile=profile, hardware=hardware, config=ds_config, space=space))
            study = optuna.create_study(direction="maximize", sampler=GuidedSampler(planner=planner))
            trial = study.ask()
            params = space.suggest(trial)

    Args:
        planner: The space with its theory; its micro-batch has the name ``train_micro_batch_size_per_gpu``.
        search_range_factor: See ``BinarySearchSampler``.
        max_micro_batch: Likewise.
        usual: Likewise.
        micro_batch: Name of the micro-batch's parameter.
        seed: Seed of the draws where nothing is foreseen.

    Raises:
        ValueError: If the micro-batch has another name than the planner's.
    """

    def __init__(
        self,
        *,
        planner: GuidedPlanner | None = None,
        search_range_factor: float = 1.0,
        max_micro_batch: MaxMicroBatch | None = None,
        usual: Usual | None = None,
        micro_batch: str = MICRO_BATCH,
        seed: int | None = None,
    ) -> None:
        super().__init__(
            search_range_factor=search_range_factor,
            max_micro_batch=max_micro_batch,
            usual=usual,
            micro_batch=micro_batch,
            seed=seed,
        )
        if planner is not None and micro_batch != MICRO_BATCH:
            raise ValueError(f"micro_batch is {micro_batch!r}; with a planner it must be {MICRO_BATCH!r}")
        self._planner = planner

    def exhausted(self, study: Study, classes: int | None = None) -> bool:
        """Return whether nothing is foreseen to be worth a launch, with what is in flight taken as measured.

        Args:
            study: The study.
            classes: Number of lineages of the space, for a sampler without a planner.
        """
        if self._planner is None:
            return super().exhausted(study, classes)
        history = read_history(study, micro_batch=self._name)
        return self._planner.next(history.trials) is None

    def _plan(
        self, study: Study, trial: FrozenTrial, history: StudyHistory, fixed: Mapping[str, Any]
    ) -> dict[str, Any]:
        candidate = None if self._planner is None else self._planner.next(history.trials, fixed)
        if candidate is None:
            return super()._plan(study, trial, history, fixed)
        return {
            "draw": trial.number,
            "lineage": dict(candidate.params),
            "micro_batch": candidate.micro_batch,
            "low": candidate.micro_batch,
            "high": candidate.largest,
        }
