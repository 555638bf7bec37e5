"""What an earlier study taught, small enough to be stored with the study that begins with it.

Two kinds of knowledge are taken over, each discounted:

- the coefficients of the step theory, with their covariance: a machine's links, memory and processors are the same for
  every model on it. Their covariance is widened: a little where model and machine are the same (it was another day), by
  more where the model is another, and for coefficients that are the model's own by their whole prior;
- launches of the same model on the same machine: peaks and out-of-memory as if measured now, for they repeat to a
  fraction of a per cent; times with the errors that ``optuna_dsat.guided.residual_gp`` gives to an earlier study.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from optuna.trial import FrozenTrial

from optuna_dsat.cost.step_time import COEFFICIENTS, Fitted, StepTimeModel
from optuna_dsat.trials import attributes
from optuna_dsat.trials.lineage import MICRO_BATCH, Feasibility, feasibility, visible_params

__all__ = ["Launched", "PriorKnowledge", "launches_of"]

_ANOTHER_DAY = 0.1
"""Widening of a coefficient's logarithm where model and machine are the same."""
_ANOTHER_MODEL = 0.3
"""Likewise, where the model is another: of what belongs to the machine."""
_OF_THE_MODEL = frozenset(
    {"speed", "idle", "modules", "ahead", "hooks", "fetch", "other", "pressure", "steepness", "edge"}
)
"""Coefficients that depend on the model as much as on the machine."""
_MOST_LAUNCHES = 60
"""Launches of one study that are taken over: the fastest, and the largest and smallest that tell the edge."""


@dataclass(frozen=True, kw_only=True)
class Launched:
    """One launch of an earlier study."""

    params: Mapping[str, Any]
    """Knobs without the micro-batch."""
    micro_batch: int
    fits: bool
    """Whether a full step was run; else the device ran out of memory."""
    metrics: Mapping[str, float]
    """What was measured; empty for nothing."""
    peak_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class PriorKnowledge:
    """What earlier studies taught."""

    studies: tuple[str, ...]
    """Their names."""
    same_model: bool
    coefficients: tuple[str, ...]
    mean: tuple[float, ...]
    """Logarithms of the coefficients."""
    covariance: tuple[tuple[float, ...], ...]
    launches: tuple[Launched, ...] = ()
    """Of the same model; none of another."""

    def to_json(self) -> dict[str, Any]:
        """Return what ``from_json`` reads back."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> PriorKnowledge:
        """Build from what ``to_json`` returned."""
        return cls(
            studies=tuple(record["studies"]),
            same_model=bool(record["same_model"]),
            coefficients=tuple(record["coefficients"]),
            mean=tuple(record["mean"]),
            covariance=tuple(tuple(row) for row in record["covariance"]),
            launches=tuple(Launched(**launched) for launched in record["launches"]),
        )

    @classmethod
    def of(cls, fitted: Fitted, *, studies: Sequence[str], same_model: bool) -> PriorKnowledge:
        """Build from the coefficients that were fitted to the last of some studies; nothing is discounted yet."""
        return cls(
            studies=tuple(studies),
            same_model=same_model,
            coefficients=COEFFICIENTS,
            mean=tuple(float(value) for value in fitted.mean),
            covariance=tuple(tuple(float(value) for value in row) for row in fitted.covariance),
        )

    def prior(self, step_time: StepTimeModel) -> Fitted:
        """Return the coefficients to begin with, discounted; those not known here keep the theory's own.

        Args:
            step_time: The theory of the study that begins.
        """
        own = step_time.before()
        mean, covariance = own.mean.copy(), own.covariance.copy()
        known = [name for name in COEFFICIENTS if name in self.coefficients]
        here = np.array([COEFFICIENTS.index(name) for name in known])
        there = np.array([self.coefficients.index(name) for name in known])
        spread = np.sqrt(np.diag(own.covariance))[here]
        wider = np.full(len(known), _ANOTHER_DAY if self.same_model else _ANOTHER_MODEL)
        if not self.same_model:
            models = np.array([name in _OF_THE_MODEL for name in known])
            wider = np.where(models, spread, wider)
        mean[here] = np.array(self.mean)[there]
        covariance[here] = covariance[:, here] = 0.0
        covariance[np.ix_(here, here)] = np.array(self.covariance)[np.ix_(there, there)] + np.diag(wider**2)
        return Fitted(mean=mean, covariance=covariance)

    def in_words(self) -> str:
        """Return one line that says what is taken over, and how to do without."""
        names = " and ".join(self.studies)
        if not self.same_model:
            return (
                f"Warm start from {names}: what its launches taught of this hardware (links, copies, optimizer) is "
                "taken over, widened; its model is another, so none of its measurements are (--no-warm-start begins "
                "without)."
            )
        return (
            f"Warm start from {names} (same script, config and hardware): fitted coefficients and {len(self.launches)} "
            "launches are taken over, discounted as another day's (--no-warm-start begins without)."
        )


def launches_of(trials: Sequence[FrozenTrial]) -> list[Launched]:
    """Return what a study's trials say of memory and speed, at most ``_MOST_LAUNCHES`` of them."""
    found = []
    for trial in trials:
        says = feasibility(trial)
        params = visible_params(trial)
        size = params.pop(MICRO_BATCH, None)
        if says not in (Feasibility.FITS, Feasibility.TOO_LARGE) or not isinstance(size, int) or not params:
            continue
        if says is Feasibility.TOO_LARGE and trial.user_attrs.get(attributes.OUTCOME) != "out_of_memory":
            continue
        metrics = dict(trial.user_attrs.get(attributes.METRICS) or {})
        metrics = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
        peak = trial.user_attrs.get(attributes.PEAK_BYTES)
        found.append(
            Launched(params=params, micro_batch=size, fits=says is Feasibility.FITS, metrics=metrics, peak_bytes=peak)
        )
    if len(found) <= _MOST_LAUNCHES:
        return found
    half = _MOST_LAUNCHES // 2
    fastest = sorted(found, key=lambda one: -one.metrics.get("throughput", -math.inf))[:half]
    edge = sorted((one for one in found if one not in fastest), key=lambda one: one.fits)[:half]
    return [one for one in found if one in fastest or one in edge]
