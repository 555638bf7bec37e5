"""A recorded landscape: real launches of one model on one machine, played back to searches.

Between two recorded micro-batches of a structure the time of a step follows a power law: a line where both have
logarithmic scales. Beyond the largest that was recorded samples take as long as there, so that nothing is found that
was not recorded, and a launch costs what it would; where a larger one ran out of memory, it does so, too. Knobs that
were not recorded have no effect, whatever a method sets them to.
What other structures than the recorded ones would do is not known: they are refused.

The noise is that of the repeated launches.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from optuna_dsat.config import ds_config
from optuna_dsat.config.conditions import OFFLOAD_OPTIMIZER, OFFLOAD_PARAM
from optuna_dsat.config.structures import Structure
from optuna_dsat.outcome import Outcome
from optuna_dsat.words import bytes_in_words
from tests.harness.simulated import SimulatedProfile, SimulatedResult

LANDSCAPES_FOLDER = Path(__file__).with_name("landscapes")
"""Where the records are kept that every table plays back."""

_PHASES = ("forward_s", "backward_s", "step_s")


def structure_of(zero: Mapping[str, Any]) -> Structure:
    """Return the structure of a ZeRO section, without offloads that its stage does not have."""
    found = Structure.of({"zero_optimization": zero})
    optimizer = found.offload_optimizer if found.stage > 0 else "none"
    return replace(
        found, offload_optimizer=optimizer, offload_param=found.offload_param if found.stage == 3 else "none"
    )


def relative_noise(runs: Iterable[Mapping[str, Any]]) -> float:
    """Return by how much the step times of one configuration differ from launch to launch, relative; 0 if unknown.

    The standard deviation within configurations, pooled over all that have more than one counted launch.
    """
    squares, degrees = 0.0, 0
    for sizes in _grouped(runs).values():
        for launches in sizes.values():
            logs = [math.log(run["latency_s"]) for run in launches]
            squares += sum((log - statistics.fmean(logs)) ** 2 for log in logs)
            degrees += len(logs) - 1
    return math.sqrt(squares / degrees) if degrees else 0.0


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the counts and the noise of a record."""
    configurations = sum(map(len, _grouped(runs).values()))
    return {"configurations": configurations, "launches": len(runs), "noise": round(relative_noise(runs), 4)}


def _grouped(runs: Iterable[Mapping[str, Any]]) -> dict[Structure, dict[int, list[Mapping[str, Any]]]]:
    """Return the measured launches of each lineage and micro-batch."""
    groups: dict[Structure, dict[int, list[Mapping[str, Any]]]] = {}
    for run in runs:
        if run["outcome"] == Outcome.MEASURED:
            groups.setdefault(structure_of(run["zero"]), {}).setdefault(run["micro_batch"], []).append(run)
    return groups


