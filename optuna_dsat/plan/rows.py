"""A plan: predicted memory, largest micro-batch, predicted step and its bottleneck for each ZeRO stage and offload.

``optuna_dsat.cost.memory`` predicts the memory. Memory that torch's allocator does not count (context, libraries,
fragmentation) is left free, as in ``optuna_dsat.cost.memory_posterior``. ``optuna_dsat.plan.prediction`` predicts the
steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from optuna_dsat.config import ds_config
from optuna_dsat.config.knobs import PARTITION_COPY
from optuna_dsat.config.structures import STRUCTURES, Structure
from optuna_dsat.cost.gpus import latency_prior
from optuna_dsat.cost.memory import HostPeaks, estimate, host_peaks, largest_micro_batch, swap_settings
from optuna_dsat.plan.prediction import StepPrediction, Subject, predict_steps

CLOSE = 0.1
"""Largest relative difference at which predictions are considered equal."""

_RATES = ("samples_per_s", "tokens_per_s", "tokens_per_s_per_gpu", "mfu")
_SIZES = 40
"""Number of micro-batches at which the predicted throughput is compared at once."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A model on a machine with a row for each structure, and further inputs of the advice."""

    subject: Subject
    rows: Sequence[PlannedRow]
    recomputes: bool | None = None
    """Whether activations are recomputed in the backward pass; None if not known."""
    bf16_hardware: bool | None = None
    """Whether the device has bf16 tensor cores; None if not known."""
    about: tuple[str, ...] = ()
    """Lines on the basis of the plan."""
    assumed: tuple[str, ...] = ()
    """Options with default values that only a launch could measure."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """The model as a JSON object: its shape or its profile."""

    @property
    def fitting(self) -> list[PlannedRow]:
        """Rows that fit, by descending predicted throughput; ties start with the row that saves the least memory."""
        return sorted((row for row in self.rows if row.predicted), key=lambda row: row.samples_per_s, reverse=True)

    @property
    def recommended(self) -> PlannedRow | None:
        """Simplest row predicted to be within ``CLOSE`` of the fastest; None if nothing fits.

        Predictions are not precise enough to prefer an offload or a higher stage for a smaller difference.
        """
        fitting = self.fitting
        close = [row for row in fitting if fitting[0].samples_per_s <= (1 + CLOSE) * row.samples_per_s]
        return min(close, key=PlannedRow.complexity, default=None)


@dataclass(frozen=True, kw_only=True)
class PlannedRow:
    """Predicted memory and speed of a structure."""

    structure: Structure
    copy_ranks: int = 1
    """GPUs of a node that together hold a secondary copy of ZeRO 3's parameters; 1 without a copy."""
    config: Mapping[str, Any]
    """The user's config with this structure, without batch sizes."""
    states_bytes: int
    """Peak per device without activations."""
    least_bytes: int
    """Peak per device at micro-batch 1."""
    largest: int
    """Largest micro-batch that fits; 0 if even micro-batch 1 does not fit."""
    micro_batch: int
    """Micro-batch with the best predicted throughput; 0 if nothing fits."""
    device_bytes: int
    """Peak per device at ``micro_batch`` (at 1 if nothing fits)."""
    host_bytes: int
    """Memory per host, at the same micro-batch."""
    host: HostPeaks
    """Host memory to load the model, in steps, and to save it."""
    parts: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Parts of ``device_bytes``: name -> bytes."""
    predicted: StepPrediction | None
    """The step at ``micro_batch``; None if nothing fits."""
    too_small: str = ""
    """The memory that is too small: ``device``, ``host`` or ``device and host``; empty if something fits."""

    def complexity(self) -> tuple[int, int, int]:
        """Return a key by which simpler structures sort first: fewer offloads, no second copy, a lower stage."""
        return self.structure.offload_count, self.copy_ranks, self.structure.stage

    @property
    def name(self) -> str:
        """Name of the structure."""
        return self.structure.words + (" + a copy in each node" if self.copy_ranks > 1 else "")

    @property
    def bound(self) -> str:
        """Resource with the largest share of the step time; ``memory`` if nothing fits."""
        return self.predicted.bound if self.predicted is not None else "memory"

    @property
    def samples_per_s(self) -> float:
        """Predicted throughput over all ranks; 0 if nothing fits."""
        return self.predicted.samples_per_s if self.predicted is not None else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the row as a JSON object."""
        step = self.predicted
        return {
            "name": self.name,
            "zero_optimization": dict(self.config.get("zero_optimization", {})),
            "device_bytes_without_samples": self.states_bytes,
            "device_bytes_at_micro_batch_1": self.least_bytes,
            "largest_micro_batch": self.largest,
            "micro_batch": self.micro_batch,
            "device_bytes": self.device_bytes,
            "host_bytes": self.host_bytes,
            "host_peaks": asdict(self.host),
            "parts": dict(self.parts),
            "step_s": None if step is None else step.step_s,
            "step_s_90": None if step is None else [step.low_s, step.high_s],
            **{name: getattr(step, name, None) for name in _RATES},
            "bound": self.bound,
            "shares": None if step is None else dict(step.shares),
            "too_small": self.too_small or None,
        }


