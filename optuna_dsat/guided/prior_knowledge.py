"""Prior knowledge: measurements and fitted coefficients of an earlier study, compact enough to store with a new study.

Two kinds of knowledge are reused, each discounted:

- the coefficients of the step-time model, with their covariance: a machine's links, memory and processors are the same
  for every model trained on it. The covariance is widened: slightly if model and machine are the same (conditions
  vary between days), more if the model differs, and by the entire prior for coefficients that depend on the model;
- launches of the same model on the same machine: peaks and out-of-memory results as if measured now, because they are
  reproducible to a fraction of a per cent; times with the errors of ``optuna_dsat.guided.residual_gp`` for earlier
  studies.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from optuna.trial import FrozenTrial

from optuna_dsat.config import ds_config
from optuna_dsat.config.record import Record
from optuna_dsat.cost.step_time import COEFFICIENTS, LogCoefficients, StepTimeModel
from optuna_dsat.outcome import Outcome
from optuna_dsat.trials import attributes
from optuna_dsat.trials.lineage import MICRO_BATCH, Feasibility, feasibility, visible_params

_SAME_MODEL_SD = 0.1
"""Standard deviation added to a coefficient's logarithm if model and machine are the same."""
_OTHER_MODEL_SD = 0.3
"""Standard deviation added if the model differs, for coefficients of the machine."""
_MODEL_COEFFICIENTS = frozenset(
    {"speed", "idle", "modules", "ahead", "hooks", "fetch", "other", "pressure", "steepness", "edge"}
)
"""Coefficients that depend on the model and not only on the machine."""
_MAX_LAUNCHES = 60
"""Largest number of launches reused from a study: the fastest, then out-of-memory launches, then others."""


@dataclass(frozen=True, kw_only=True)
class EarlierLaunch:
    """A launch of an earlier study."""

    params: Mapping[str, Any]
    """Knobs without the batch sizes."""
    micro_batch: int
    accumulation: int | None = None
    """Its accumulation steps; None if unknown."""
    fits: bool
    """Whether a full step ran; otherwise the device ran out of memory."""
    metrics: Mapping[str, float]
    """Measured metrics by name; empty if none."""
    peak_bytes: int | None = None
    """Peak device memory of the worst rank, None if not measured."""


@dataclass(frozen=True, kw_only=True)
class PriorKnowledge(Record):
    """Knowledge from earlier studies, before discounting."""

    studies: tuple[str, ...]
    """Names of the studies."""
    same_model: bool
    """Whether they trained the same model on the same machine; else only the machine is the same."""
    coefficients: tuple[str, ...]
    """Names of the coefficients."""
    mean: tuple[float, ...]
    """Means of the coefficients' logarithms."""
    covariance: tuple[tuple[float, ...], ...]
    """Covariance of the coefficients' logarithms."""
    launches: tuple[EarlierLaunch, ...] = ()
    """Launches of the same model; empty for another model."""

    @classmethod
    def of(
        cls, fitted: LogCoefficients, *, studies: Sequence[str], same_model: bool, untold: Collection[str] = ()
    ) -> PriorKnowledge:
        """Build from the last study's fitted coefficients; ``same_model``: on the same model and machine."""
        parts = [index for index, name in enumerate(COEFFICIENTS) if name not in untold]
        return cls(
            studies=tuple(studies),
            same_model=same_model,
            coefficients=tuple(COEFFICIENTS[index] for index in parts),
            mean=tuple(float(fitted.mean[index]) for index in parts),
            covariance=tuple(tuple(float(fitted.covariance[row, index]) for index in parts) for row in parts),
        )

    def prior(self, step_time: StepTimeModel) -> LogCoefficients:
        """Return the discounted prior for a new study; other coefficients keep the model's prior."""
        usual = step_time.prior_coefficients()
        mean, covariance = usual.mean.copy(), usual.covariance.copy()
        known = [name for name in COEFFICIENTS if name in self.coefficients]
        here = np.array([COEFFICIENTS.index(name) for name in known])
        there = np.array([self.coefficients.index(name) for name in known])
        spread = np.sqrt(np.diag(usual.covariance))[here]
        wider = np.full(len(known), _SAME_MODEL_SD if self.same_model else _OTHER_MODEL_SD)
        if not self.same_model:
            models = np.array([name in _MODEL_COEFFICIENTS for name in known])
            wider = np.where(models, spread, wider)
        mean[here] = np.array(self.mean)[there]
        covariance[here] = covariance[:, here] = 0.0
        covariance[np.ix_(here, here)] = np.array(self.covariance)[np.ix_(there, there)] + np.diag(wider**2)
        return LogCoefficients(mean=mean, covariance=covariance)

    def in_words(self) -> str:
        """Return a line for users that describes the reused knowledge and how to disable it."""
        names = " and ".join(self.studies)
        if not self.same_model:
            return (
                f"Warm start from {names}: what its launches taught of this hardware (links, copies, optimizer) is "
                "taken over, widened; its model is another, so none of its measurements are (--no-warm-start begins "
                "without)."
            )
        return (
            f"Warm start from {names} (same script, config and hardware): fitted coefficients and {len(self.launches)} "
            "launches are taken over, with less weight than those of today (--no-warm-start begins without)."
        )


def launches_of(trials: Sequence[FrozenTrial]) -> list[EarlierLaunch]:
    """Return the launches of a study that show memory use or speed, at most ``_MAX_LAUNCHES``."""
    launches = []
    for trial in trials:
        shown = feasibility(trial)
        params = visible_params(trial)
        size = params.pop(MICRO_BATCH, None)
        params.pop(ds_config.GRADIENT_ACCUMULATION, None)
        steps = trial.user_attrs.get(attributes.CONFIG, {}).get(ds_config.GRADIENT_ACCUMULATION)
        if shown not in (Feasibility.FITS, Feasibility.TOO_LARGE) or not isinstance(size, int) or not params:
            continue
        if shown is Feasibility.TOO_LARGE and trial.user_attrs.get(attributes.OUTCOME) != Outcome.OUT_OF_MEMORY:
            continue
        metrics = dict(trial.user_attrs.get(attributes.METRICS) or {})
        metrics = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
        peak = trial.user_attrs.get(attributes.PEAK_BYTES)
        launches.append(
            EarlierLaunch(
                params=params,
                micro_batch=size,
                accumulation=steps if isinstance(steps, int) else None,
                fits=shown is Feasibility.FITS,
                metrics=metrics,
                peak_bytes=peak,
            )
        )
    if len(launches) <= _MAX_LAUNCHES:
        return launches
    half = _MAX_LAUNCHES // 2
    fastest = sorted(launches, key=lambda launch: -launch.metrics.get("throughput", -math.inf))[:half]
    edge = sorted((launch for launch in launches if launch not in fastest), key=lambda launch: launch.fits)[:half]
    return [launch for launch in launches if launch in fastest or launch in edge]
