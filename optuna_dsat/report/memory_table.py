"""Memory of each ZeRO stage and offload: predictions of the formulas, and the micro-batches that trials ran."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from optuna.trial import FrozenTrial

from optuna_dsat.config import ds_config
from optuna_dsat.config.structures import STRUCTURES, Structure
from optuna_dsat.cost import memory
from optuna_dsat.report.view import StudyView
from optuna_dsat.study.space import hardware_of
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.trials import attributes
from optuna_dsat.trials.lineage import MICRO_BATCH, Feasibility, feasibility


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """Predicted and observed memory of a structure with the user's other settings."""

    words: str
    """Description of the structure."""
    device_bytes: int
    """Peak of a rank at micro-batch 1, by the formulas, without correction by launches."""
    host_bytes: int
    """Memory of a host at micro-batch 1, likewise."""
    ran: int | None
    """Largest micro-batch that ran, or None."""
    too_large: int | None
    """Smallest micro-batch that ran out of memory, or None."""


def memory_table(view: StudyView) -> tuple[MemoryRow, ...]:
    """Return a row for each structure at the study's ZeRO stages; empty before the end of the profile launch."""
    if view.profiled is None:
        return ()
    tried, base = _tried(view.trials), ds_config.effective(view.spec.ds_config)
    profile, hardware = view.profiled.profile, hardware_of(view.spec, view.profiled)
    swap_settings = memory.swap_settings(profile, base, hardware)
    rows = []
    for structure in _structures(view.spec):
        fits, too_large = tried.get(structure, ([], []))
        zero = structure.zero_section(nvme_path=view.spec.nvme_folder, swap_settings=swap_settings)
        config = ds_config.merge(base, {ds_config.ZERO: zero})
        predicted = memory.estimate(profile, config, micro_batch=1, hardware=hardware)
        rows.append(
            MemoryRow(
                words=structure.words,
                device_bytes=predicted.device_bytes,
                host_bytes=predicted.host_bytes,
                ran=max(fits, default=None),
                too_large=min(too_large, default=None),
            )
        )
    return tuple(rows)


def _structures(spec: StudySpec) -> Iterator[Structure]:
    """Yield the structures of the study's stages; within a stage, NVMe offload follows CPU offload.

    DeepSpeed supports NVMe offload at ZeRO 3 only.
    """
    for stage in sorted(set(spec.stages)):
        of_stage = [structure for structure in STRUCTURES if structure.stage == stage]
        yield from of_stage
        if stage == 3 and spec.nvme_path is not None:
            yield from (structure.on_nvme() for structure in of_stage if structure.offloads)


def _tried(trials: Sequence[FrozenTrial]) -> Mapping[Structure, tuple[list[int], list[int]]]:
    """Return structure -> (micro-batches that fitted, micro-batches that ran out of memory)."""
    result: dict[Structure, tuple[list[int], list[int]]] = {}
    for trial in trials:
        config = trial.user_attrs.get(attributes.CONFIG)
        if config is None:
            continue
        fits, too_large = result.setdefault(Structure.of(config), ([], []))
        shown = feasibility(trial)
        if shown is Feasibility.FITS:
            fits.append(int(config[MICRO_BATCH]))
        elif shown is Feasibility.TOO_LARGE:
            too_large.append(int(config[MICRO_BATCH]))
    return result
