"""Sampler that launches the configuration with the largest expected improvement under fitted cost models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optuna.study import Study
from optuna.trial import FrozenTrial

from optuna_dsat.samplers._binary import BinarySearchSampler
from optuna_dsat.trials.history import StudyHistory, read_history


class GuidedSampler(BinarySearchSampler):
    """Sampler that plans launches with models of DeepSpeed's memory and step time, fitted to all launches so far.

    After the profile launch only a few coefficients are unknown: memory is nearly linear in the micro-batch, the step
    time is computation plus communication plus the optimizer step. Each launch measures peak memory and the phases of a
    step. The coefficients are fitted to these measurements, and the error of the formulas is estimated per structure
    (ZeRO stage and offload), knob and lineage. The next launch has the largest expected improvement per second,
    weighted by its probability to fit in memory. The formulas and their sources are in ``optuna_dsat.guided.planner``
    (choice of the next launch), ``optuna_dsat.cost.step_time`` (times) and ``optuna_dsat.cost.memory_posterior``
    (memory).

    The plan is deterministic and depends on the study's trials only, so a resumed study continues as if never stopped.
    A running launch counts as if measured at its predicted metric, and no other launch of its lineage is planned.
    Trials of lineages outside the space, and trials that failed for unrelated reasons, are ignored.

    Trials are read through the user attributes ``metrics`` and ``peak_memory_bytes``
    (``optuna_dsat.trials.attributes``). Without them, the models are fitted to the trials' values, less precisely.

    Without a ``planner``, and outside the planner's space, lineages are bisected as by ``BinarySearchSampler``.

    Example:
        .. code-block:: python

            planner = GuidedPlanner(Problem(profile=profile, hardware=hardware, config=ds_config, space=space))
            study = optuna.create_study(direction="maximize", sampler=GuidedSampler(planner=planner))
            trial = study.ask()
            params = space.suggest(trial)

    Args:
        planner: The planner of the space; its micro-batch is named ``train_micro_batch_size_per_gpu``. None to bisect.
        search_range_factor: See ``BinarySearchSampler``.
        micro_batch: Name of the micro-batch's parameter.
        seed: Seed of the draws for lineages that the planner does not plan.
    """

    def exhausted(self, study: Study, classes: int | None = None) -> bool:
        """Return whether no candidate is worth a launch, with running launches counted as measured.

        Without a planner, ``classes`` is the number of lineages of the space.
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
            "reason": candidate.reason,
            "predicted": candidate.value,
        }
