"""A recorded landscape: real launches of one model on one machine, played back to searches.

A configuration between two recorded micro-batches of its lineage takes times and memory in proportion; beyond the
largest that ran it is out of memory. Knobs that were not recorded are no part of its search space.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from optuna_dsat.config import ds_config
from optuna_dsat.config.knobs import KNOBS, NVME
from optuna_dsat.launch.simulated import SimulatedProfile, SimulatedResult
from optuna_dsat.outcome import Outcome
from optuna_dsat.words import bytes_in_words

__all__ = ["Recorded", "key_of"]

_TIMES = ("forward_s", "backward_s", "step_s", "latency_s")
_RECORDED = ("zero_stage", "offload_optimizer", "offload_param", "reduce_bucket_size")


def key_of(zero: Mapping[str, Any]) -> tuple[int, bool, bool, int]:
    """Return what tells recorded lineages apart: stage, both offloads and the bucket (0 without ZeRO)."""
    stage = int(zero.get("stage", 0))

    def offloaded(name: str) -> bool:
        return bool((zero.get(name) or {}).get("device", "none") != "none")

    bucket = int(zero.get("reduce_bucket_size") or 500_000_000) if stage else 0
    return stage, stage > 0 and offloaded("offload_optimizer"), stage == 3 and offloaded("offload_param"), bucket


@dataclass(frozen=True, kw_only=True)
class _Lineage:
    """Recorded runs of one lineage."""

    sizes: tuple[int, ...]
    """Micro-batches that ran, rising."""
    columns: Mapping[str, tuple[float, ...]]
    """Times in seconds, and peak bytes, at these sizes."""
    startup_s: float

    def at(self, size: int) -> dict[str, float]:
        return {name: float(np.interp(size, self.sizes, values)) for name, values in self.columns.items()}


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """Implements ``optuna_dsat.launch.simulated.Landscape`` over recorded runs."""

    name: str
    record: Mapping[str, Any]
    lineages: Mapping[tuple[int, bool, bool, int], _Lineage]

    @classmethod
    def load(cls, path: Path) -> Recorded:
        """Read what ``benchmarks.record_landscape`` wrote.

        Raises:
            ValueError: If nothing of it ran.
        """
        record = json.loads(path.read_text())
        groups: dict[tuple[int, bool, bool, int], dict[int, list[dict[str, Any]]]] = {}
        for run in record["runs"]:
            if run["outcome"] == Outcome.MEASURED:
                groups.setdefault(key_of(run["zero"]), {}).setdefault(run["micro_batch"], []).append(run)
        if not groups:
            raise ValueError(f"no run of {path} was measured")
        return cls(name=path.stem, record=record, lineages={key: _lineage(sizes) for key, sizes in groups.items()})

    @property
    def slots(self) -> int:
        """Ranks of one launch."""
        return int(self.record["hardware"]["ranks"])

    @property
    def kind(self) -> str:
        """``cuda`` or ``cpu``."""
        return str(self.record["hardware"]["kind"])

    @property
    def flops_per_sample(self) -> float:
        """FLOPs of forward and backward."""
        return float(self.record["profile"]["flops_per_sample"])

    @property
    def about(self) -> str:
        """What was recorded, where and when."""
        hardware, profile = self.record["hardware"], self.record["profile"]
        return (
            f"Recorded {self.record['recorded']} on {hardware['ranks']} x {hardware['device']}: "
            f"{profile['params'] / 1e6:.3g} M parameters, {bytes_in_words(self.record['device_memory_bytes'])} a rank"
        )

    @property
    def user_config(self) -> dict[str, Any]:
        """The config that every method starts from, with the recorded values as lists."""
        zero = {key: value for key, value in self._user_zero.items() if key != "stage"}
        buckets = sorted({key[3] for key in self.lineages if key[0]})
        return {
            **self.record["user_config"],
            **ds_config.batch_overlay(1),
            "zero_optimization": {
                **zero,
                "stage": sorted({key[0] for key in self.lineages}),
                "reduce_bucket_size": buckets,
            },
        }

    @property
    def _user_zero(self) -> dict[str, Any]:
        return dict(self.record["user_config"].get("zero_optimization") or {})

    @property
    def no_tune(self) -> tuple[str, ...]:
        """Knobs that were not recorded, and offloads where none was."""
        varied = list(_RECORDED)
        for place, name in ((1, "offload_optimizer"), (2, "offload_param")):
            if not any(key[place] for key in self.lineages):
                varied.remove(name)
        return tuple(knob.name for knob in KNOBS if knob.name not in varied and not knob.inert and knob.name != NVME)

    def profile(self, slots: int) -> SimulatedProfile:  # noqa: ARG002 - the landscape has its own number of ranks
        """Return the recorded profile."""
        known = self.record["profile"]
        kept = {name: known[name] for name in SimulatedProfile.__dataclass_fields__ if name in known}
        return SimulatedProfile(**{**kept, "device_name": ""})

    def run(self, config: Mapping[str, Any], slots: int) -> SimulatedResult:  # noqa: ARG002 - see profile
        """Return what became of the configuration, or would have."""
        size = int(config["train_micro_batch_size_per_gpu"])
        lineage = self.lineages.get(key_of(ds_config.zero_section(config)))
        if lineage is None or size > lineage.sizes[-1]:
            return SimulatedResult(outcome=Outcome.OUT_OF_MEMORY, startup_s=self._startup_s, message="out of memory")
        found = lineage.at(size)
        forward_s, backward_s, step_s = (found[name] for name in _TIMES[:3])
        # Each phase is that of its slowest rank, so that together they may be longer than the step.
        within = min(1.0, found["latency_s"] / (forward_s + backward_s + step_s))
        return SimulatedResult(
            forward_s=within * forward_s,
            backward_s=within * backward_s,
            step_s=within * step_s,
            other_s=max(0.0, found["latency_s"] - forward_s - backward_s - step_s),
            startup_s=lineage.startup_s,
            peak_bytes=int(found["peak_bytes"]),
        )

    @property
    def _startup_s(self) -> float:
        return statistics.median(lineage.startup_s for lineage in self.lineages.values())

    def best(self) -> tuple[float, tuple[int, bool, bool, int], int]:
        """Return the best throughput, its lineage and its micro-batch, over all sizes of all lineages."""
        found = (-math.inf, next(iter(self.lineages)), 0)
        for key, lineage in self.lineages.items():
            for size in range(1, lineage.sizes[-1] + 1):
                rate = size * self.slots / lineage.at(size)["latency_s"]
                found = max(found, (rate, key, size))
        return found


def _lineage(sizes: Mapping[int, Sequence[Mapping[str, Any]]]) -> _Lineage:
    """Return the medians over the runs of each micro-batch."""
    ordered = sorted(sizes)
    columns = {
        name: tuple(statistics.median(float(run[name]) for run in sizes[size]) for size in ordered)
        for name in (*_TIMES, "peak_bytes")
    }
    startup_s = statistics.median(float(run["startup_s"]) for runs in sizes.values() for run in runs)
    return _Lineage(sizes=tuple(ordered), columns=columns, startup_s=startup_s)