def plan_rows(subject: Subject) -> list[PlannedRow]:
    """Return a row for each structure that DeepSpeed accepts; on several nodes also with a copy in each node."""
    hardware = subject.hardware
    copied = hardware.nodes > 1 and hardware.ranks_on_node > 1
    rows = []
    for structure in _structures(subject):
        rows.append(_row(subject, structure))
        if copied and structure.stage == 3 and structure.offload_param == "none":
            rows.append(_row(subject, structure, copy_ranks=hardware.ranks_on_node))
    return rows


def _structures(subject: Subject) -> Iterator[Structure]:
    """Yield the structures that DeepSpeed accepts: pipelines up to ZeRO 1, no offload to the CPU if ranks run on it.

    Offloads to NVMe come last, at ZeRO 3 only (DeepSpeed supports no other stage) and if an NVMe folder is given.
    """
    accepted = [structure for structure in STRUCTURES if (structure.stage <= 1 or not subject.pipeline)]
    on_cpu = subject.hardware.device == "cpu"
    yield from (structure for structure in accepted if not (structure.offloads and on_cpu))
    if subject.nvme_path is not None:
        yield from (structure.on_nvme() for structure in accepted if structure.stage == 3 and structure.offloads)


def _config(subject: Subject, structure: Structure, *, copy_ranks: int) -> dict[str, Any]:
    """Return the user's config with a structure, without batch sizes; its other offload settings are kept.

    DeepSpeed's defaults replace ``"auto"``, which the script's library would set.
    """
    base = ds_config.effective(subject.config)
    section = base.get("zero_optimization") or {}
    swap = swap_settings(subject.profile, base, subject.hardware)
    zero = {**_unset(section), **structure.zero_section(nvme_path=subject.nvme_path, swap_settings=swap)}
    for key in ("offload_optimizer", "offload_param"):
        if zero[key] is not None:
            kept = section.get(key)
            zero[key] = {"pin_memory": True, **(kept if isinstance(kept, Mapping) else {}), **zero[key]}
    if subject.hardware.nodes > 1:
        zero[PARTITION_COPY] = copy_ranks if copy_ranks > 1 else None
    batch = {ds_config.TRAIN_BATCH: None, ds_config.MICRO_BATCH: None}
    return ds_config.merge(base, {**_unset(base), **batch, "zero_optimization": zero})