@dataclass(frozen=True, kw_only=True)
class _Lineage:
    """Recorded runs of one lineage."""

    sizes: tuple[int, ...]
    """Micro-batches that ran, rising."""
    latency_s: tuple[float, ...]
    """Seconds of a step at these sizes."""
    shares: Mapping[str, tuple[float, ...]]
    """Phase -> its share of these seconds."""
    peak_bytes: tuple[float, ...]
    startup_s: float
    """From a launch's start to its first step."""
    edge: bool
    """Whether a larger micro-batch ran out of memory."""

    def step_s(self, size: int) -> float:
        """Return the seconds of a step."""
        if size >= self.sizes[-1]:
            return self.latency_s[-1] * size / self.sizes[-1]
        return math.exp(float(np.interp(math.log(size), np.log(self.sizes), np.log(self.latency_s))))

    def phases_s(self, size: int) -> tuple[float, float, float]:
        """Return the seconds of forward, backward and the optimizer's step."""
        total, place = self.step_s(size), math.log(size)
        forward, backward, step = (
            total * float(np.interp(place, np.log(self.sizes), self.shares[name])) for name in _PHASES
        )
        return forward, backward, step

    def peak(self, size: int) -> int:
        """Return the peak bytes of a rank, in proportion between two sizes and beyond the last two."""
        if size <= self.sizes[-1] or len(self.sizes) < 2:
            return int(np.interp(size, self.sizes, self.peak_bytes))
        per_sample = (self.peak_bytes[-1] - self.peak_bytes[-2]) / (self.sizes[-1] - self.sizes[-2])
        return int(self.peak_bytes[-1] + max(0.0, per_sample) * (size - self.sizes[-1]))


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """Implements ``tests.harness.simulated.Landscape`` over recorded runs."""

    name: str
    record: Mapping[str, Any]
    lineages: Mapping[Structure, _Lineage]
    refused: Mapping[Structure, Outcome]
    """Lineages of which nothing ran, with what became of them."""

    @classmethod
    def load(cls, path: Path) -> Recorded:
        """Read what ``benchmarks.record_landscape`` wrote.

        Raises:
            ValueError: If nothing of it ran.
        """
        record = json.loads(path.read_text(encoding="utf-8"))
        groups = _grouped(record["runs"])
        if not groups:
            raise ValueError(f"no run of {path} was measured")
        failed = [run for run in record["runs"] if run["outcome"] != Outcome.MEASURED]
        edges = {structure_of(run["zero"]) for run in failed if Outcome(run["outcome"]).infeasible}
        return cls(
            name=path.stem,
            record=record,
            lineages={key: _lineage(sizes, edge=key in edges) for key, sizes in groups.items()},
            refused={
                structure_of(run["zero"]): Outcome(run["outcome"])
                for run in failed
                if structure_of(run["zero"]) not in groups
            },
        )

    @property
    def slots(self) -> int:
        """Ranks of one launch."""
        return int(self.record["hardware"]["ranks"])

    @property
    def nodes(self) -> int:
        """Hosts."""
        return 1

    @property
    def kind(self) -> str:
        """``cuda`` or ``cpu``."""
        return str(self.record["hardware"]["kind"])

    @property
    def params(self) -> int:
        """Parameters of the model."""
        return int(self.record["profile"]["params"])

    @property
    def device_bytes(self) -> int:
        """What one rank could allocate."""
        return int(self.record["device_memory_bytes"])

    @property
    def flops_per_sample(self) -> float:
        """FLOPs of forward and backward."""
        return float(self.record["profile"]["flops_per_sample"])

    @cached_property
    def noise(self) -> float | None:
        """Relative deviation of the step time from launch to launch; None if nothing was launched twice."""
        return relative_noise(self.record["runs"]) or None

    @property
    def about(self) -> str:
        """What was recorded, where and when."""
        hardware, profile = self.record["hardware"], self.record["profile"]
        noise = "" if self.noise is None else f"; launches differ by {self.noise:.1%}"
        return (
            f"Recorded {self.record['recorded']} on {hardware['ranks']} x {hardware['device']}: "
            f"{profile['params'] / 1e6:.3g} M parameters, {bytes_in_words(self.record['device_memory_bytes'])} a rank"
            f"{noise}"
        )

    @property
    def user_config(self) -> dict[str, Any]:
        """The config that every method starts from: the user's, without what a trainer fills in."""
        config = _without_auto(self.record["user_config"])
        sizes = ds_config.batch_triangle(ds_config.effective(config), world_size=self.slots)
        return ds_config.merge(config, ds_config.batch_overlay(sizes.micro_batch, sizes.gradient_accumulation_steps))

    @property
    def stages(self) -> tuple[int, ...]:
        """Stages that were recorded, those that failed included."""
        return tuple(sorted({key.stage for key in (*self.lineages, *self.refused)}))

    @property
    def no_tune(self) -> tuple[str, ...]:
        """Offloads where none was recorded; a search leaves them alone."""
        known = (*self.lineages, *self.refused)
        knobs = (OFFLOAD_OPTIMIZER, OFFLOAD_PARAM)
        return tuple(name for name in knobs if all(getattr(key, name) == "none" for key in known))

    def profile(self, slots: int) -> SimulatedProfile:  # noqa: ARG002 - the landscape has its own number of ranks
        """Return the recorded profile."""
        known = self.record["profile"]
        kept = {name: known[name] for name in SimulatedProfile.__dataclass_fields__ if name in known}
        return SimulatedProfile(**{**kept, "device_name": ""})

    def run(self, config: Mapping[str, Any], slots: int) -> SimulatedResult:  # noqa: ARG002 - see profile
        """Return what became of the configuration, or would have.

        With accumulation, forward, backward and all that is no phase of the engine's happen once a micro-batch.
        """
        size = int(config[ds_config.MICRO_BATCH])
        times = int(config.get(ds_config.GRADIENT_ACCUMULATION) or 1)
        key = structure_of(ds_config.zero_section(config))
        lineage = self.lineages.get(key)
        if lineage is None:
            outcome = self.refused.get(key, Outcome.INVALID_CONFIG)
            return SimulatedResult(outcome=outcome, startup_s=self._startup_s, message="this does not run here")
        peak = lineage.peak(size)
        if size > lineage.sizes[-1] and (lineage.edge or peak > self.device_bytes):
            return SimulatedResult(outcome=Outcome.OUT_OF_MEMORY, startup_s=lineage.startup_s, message="out of memory")
        forward_s, backward_s, step_s = lineage.phases_s(size)
        latency_s = lineage.step_s(size)
        # Each phase is that of its slowest rank, so that together they may be longer than the step.
        within = min(1.0, latency_s / (forward_s + backward_s + step_s))
        return SimulatedResult(
            forward_s=times * within * forward_s,
            backward_s=times * within * backward_s,
            step_s=within * step_s,
            other_s=times * max(0.0, latency_s - forward_s - backward_s - step_s),
            startup_s=lineage.startup_s,
            peak_bytes=peak,
        )

    @property
    def _startup_s(self) -> float:
        return statistics.median(lineage.startup_s for lineage in self.lineages.values())

    def best(self) -> tuple[float, Structure, int]:
        """Return the best throughput, its lineage and its micro-batch, over all sizes within the recorded ones."""
        result = (-math.inf, next(iter(self.lineages)), 0)
        for key, lineage in self.lineages.items():
            for size in range(lineage.sizes[0], lineage.sizes[-1] + 1):
                result = max(result, (size * self.slots / lineage.step_s(size), key, size), key=lambda item: item[0])
        return result


