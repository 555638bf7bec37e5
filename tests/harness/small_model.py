"""A small model on a small machine with known memory use and step times, and a planner for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import optuna
from optuna.trial import FrozenTrial, Trial, TrialState

from optuna_dsat.config import ds_config
from optuna_dsat.config.search_space import SearchSpace
from optuna_dsat.config.space_builder import SpaceRequest, build_space
from optuna_dsat.cost.memory import Hardware, ModelProfile, estimate
from optuna_dsat.guided.planner import GuidedPlanner
from optuna_dsat.guided.problem import Problem
from optuna_dsat.outcome import Outcome
from optuna_dsat.study.profile.profiled import Profiled
from optuna_dsat.trials import attributes
from optuna_dsat.trials.lineage import MICRO_BATCH

GIB = 2**30
CONFIG = {MICRO_BATCH: 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
PROFILE = ModelProfile(
    params=10**9,
    trainable_params=10**9,
    largest_layer_params=10**7,
    param_bytes=2,
    activation_bytes_per_sample=GIB,
    flops_per_sample=6 * 10**12,
    device_memory_bytes=40 * GIB,
    host_memory_bytes=512 * GIB,
    peak_bytes=20 * GIB,
    optimizer="AdamW",
)
HARDWARE = Hardware(
    world_size=4, ranks_per_node=4, device_memory_bytes=40 * GIB, host_memory_bytes=PROFILE.host_memory_bytes
)
KEPT = (
    "contiguous_gradients", "reduce_scatter", "stage3_prefetch_bucket_size", "stage3_max_live_parameters",
    "stage3_max_reuse_distance", "stage3_param_persistence_threshold", "sub_group_size",
    "use_multi_rank_bucket_allreduce", "round_robin_gradients",
)  # fmt: skip


def profiled_of(**facts: Any) -> Profiled:
    given = {"measured_with": "ZeRO 1", "pipeline": False, "device": "cuda", "data_parallel_size": 4, **facts}
    return Profiled(**{"profile": PROFILE, **given})


def small_space(*, no_tune: Sequence[str] = KEPT, samples: int | None = None) -> SearchSpace:
    return build_space(
        SpaceRequest(
            ds_config=CONFIG,
            zero_stages=(1, 2, 3),
            fix={},
            no_tune=no_tune,
            nvme_path=None,
            params=PROFILE.params,
            micro_batch_cap=64,
            device="cuda",
            samples_per_rank=samples,
            ranks_per_node=2,
        )
    )


def small_problem(**changes: Any) -> Problem:
    given = {"profile": PROFILE, "hardware": HARDWARE, "config": CONFIG, "space": small_space(), **changes}
    return Problem(**given)


@cache
def small_planner(metric: str = "throughput", margin: float = 0.05) -> GuidedPlanner:
    return GuidedPlanner(small_problem(metric=metric, memory_margin=margin))


class Machine:
    """Runs trials: memory as modelled, except 10% larger activations; step time with a fixed and a growing part."""

    def __init__(
        self,
        *,
        device_gib: float = 38.0,
        offload_s: float = 1.0,
        overhead_s: float = 60.0,
        space: SearchSpace | None = None,
    ) -> None:
        self.space = space or small_space()
        self.overhead_s = overhead_s
        self.limit = device_gib * GIB
        self.offload_s = offload_s

    def peak(self, params: Mapping[str, Any]) -> int:
        config = ds_config.merge(CONFIG, self.space.overlay(params))
        size = params[MICRO_BATCH]
        predicted = estimate(PROFILE, config, micro_batch=size, hardware=HARDWARE)
        return int(predicted.device_bytes + 0.1 * GIB * size)

    def seconds(self, params: Mapping[str, Any]) -> tuple[float, float, float, float]:
        third = params["zero_stage"] == 3
        forward = 0.02 * (params[MICRO_BATCH] + 2) + 0.1 * third
        offloads = (params.get("offload_optimizer", "none") != "none") + (params.get("offload_param", "none") != "none")
        slow = 0.0 if params.get("overlap_comm") else 0.1
        return forward, 2 * forward + slow + 0.1 * third, 0.05 + self.offload_s * offloads, 0.01

    def rate(self, params: Mapping[str, Any]) -> float:
        return float(params[MICRO_BATCH]) * HARDWARE.world_size / sum(self.seconds(params))

    def fits(self, params: Mapping[str, Any]) -> bool:
        return self.peak(params) <= self.limit

    def answer(self, study: optuna.Study, trial: Trial) -> FrozenTrial:
        params = trial.params
        if not self.fits(params):
            trial.set_user_attr(attributes.OUTCOME, Outcome.OUT_OF_MEMORY.value)
            return study.tell(trial, state=TrialState.PRUNED)
        forward, backward, step, other = self.seconds(params)
        phases = {"forward": forward, "backward": backward, "step": step, "latency": forward + backward + step + other}
        trial.set_user_attr(attributes.METRICS, phases)
        trial.set_user_attr(attributes.PEAK_BYTES, self.peak(params))
        trial.set_user_attr(attributes.OVERHEAD_S, self.overhead_s)
        trial.set_user_attr(attributes.OUTCOME, Outcome.MEASURED.value)
        return study.tell(trial, self.rate(params))

    def run(self, study: optuna.Study, launches: int) -> list[FrozenTrial]:
        done = []
        for _ in range(launches):
            trial = study.ask()
            self.space.suggest(trial)
            done.append(self.answer(study, trial))
        return done

    def best(self, planner: GuidedPlanner) -> float:
        """Return the best rate of all configurations, by enumeration."""
        result = 0.0
        for params in planner.problem.table.lineages:
            for size in planner.problem.sizes.tolist():
                whole = {**params, MICRO_BATCH: size}
                if not self.fits(whole):
                    break
                result = max(result, self.rate(whole))
        return result
