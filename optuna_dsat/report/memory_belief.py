"""What a search believed about memory: the model by which it chose micro-batches, corrected by what launches showed.

``guided`` corrects the formulas of ``optuna_dsat.cost.memory`` by the posterior of
``optuna_dsat.cost.memory_posterior``, which earlier studies shape, too; the other methods by the fit of
``optuna_dsat.cost.memory_fit``. A launch is judged by what was believed when it was asked for: by the launches that had
ended by then, never by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from optuna.trial import FrozenTrial

from optuna_dsat.config import ds_config
from optuna_dsat.config.knobs import NVME, OFFLOAD_OPTIMIZER, OFFLOAD_PARAM, ZERO_STAGE
from optuna_dsat.config.structures import Structure
from optuna_dsat.cost import memory
from optuna_dsat.cost.memory_fit import CorrectionFit
from optuna_dsat.guided.planner import GuidedPlanner
from optuna_dsat.study.profiled import Profiled
from optuna_dsat.study.space import hardware_of
from optuna_dsat.study.stored import StoredStudy
from optuna_dsat.trials import attributes
from optuna_dsat.trials.lineage import MICRO_BATCH, visible_params

__all__ = ["BelievedPeak", "BelievedStructure", "MemoryBelief"]


@dataclass(frozen=True, kw_only=True)
class BelievedPeak:
    """The expected peak of a launch when it was asked for."""

    believed_bytes: int
    """As the search believed."""
    formula_bytes: int
    """By the formulas alone, without any correction."""
    moment: str
    """Moment of the step at which the formulas have the peak."""
    corrected: bool
    """Whether launches, of this study or of earlier ones, had corrected the formulas."""


@dataclass(frozen=True, kw_only=True)
class BelievedStructure:
    """What the search believes of a structure with the user's other settings, after all launches so far."""

    believed_bytes: int
    """Peak of one rank at micro-batch 1."""
    formula_bytes: int
    """Likewise by the formulas alone."""
    host_bytes: int
    """Memory of one host at micro-batch 1; formulas alone, as launches do not measure it."""
    largest: int
    """Largest micro-batch that is expected to fit; 0 if none is."""
    corrected: bool
    """Whether launches had corrected the formulas."""


class _Model(Protocol):
    """The memory model of a search method."""

    def learn(self, trials: Sequence[FrozenTrial]) -> None:
        """Add finished trials."""

    def peak(self, params: Mapping[str, Any], config: Mapping[str, Any], micro_batch: int) -> int | None:
        """Return the expected bytes; None if nothing has corrected the formulas for this configuration."""

    def largest(self, params: Mapping[str, Any], config: Mapping[str, Any]) -> int | None:
        """Return the largest micro-batch expected to fit; None likewise."""


class _Fitted:
    """The model of ``random``, ``binary`` and ``asha``."""

    def __init__(self, profile: memory.ModelProfile, hardware: memory.Hardware) -> None:
        self._profile, self._hardware = profile, hardware
        self._fit = CorrectionFit(profile, hardware)

    def learn(self, trials: Sequence[FrozenTrial]) -> None:
        self._fit.add(attributes.measured_peaks(trials))

    def peak(self, params: Mapping[str, Any], config: Mapping[str, Any], micro_batch: int) -> int | None:  # noqa: ARG002
        if not len(self._fit):
            return None
        correction = self._fit.correction()
        found = memory.estimate(
            self._profile, config, micro_batch=micro_batch, hardware=self._hardware, correction=correction
        )
        return found.device_bytes

    def largest(self, params: Mapping[str, Any], config: Mapping[str, Any]) -> int | None:  # noqa: ARG002
        if not len(self._fit):
            return None
        correction = self._fit.correction()
        return memory.largest_micro_batch(self._profile, config, hardware=self._hardware, correction=correction)


class _Planned:
    """The model of ``guided``."""

    def __init__(self, planner: GuidedPlanner) -> None:
        self._planner = planner
        self._known: list[FrozenTrial] = []

    def learn(self, trials: Sequence[FrozenTrial]) -> None:
        self._known += trials

    @property
    def _informed(self) -> bool:
        table, earlier = self._planner.problem.table, self._planner.problem.prior_observations
        return bool(len(earlier.row) or len(table.observations_of_trials(self._known).row))

    def peak(self, params: Mapping[str, Any], config: Mapping[str, Any], micro_batch: int) -> int | None:  # noqa: ARG002
        return self._planner.expected_peaks(self._known, [(params, micro_batch)])[0] if self._informed else None

    def largest(self, params: Mapping[str, Any], config: Mapping[str, Any]) -> int | None:  # noqa: ARG002
        return self._planner.expected_edges(self._known, [params])[0] if self._informed else None


