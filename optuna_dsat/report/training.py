"""Time and price of a whole training with the result."""

from __future__ import annotations

from dataclasses import dataclass

from optuna_dsat.report.view import StudyView
from optuna_dsat.study.space import epoch_samples


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


def training_times(view: StudyView, training: Training) -> TrainingTime | None:
    """Return the time of a whole training with both configs; None if the data's size or a speed is unknown.

    Both train on the same samples. They may need different numbers of samples to reach the same loss.
    """
    samples = training.dataset_size or epoch_samples(view.spec, view.profiled)
    if samples is None or view.best is None or view.baseline is None:
        return None
    own, best = view.baseline.samples_per_s, view.best.samples_per_s
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
