"""The optimisation problem of a guided search: model, machine, space and metric."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from optuna.distributions import IntDistribution

from optuna_dsat.config.search_space import SearchSpace
from optuna_dsat.cost.gpus import priors_of_device
from optuna_dsat.cost.memory import Hardware, ModelProfile
from optuna_dsat.cost.numbers import Numbers
from optuna_dsat.cost.step_time import PHASES, StepTimeModel
from optuna_dsat.guided.candidates import candidate_table
from optuna_dsat.guided.prior_knowledge import PriorKnowledge
from optuna_dsat.metrics import LARGER_IS_BETTER
from optuna_dsat.trials.lineage import MicroBatchSet

REACH = 8.0
"""Ratio of the largest micro-batch that may be launched to the largest that ran, or to the baseline's."""
_DEFAULT_START_S = 30.0
"""Assumed seconds of a launch outside its steps; only their ratio to the steps matters."""


class Problem:
    """A search space on a machine, with a metric to optimise; constant during a search.

    Args:
        profile: The model, as measured by the profile launch.
        hardware: Hardware of the launches.
        data_parallel_size: Ranks that consume different samples; None for all. The stages of a pipeline share theirs.
        config: The user's DeepSpeed config.
        space: The search space.
        metric: The metric to optimise: a key of the trials' metrics (``optuna_dsat.trials.attributes.METRICS``).
        memory_margin: Share of the device's memory that must be predicted to stay free.
        profile_steps: Steps of a launch, warm-up included.
        start_s: Seconds of a launch outside its steps, by the profile launch; None if unknown.
        prior_knowledge: Knowledge from earlier studies, None without a warm start.
    """

    def __init__(
        self,
        *,
        profile: ModelProfile,
        hardware: Hardware,
        data_parallel_size: int | None = None,
        config: Mapping[str, Any],
        space: SearchSpace,
        metric: str = "throughput",
        memory_margin: float = 0.0,
        profile_steps: int = 5,
        start_s: float | None = None,
        prior_knowledge: PriorKnowledge | None = None,
    ) -> None:
        self.metric = metric
        self.profile = profile
        self.hardware = hardware
        self.data_parallel_size = data_parallel_size or hardware.world_size
        self.space = space
        self.profile_steps = profile_steps
        self.start_s = _DEFAULT_START_S if start_s is None else start_s
        ranks = min(hardware.ranks_per_node, hardware.world_size)
        self.device_bytes = hardware.device_memory_bytes
        if hardware.device == "cpu":
            self.device_bytes = min(self.device_bytes, hardware.host_memory_bytes // ranks)
        self.allowed_bytes = (1 - memory_margin) * self.device_bytes
        """Largest admissible predicted peak."""
        self.table = candidate_table(profile=profile, hardware=hardware, config=config, space=space)
        self.step_time = StepTimeModel.of(
            profile,
            hardware,
            machine=priors_of_device(profile, config, device=hardware.device, ranks=hardware.world_size),
        )
        if prior_knowledge is not None:
            self.step_time = replace(self.step_time, prior=prior_knowledge.prior(self.step_time))
        earlier = () if prior_knowledge is None else prior_knowledge.launches
        self.prior_observations = self.table.observations_of_launches(earlier, metric=metric)
        """Launches of earlier studies."""
        low, high = space.micro_batches
        self.sizes = np.array(space.micro_batch_values or range(low, high + 1), dtype=np.int64)
        """All micro-batches, ascending."""
        self.micro_batches = (
            MicroBatchSet(space.micro_batch_values)
            if space.micro_batch_values
            else IntDistribution(low, high, log=True)
        )
        """The micro-batch's distribution."""
        value = config.get("train_micro_batch_size_per_gpu")
        self.user_micro_batch = value if isinstance(value, int) and value >= low else low
        """Micro-batch of the user's config; the smallest of the space if the config has none."""
        self._accumulation = np.array([space.accumulation(int(size)) for size in self.sizes], dtype=np.float64)

    def metric_of(self, log_objective: float) -> float:
        """Convert a log objective to the metric."""
        return math.exp(log_objective if self.metric in LARGER_IS_BETTER else -log_objective)

    @property
    def work_per_sample(self) -> int:
        """Work of a single sample per rank in the unit of a rate's numerator: FLOPs, or samples over all ranks."""
        each = self.profile.flops_per_sample if self.metric == "FLOPS_per_gpu" else self.data_parallel_size
        return max(1, each)

    def accumulation(self, micro_batch: Numbers) -> Numbers:
        """Return the accumulation steps of micro-batches."""
        result: Numbers = self._accumulation[self.size_index(micro_batch)]
        return result

    def is_asked(self, micro_batch: Numbers, accumulation: Numbers) -> Numbers:
        """Return a mask of configurations with the space's accumulation, or with the global batch that is asked for."""
        samples: Numbers | int | None = self.space.asked_samples_per_rank
        if samples is None:
            samples = micro_batch * self.accumulation(micro_batch)
        result: Numbers = accumulation * micro_batch == samples
        return result

    def size_index(self, micro_batch: Numbers) -> Numbers:
        """Return the index in ``sizes`` of the largest size not above each micro-batch; 0 if all are above."""
        return np.maximum(0, np.searchsorted(self.sizes, micro_batch, side="right") - 1)

    def log_objective(self, phases: Numbers, samples: Numbers) -> Numbers:
        """Return the log objective of phases (4, ..., n) of a step of ``samples`` per rank, inverse if minimized."""
        total = phases.sum(axis=0)
        if self.metric in LARGER_IS_BETTER:
            result: Numbers = np.log(self.work_per_sample * samples / total)
            return result
        inverse: Numbers = np.log(total if self.metric == "latency" else phases[PHASES.index(self.metric)])
        return -inverse

    def log_objective_slopes(self, phases: Numbers, slopes: Numbers) -> Numbers:
        """Return the derivatives of the log objective (k, n) from the phases (4, n) and their derivatives (4, k, n)."""
        timed = [PHASES.index(self.metric)] if self.metric in PHASES else list(range(len(PHASES)))
        relative: Numbers = slopes[timed].sum(axis=0) / phases[timed].sum(axis=0)
        return -relative