class MemoryBelief:
    """What the search of one study believed about memory.

    Args:
        study: The study.
        profiled: Result of its profile launch.
    """

    def __init__(self, study: StoredStudy, profiled: Profiled) -> None:
        self._study = study
        self._profile = profiled.profile
        self._hardware = hardware_of(study.spec, profiled)
        self._space = study.space

    def _model(self) -> _Model:
        """Return the method's model before any launch of this study."""
        if self._study.spec.method != "guided" or self._study.planner is None:
            return _Fitted(self._profile, self._hardware)
        return _Planned(self._study.planner)

    @cached_property
    def peaks(self) -> Mapping[int, BelievedPeak]:
        """The expected peaks by number of the trial, of all that have a config."""
        model, found = self._model(), {}
        for trial, new in _with_what_was_known(self._study.trials):
            model.learn(new)
            config = trial.user_attrs[attributes.CONFIG]
            micro_batch = int(config[MICRO_BATCH])
            formula = memory.estimate(self._profile, config, micro_batch=micro_batch, hardware=self._hardware)
            params = {name: value for name, value in visible_params(trial).items() if name != MICRO_BATCH}
            believed = model.peak(params, config, micro_batch)
            found[trial.number] = BelievedPeak(
                believed_bytes=formula.device_bytes if believed is None else believed,
                formula_bytes=formula.device_bytes,
                moment=formula.moment,
                corrected=believed is not None,
            )
        return found

    def structures(self, structures: Sequence[Structure]) -> Iterator[BelievedStructure]:
        """Yield what is believed of structures now."""
        model, spec = self._model(), self._study.spec
        model.learn([trial for trial in self._study.trials if trial.state.is_finished()])
        base = ds_config.effective(spec.ds_config)
        for structure in structures:
            params = self._params(structure)
            if params is None:
                config = ds_config.merge(base, {ds_config.ZERO: structure.zero_section(nvme_path=spec.nvme_path)})
            else:
                smallest = self._space.micro_batches[0]
                config = ds_config.merge(base, self._space.overlay({**params, MICRO_BATCH: smallest}))
            formula = memory.estimate(self._profile, config, micro_batch=1, hardware=self._hardware)
            believed = None if params is None else model.peak(params, config, 1)
            largest = None if params is None else model.largest(params, config)
            if largest is None:
                largest = memory.largest_micro_batch(self._profile, config, hardware=self._hardware)
            on_host = formula.host_bytes if self._hardware.device != "cpu" else 0
            yield BelievedStructure(
                believed_bytes=formula.device_bytes if believed is None else believed,
                formula_bytes=formula.device_bytes,
                host_bytes=formula.host_bytes,
                largest=largest if on_host <= self._hardware.host_memory_bytes else 0,
                corrected=believed is not None,
            )

    def _params(self, structure: Structure) -> dict[str, Any] | None:
        """Return the structure as knobs of the search space; None if it lies outside."""
        on_nvme = "nvme" in (structure.offload_optimizer, structure.offload_param)
        wanted = {
            ZERO_STAGE: structure.stage,
            OFFLOAD_OPTIMIZER: "none" if structure.offload_optimizer == "none" else "cpu",
            OFFLOAD_PARAM: structure.offload_param,
            NVME: on_nvme,
        }
        if structure.stage not in self._space.stages:
            return None
        params = self._space.completed(wanted)
        config = self._space.overlay({**params, MICRO_BATCH: self._space.micro_batches[0]})
        whole = ds_config.merge(ds_config.effective(self._study.spec.ds_config), config)
        return params if Structure.of(whole) == structure else None


def _with_what_was_known(trials: Sequence[FrozenTrial]) -> Iterator[tuple[FrozenTrial, list[FrozenTrial]]]:
    """Yield the trials that have a config as they were asked for, each with those that ended since the one before."""
    begun = [trial for trial in trials if attributes.CONFIG in trial.user_attrs and trial.datetime_start is not None]
    ended = [trial for trial in trials if trial.state.is_finished() and trial.datetime_complete is not None]
    begun.sort(key=lambda trial: (trial.datetime_start, trial.number))
    ended.sort(key=lambda trial: (trial.datetime_complete, trial.number))
    for trial in begun:
        count = 0
        while count < len(ended) and _at(ended[count].datetime_complete) <= _at(trial.datetime_start):
            count += 1
        yield trial, ended[:count]
        ended = ended[count:]


def _at(moment: Any) -> float:
    return float(moment.timestamp())
