"""What the memory model says of every ZeRO stage and offload, beside what the trials showed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optuna.trial import FrozenTrial

from optuna_dsat.config import ds_config
from optuna_dsat.cost import memory
from optuna_dsat.study.profile import Profiled
from optuna_dsat.study.space import hardware_of
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.trials import attributes
from optuna_dsat.trials.lineage import MICRO_BATCH, Evidence, evidence
from optuna_dsat.words import zero_in_words

__all__ = ["MemoryRow", "memory_table"]


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """One ZeRO stage with one offload."""

    words: str
    device_bytes: int
    """Predicted peak of one rank at micro-batch 1."""
    host_bytes: int
    """Predicted memory of one host at micro-batch 1."""
    largest: int
    """Largest micro-batch that the model predicts, 0 where none fits."""
    ran: int | None
    """Largest micro-batch that ran."""
    too_large: int | None
    """Smallest micro-batch that ran out of memory."""


def memory_table(spec: StudySpec, profiled: Profiled, trials: Sequence[FrozenTrial]) -> tuple[MemoryRow, ...]:
    """Return one row for each ZeRO stage of the study and each way of offloading at that stage.

    Args:
        spec: The study; its config supplies everything but stage and offload.
        profiled: What the profile launch taught.
        trials: The study's trials.
    """
    hardware = hardware_of(spec, profiled)
    profile = profiled.profile
    shown = _evidence(trials)
    rows = []
    for zero in _settings(spec):
        config = ds_config.merge(ds_config.effective(spec.ds_config), {"zero_optimization": zero})
        words = zero_in_words(config)
        estimate = memory.estimate(profile, config, micro_batch=1, hardware=hardware)
        fits, too_large = shown.get(words, ([], []))
        rows.append(
            MemoryRow(
                words=words,
                device_bytes=estimate.device_bytes,
                host_bytes=estimate.host_bytes,
                largest=memory.largest_micro_batch(profile, config, hardware=hardware),
                ran=max(fits, default=None),
                too_large=min(too_large, default=None),
            )
        )
    return tuple(rows)


def _settings(spec: StudySpec) -> Iterator[Mapping[str, Any]]:
    """Yield stage and offload: optimizer offload needs ZeRO, parameter offload ZeRO 3."""
    targets: list[dict[str, Any]] = [{"device": "cpu"}]
    if spec.nvme_path is not None:
        targets.append({"device": "nvme", "nvme_path": spec.nvme_path})
    for stage in sorted(set(spec.zero_stages)):
        yield {"stage": stage, "offload_optimizer": None, "offload_param": None}
        for target in targets if stage > 0 else []:
            if target["device"] == "cpu" or stage == 3:
                yield {"stage": stage, "offload_optimizer": target, "offload_param": None}
            if stage == 3:
                yield {"stage": stage, "offload_optimizer": None, "offload_param": target}
                yield {"stage": stage, "offload_optimizer": target, "offload_param": target}


def _evidence(trials: Sequence[FrozenTrial]) -> Mapping[str, tuple[list[int], list[int]]]:
    """Return stage and offload in words -> micro-batches that fitted, micro-batches that did not."""
    found: dict[str, tuple[list[int], list[int]]] = {}
    for trial in trials:
        config = trial.user_attrs.get(attributes.CONFIG)
        if config is None:
            continue
        fits, too_large = found.setdefault(zero_in_words(config), ([], []))
        shown = evidence(trial)
        if shown is Evidence.FITS:
            fits.append(int(config[MICRO_BATCH]))
        elif shown is Evidence.TOO_LARGE:
            too_large.append(int(config[MICRO_BATCH]))
    return found