def recorded_landscapes(folder: Path = LANDSCAPES_FOLDER) -> dict[str, Recorded]:
    """Return the records of a folder by name, those that are complete."""
    paths = [path for path in sorted(folder.glob("*.json")) if "summary" in json.loads(path.read_text("utf-8"))]
    return {path.stem: Recorded.load(path) for path in paths}


def _without_auto(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without the values that are ``"auto"``."""
    kept = {key: value for key, value in section.items() if value != ds_config.AUTO}
    return {key: _without_auto(value) if isinstance(value, Mapping) else value for key, value in kept.items()}


def _lineage(sizes: Mapping[int, Sequence[Mapping[str, Any]]], *, edge: bool) -> _Lineage:
    """Return the medians over the runs of each micro-batch."""
    ordered = sorted(sizes)

    def medians(name: str) -> tuple[float, ...]:
        return tuple(statistics.median(float(run[name]) for run in sizes[size]) for size in ordered)

    latency_s = medians("latency_s")
    shares = {
        name: tuple(part / whole for part, whole in zip(medians(name), latency_s, strict=True)) for name in _PHASES
    }
    starts = [max(0.0, float(run["startup_s"]) - run["latency_s"]) for runs in sizes.values() for run in runs]
    return _Lineage(
        sizes=tuple(ordered),
        latency_s=latency_s,
        shares=shares,
        peak_bytes=medians("peak_bytes"),
        startup_s=statistics.median(starts),
        edge=edge,
    )
