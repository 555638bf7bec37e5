"""How much training data there is, and what that means for the global batch."""

from __future__ import annotations

from optuna_dsat.study.profiled import Profiled
from optuna_dsat.study.spec import StudySpec

__all__ = ["LARGEST_SHARE", "dataset_size", "largest_global_batch"]

LARGEST_SHARE = 10
"""By default no global batch is searched beyond the samples divided by this: fewer steps an epoch train no model."""


def dataset_size(spec: StudySpec, profiled: Profiled | None) -> int | None:
    """Return the samples of the training data: as the user says, else as the script's data loader tells.

    None if neither does.
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
