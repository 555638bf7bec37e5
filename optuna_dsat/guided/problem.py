"""What a guided search is about: model, machine, space and metric, and what their formulas say of each candidate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from optuna_dsat.config.search_space import SearchSpace
from optuna_dsat.cost.gpus import priors_of_device
from optuna_dsat.cost.memory import Hardware, ModelProfile
from optuna_dsat.cost.step_time import PHASES, StepTimeModel
from optuna_dsat.guided.candidates import CandidateTable
from optuna_dsat.guided.prior_knowledge import PriorKnowledge
from optuna_dsat.metrics import LARGER_IS_BETTER, METRICS

__all__ = ["Problem"]

Numbers: TypeAlias = npt.NDArray[Any]


class Problem:
    """A search space on a machine, with a metric to optimise; the same throughout a search.

    Args:
        profile: What the profile launch taught.
        hardware: Where launches run.
        config: The user's DeepSpeed config.
        space: The search space.
        metric: What is optimised: a key of the trials' metrics (``optuna_dsat.trials.attributes.METRICS``).
        memory_margin: Share of the device's memory that a launch is expected to leave free.
        profile_steps: Steps of a launch, warm-up included.
        prior_knowledge: What earlier studies taught.

    Raises:
        ValueError: If the margin does not lie in [0, 1), or there is no such metric.
    """

    def __init__(
        self,
        *,
        profile: ModelProfile,
        hardware: Hardware,
        config: Mapping[str, Any],
        space: SearchSpace,
        metric: str = "throughput",
        memory_margin: float = 0.05,
        profile_steps: int = 5,
        prior_knowledge: PriorKnowledge | None = None,
    ) -> None:
        if not 0 <= memory_margin < 1:
            raise ValueError(f"memory_margin must lie in [0, 1), not {memory_margin}: it is a share of the memory")
        if metric not in METRICS:
            raise ValueError(f"metric is {metric!r}; it must be one of {', '.join(METRICS)}")
        self.metric = metric
        self.profile = profile
        self.hardware = hardware
        self.space = space
        self.profile_steps = profile_steps
        ranks = min(hardware.ranks_per_node, hardware.world_size)
        self.device_bytes = hardware.device_memory_bytes
        if hardware.device == "cpu":
            self.device_bytes = min(self.device_bytes, hardware.host_memory_bytes // ranks)
        self.allowed_bytes = (1 - memory_margin) * self.device_bytes
        """What a launch may be expected to take."""
        self.table = CandidateTable(profile=profile, hardware=hardware, config=config, space=space)
        self.step_time = StepTimeModel(
            params=profile.params,
            trainable=profile.trainable_params,
            largest_layer=profile.largest_layer_params,
            param_bytes=profile.param_bytes,
            flops_per_sample=profile.flops_per_sample,
            ranks=hardware.world_size,
            ranks_per_node=ranks,
            machine=priors_of_device(profile.device_name, device=hardware.device, ranks=hardware.world_size),
        )
        if prior_knowledge is not None:
            self.step_time = replace(self.step_time, prior=prior_knowledge.prior(self.step_time))
        self.past = self.table.recall(() if prior_knowledge is None else prior_knowledge.launches, metric=metric)
        """Launches of earlier studies."""
        low, high = space.micro_batches
        self.sizes = np.array(space.micro_batch_values or range(low, high + 1), dtype=np.int64)
        """All micro-batches, in samples per rank."""
        self._accumulation = np.array([space.accumulation(int(size)) for size in self.sizes], dtype=np.float64)

    def metric_of(self, log_objective: float) -> float:
        """Return the metric of a goodness."""
        return math.exp(log_objective if self.metric in LARGER_IS_BETTER else -log_objective)

    @property
    def work_per_sample(self) -> int:
        """What the metric of a rate counts for each sample of a rank: its FLOPs, or the samples of all ranks."""
        each = self.profile.flops_per_sample if self.metric == "FLOPS_per_gpu" else self.hardware.world_size
        return max(1, each)

    def accumulation(self, micro_batch: Numbers) -> Numbers:
        """Return the accumulation steps that go with micro-batches."""
        found: Numbers = self._accumulation[self.place(micro_batch)]
        return found

    def place(self, micro_batch: Numbers) -> Numbers:
        """Return the position in ``sizes`` of the largest one that is no larger; of the smallest where none is."""
        return np.maximum(0, np.searchsorted(self.sizes, micro_batch, side="right") - 1)

    def log_objective(self, phases: Numbers, micro_batch: Numbers) -> Numbers:
        """Return the logarithm of the metric that phases (4, ..., n) make, of its inverse where less is better."""
        total = phases.sum(axis=0)
        if self.metric in ("throughput", "FLOPS_per_gpu"):
            found: Numbers = np.log(self.work_per_sample * micro_batch * self.accumulation(micro_batch) / total)
            return found
        inverse: Numbers = np.log(total if self.metric == "latency" else phases[PHASES.index(self.metric)])
        return -inverse

    def slope(self, phases: Numbers, slopes: Numbers) -> Numbers:
        """Return the derivatives of the goodness, (k, n), from the phases (4, n) and theirs (4, k, n)."""
        timed = [PHASES.index(self.metric)] if self.metric in PHASES else list(range(len(PHASES)))
        relative: Numbers = slopes[timed].sum(axis=0) / phases[timed].sum(axis=0)
        return -relative
