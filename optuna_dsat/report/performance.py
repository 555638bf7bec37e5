"""Performance of a configuration, and time and cost of a whole training with it: the figures of the report's cards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from optuna_dsat.cost.utilisation import utilisation
from optuna_dsat.report.view import StudyView
from optuna_dsat.study.confirm.rows import configuration_of
from optuna_dsat.study.confirm.standing import Standing
from optuna_dsat.study.space import epoch_samples
from optuna_dsat.trials import attributes

__all__ = ["Performance", "Training", "TrainingTime", "performance_of", "training_times"]


@dataclass(frozen=True, kw_only=True)
class Performance:
    """Measured performance of a study's configuration: in rounds if it was confirmed, else in the search."""

    standing: Standing
    words: str
    """Its configuration."""
    train_batch_size: int
    """Its global batch, in samples."""
    samples_per_s: float | None
    """Over all ranks."""
    tokens_per_s: float | None
    """Over all ranks; None if the inputs are not known to be tokens."""
    step_s: float | None
    """Seconds of an optimizer step, end to end."""
    peak_bytes: int
    """Peak device memory of the worst rank; 0 if unknown."""
    device_bytes: int
    """Memory available to a rank; 0 if unknown."""
    flops_per_gpu: float | None
    """FLOP/s of a device; None if the FLOPs could not be counted."""
    utilisation: float | None
    """Share of the device's peak FLOPS; None if the peak is unknown."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """A whole training as described by the user."""

    epochs: float = 1.0
    price_per_gpu_hour: float | None = None
    """In any currency; None if not given."""
    dataset_size: int | None = None
    """Samples of the training data; None for the study's number."""


@dataclass(frozen=True, kw_only=True)
class TrainingTime:
    """Time of a whole training with the user's own config and with the result."""

    samples: int
    """Samples of the training data."""
    epochs: float
    slots: int
    """Devices of the training."""
    own_s: float
    best_s: float
    price_per_gpu_hour: float | None

    @property
    def saved_slot_hours(self) -> float:
        """Device hours saved by the result, over all devices."""
        return (self.own_s - self.best_s) * self.slots / 3600

    @property
    def price(self) -> float | None:
        """Cost of the training with the result; None without a price."""
        hours = self.best_s * self.slots / 3600
        return None if self.price_per_gpu_hour is None else hours * self.price_per_gpu_hour

    @property
    def saved_price(self) -> float | None:
        """Price of the saved device hours; None without a price per hour."""
        return None if self.price_per_gpu_hour is None else self.saved_slot_hours * self.price_per_gpu_hour


def performance_of(view: StudyView, standing: Standing) -> Performance:
    """Return the performance of a study's measured configuration."""
    trial = standing.trial
    metrics = {**view.metrics_of(standing), view.metric: standing.value}
    profile = None if view.profiled is None else view.profiled.profile
    return Performance(
        standing=standing,
        words=configuration_of(trial),
        train_batch_size=attributes.train_batch_size(trial, slots=view.spec.slots_per_trial),
        samples_per_s=metrics.get("throughput"),
        tokens_per_s=_tokens_per_s(view, metrics),
        step_s=metrics.get("latency"),
        peak_bytes=int(trial.user_attrs.get(attributes.PEAK_BYTES) or 0),
        device_bytes=0 if profile is None else profile.device_memory_bytes,
        flops_per_gpu=metrics.get("FLOPS_per_gpu") or None,
        utilisation=None if profile is None else utilisation(profile, trial.user_attrs[attributes.CONFIG], metrics),
    )


def _tokens_per_s(view: StudyView, metrics: Mapping[str, float]) -> float | None:
    if "tokens_per_s" in metrics:  # inputs vary in size
        return metrics["tokens_per_s"]
    if view.tokens_per_sample is None or not metrics.get("throughput"):
        return None
    return metrics["throughput"] * view.tokens_per_sample


def training_times(view: StudyView, training: Training) -> TrainingTime | None:
    """Return the time of a whole training with both configs; None if the data's size or a speed is unknown.

    Both train on the same samples. They may need different numbers of samples to reach the same loss.
    """
    samples = training.dataset_size or epoch_samples(view.spec, view.profiled)
    if samples is None or view.best is None or view.baseline is None:
        return None
    own, best = (performance_of(view, one).samples_per_s for one in (view.baseline, view.best))
    if not own or not best:
        return None
    total = samples * training.epochs
    return TrainingTime(
        samples=samples,
        epochs=training.epochs,
        slots=view.spec.slots_per_trial,
        own_s=total / own,
        best_s=total / best,
        price_per_gpu_hour=training.price_per_gpu_hour,
    )
