"""What the search believes about the memory of every ZeRO stage and offload, beside what trials ran."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from optuna.trial import FrozenTrial

from optuna_dsat.config.structures import STRUCTURES, Structure
from optuna_dsat.report.view import StudyView
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.trials import attributes
from optuna_dsat.trials.lineage import MICRO_BATCH, Feasibility, feasibility

__all__ = ["MemoryRow", "memory_table"]


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """Memory of one structure with the user's other settings: believed now, by the formulas alone, and observed."""

    words: str
    """The structure in words."""
    device_bytes: int
    """Peak of one rank at micro-batch 1, as the search believes after all launches so far."""
    formula_bytes: int
    """Likewise by the formulas alone, without any correction."""
    host_bytes: int
    """Memory of one host at micro-batch 1, by the formulas alone."""
    largest: int
    """Largest micro-batch that the search expects to fit, not below ``ran`` and, where nothing larger ran, below
    ``too_large``; 0 if none does.
    """
    ran: int | None
    """Largest micro-batch that ran; None if none did."""
    too_large: int | None
    """Smallest micro-batch that ran out of memory; None if none did."""


def memory_table(view: StudyView) -> tuple[MemoryRow, ...]:
    """Return one row for each structure at the study's ZeRO stages; empty before the profile launch has ended."""
    if view.memory is None:
        return ()
    shown, structures = _evidence(view.trials), list(_structures(view.spec))
    rows = []
    for structure, believed in zip(structures, view.memory.structures(structures), strict=True):
        fits, too_large = shown.get(structure, ([], []))
        least, most = max(fits, default=0), min(too_large, default=believed.largest + 1) - 1
        rows.append(
            MemoryRow(
                words=structure.words,
                device_bytes=believed.believed_bytes,
                formula_bytes=believed.formula_bytes,
                host_bytes=believed.host_bytes,
                largest=max(least, min(most, believed.largest)),
                ran=max(fits, default=None),
                too_large=min(too_large, default=None),
            )
        )
    return tuple(rows)


def _structures(spec: StudySpec) -> Iterator[Structure]:
    """Yield the structures of the study's stages, those that offload to NVMe after those of the same stage on the CPU.

    DeepSpeed offloads to NVMe at ZeRO 3 only.
    """
    for stage in sorted(set(spec.zero_stages)):
        of_stage = [one for one in STRUCTURES if one.stage == stage]
        yield from of_stage
        if stage == 3 and spec.nvme_path is not None:
            yield from (one.on_nvme() for one in of_stage if one.offloads)


def _evidence(trials: Sequence[FrozenTrial]) -> Mapping[Structure, tuple[list[int], list[int]]]:
    """Return structure -> micro-batches that fitted, micro-batches that ran out of memory."""
    found: dict[Structure, tuple[list[int], list[int]]] = {}
    for trial in trials:
        config = trial.user_attrs.get(attributes.CONFIG)
        if config is None:
            continue
        fits, too_large = found.setdefault(Structure.of(config), ([], []))
        shown = feasibility(trial)
        if shown is Feasibility.FITS:
            fits.append(int(config[MICRO_BATCH]))
        elif shown is Feasibility.TOO_LARGE:
            too_large.append(int(config[MICRO_BATCH]))
    return found
