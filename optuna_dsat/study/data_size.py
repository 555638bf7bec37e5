"""How much training data there is, and what that means for the global batch."""

from __future__ import annotations

from optuna_dsat.study.profiled import Profiled
from optuna_dsat.study.spec import StudySpec

__all__ = ["LARGEST_SHARE", "dataset_size", "epoch_samples", "largest_global_batch"]

LARGEST_SHARE = 10
"""By default no global batch is searched beyond the samples divided by this: fewer steps an epoch train no model."""


def dataset_size(spec: StudySpec, profiled: Profiled | None) -> int | None:
    """Return the samples of the training data; None if neither the user nor the script's data loader gives them.

    Data that each rank loads as a whole are counted once.
    """
    if spec.dataset_size is None and profiled is not None and profiled.loads_all:
        return profiled.samples_per_rank
    return epoch_samples(spec, profiled)


def epoch_samples(spec: StudySpec, profiled: Profiled | None) -> int | None:
    """Return the samples that all ranks are fed in an epoch; None if unknown.

    Divided by a global batch they are the steps of an epoch. Data that each rank loads as a whole count once per rank.
    """
    if spec.dataset_size is not None:
        return spec.dataset_size
    if profiled is None or profiled.samples_per_rank is None:
        return None
    return profiled.samples_per_rank * (profiled.data_parallel_size or spec.slots_per_trial)


def largest_global_batch(spec: StudySpec, profiled: Profiled | None, *, own: int) -> int | None:
    """Return the bound on the global batch, in samples; None if there is none.

    Args:
        spec: The study.
        profiled: Result of the profile launch; None before it.
        own: Global batch of the user's own config, which is never excluded by default.
    """
    if spec.max_train_batch_size is not None:
        return spec.max_train_batch_size
    samples = dataset_size(spec, profiled)
    return None if samples is None else max(own, samples // LARGEST_SHARE)