def _unset(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the overlay that removes texts: ``"auto"`` and ``"all"``; no text matters for a plan."""
    return dict.fromkeys(key for key, value in section.items() if isinstance(value, str))


def _row(subject: Subject, structure: Structure, *, copy_ranks: int = 1) -> PlannedRow:
    config = _config(subject, structure, copy_ranks=copy_ranks)
    profile, hardware = subject.profile, subject.hardware
    usable = replace(hardware, device_memory_bytes=subject.usable_bytes)
    largest = largest_micro_batch(profile, config, hardware=usable)
    states = estimate(profile, config, micro_batch=0, hardware=hardware)
    least = estimate(profile, config, micro_batch=1, hardware=hardware)
    best, predicted = _best(subject, config, largest)
    at = least if predicted is None else estimate(profile, config, micro_batch=best, hardware=hardware)
    is_short = {
        "device": least.device_bytes > subject.usable_bytes,
        "host": least.host_bytes > hardware.host_memory_bytes,
    }
    return PlannedRow(
        structure=structure,
        copy_ranks=copy_ranks,
        config=MappingProxyType(config),
        states_bytes=states.device_bytes,
        least_bytes=least.device_bytes,
        largest=largest,
        micro_batch=best,
        device_bytes=at.device_bytes,
        host_bytes=at.host_bytes,
        host=host_peaks(profile, config, hardware=hardware),
        parts=at.parts,
        predicted=predicted,
        too_small="" if largest else " and ".join(whose for whose, short in is_short.items() if short) or "device",
    )


def _best(subject: Subject, config: Mapping[str, Any], largest: int) -> tuple[int, StepPrediction | None]:
    """Return the micro-batch of the best predicted throughput with its step; 0 and None if micro-batch 1 does not fit.

    Throughput rises with the micro-batch until memory is crowded. The search narrows to the neighbours of the best
    micro-batch on an ever finer grid.
    """
    low, high = 1, largest
    best, predicted = 0, None
    while low <= high:
        every = high - low < _SIZES
        sizes = (
            list(range(low, high + 1)) if every else sorted({round(size) for size in np.geomspace(low, high, _SIZES)})
        )
        steps = predict_steps(subject, [config] * len(sizes), sizes)
        index = max(range(len(sizes)), key=lambda number: steps[number].samples_per_s)
        best, predicted = sizes[index], steps[index]
        if every:
            break
        low, high = sizes[max(0, index - 1)], sizes[min(len(sizes) - 1, index + 1)]
    return best, predicted


@dataclass(frozen=True, kw_only=True)
class AtCount:
    """The fastest plan on a number of devices."""

    devices: int
    row: PlannedRow | None
    """The plan's row; None if nothing fits."""
    share_of_linear: float | None
    """Samples/s per device relative to the smallest number of devices without offload, or else to the smallest that
    fits; None if nothing fits.
    """

    @property
    def samples_per_s(self) -> float | None:
        """Samples/s over all devices; None if nothing fits."""
        return None if self.row is None else self.row.samples_per_s

    @property
    def samples_per_s_each(self) -> float | None:
        """Samples/s per device; None if nothing fits."""
        return None if self.row is None else self.row.samples_per_s / self.devices

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "devices": self.devices,
            "name": None if self.row is None else self.row.name,
            "micro_batch": None if self.row is None else self.row.micro_batch,
            "samples_per_s": self.samples_per_s,
            "samples_per_s_per_device": self.samples_per_s_each,
            "share_of_linear": self.share_of_linear,
        }


def counts_up_to(devices: int) -> tuple[int, ...]:
    """Return 1, 2, 4 and so on below ``devices``, and that number itself."""
    return (*(2**power for power in range(devices.bit_length()) if 2**power < devices), devices)


def scaling(subject: Subject, counts: Sequence[int]) -> tuple[AtCount, ...]:
    """Return the fastest plan at each number of devices, ascending; structure and micro-batch may differ.

    A host is filled before the next is used; its memory does not depend on the number of devices in use.
    """
    result: list[AtCount] = []
    for count in counts:
        smaller = _with_devices(subject, count)
        row = Plan(subject=smaller, rows=plan_rows(smaller)).recommended
        result.append(AtCount(devices=count, row=row, share_of_linear=None))
    rows = [item for item in result if item.row is not None]
    whole = [item for item in rows if item.row is not None and not item.row.structure.offloads]
    least = next((item.samples_per_s_each for item in whole or rows), None)
    return tuple(
        replace(item, share_of_linear=item.samples_per_s_each / least if item.samples_per_s_each and least else None)
        for item in result
    )


def _with_devices(subject: Subject, count: int) -> Subject:
    hardware, machine = subject.hardware, dict(subject.machine)
    if hardware.device != "cpu" and "latency" in machine:
        machine["latency"] = latency_prior(count)
    each = min(count, hardware.ranks_per_node)
    return replace(subject, hardware=replace(hardware, world_size=count, ranks_per_node=each), machine=machine)
