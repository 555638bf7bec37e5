"""Launches the configuration that a fitted cost model and memory model promise most of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optuna.study import Study
from optuna.trial import FrozenTrial

from optuna_dsat.foresight import Foresight
from optuna_dsat.lineage import MICRO_BATCH
from optuna_dsat.lineage_history import StudyHistory, read_history
from optuna_dsat.samplers._base import MaxMicroBatch
from optuna_dsat.samplers._binary import BinarySearchSampler
from optuna_dsat.samplers._draw import Usual

__all__ = ["GuidedSampler"]


class GuidedSampler(BinarySearchSampler):
    """Plans every launch from what is known of DeepSpeed and of the launches before.

    After the profile launch the landscape is known but for a few coefficients: memory is nearly linear in the
    micro-batch, the step time is computation plus communication plus the optimizer step. Each launch measures peak
    memory and the phases of a step; the coefficients are fitted to these, what the formulas miss is learnt per
    structure (ZeRO stage and offload), knob and lineage, and of all configurations the one with the largest expected
    improvement per second is launched, the risk to run out of memory priced in. The formulas and their sources are in
    ``optuna_dsat.foresight`` (which launch is next), ``optuna_dsat.step_theory`` (times) and
    ``optuna_dsat.memory_belief`` (memory).

    Nothing is drawn at random: the plan follows from the study's trials alone, so a study that is resumed goes on as if
    never stopped. A launch in flight counts as if measured as foreseen, and its lineage is left alone. Trials of
    lineages outside the space, and whatever failed for a reason that is not the configuration's, are passed over.

    Trials are read through the user attributes ``metrics`` and ``peak_memory_bytes`` (``optuna_dsat.history``). Where
    they are not set, the value alone teaches: less, but enough to go on.

    Without a ``foresight`` there is nothing to plan with, and lineages are bisected as ``BinarySearchSampler`` does; so
    are those that the foresight does not know.

    Example:
        .. code-block:: python

            foresight = Foresight(profile=profile, hardware=hardware, config=ds_config, space=space)
            study = optuna.create_study(direction="maximize", sampler=GuidedSampler(foresight=foresight))
            trial = study.ask()
            params = space.suggest(trial)

    Args:
        foresight: The space with its theory; its micro-batch has the name ``train_micro_batch_size_per_gpu``.
        search_range_factor: See ``BinarySearchSampler``.
        max_micro_batch: Likewise.
        usual: Likewise.
        micro_batch: Name of the micro-batch's parameter.
        seed: Seed of the draws where nothing is foreseen.

    Raises:
        ValueError: If the micro-batch has another name than the foresight's.
    """

    def __init__(
        self,
        *,
        foresight: Foresight | None = None,
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
        if foresight is not None and micro_batch != MICRO_BATCH:
            raise ValueError(f"micro_batch is {micro_batch!r}; with a foresight it must be {MICRO_BATCH!r}")
        self._foresight = foresight

    def exhausted(self, study: Study, classes: int | None = None) -> bool:
        """Return whether nothing is foreseen to be worth a launch, with what is in flight taken as measured.

        Args:
            study: The study.
            classes: Number of lineages of the space, for a sampler without foresight.
        """
        if self._foresight is None:
            return super().exhausted(study, classes)
        history = read_history(study, micro_batch=self._name)
        return self._foresight.next(history.trials) is None

    def _plan(
        self, study: Study, trial: FrozenTrial, history: StudyHistory, fixed: Mapping[str, Any]
    ) -> dict[str, Any]:
        prospect = None if self._foresight is None else self._foresight.next(history.trials, fixed)
        if prospect is None:
            return super()._plan(study, trial, history, fixed)
        return {
            "draw": trial.number,
            "lineage": dict(prospect.params),
            "micro_batch": prospect.micro_batch,
            "low": prospect.micro_batch,
            "high": prospect.largest,
        }
