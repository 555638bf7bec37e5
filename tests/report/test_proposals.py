"""What to change or buy next is about what the machine has and the study allows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from optuna.distributions import CategoricalDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from optuna_dsat.config.space_builder import SpaceRequest, build_space
from optuna_dsat.guided.planner import GuidedPlanner
from optuna_dsat.guided.problem import Problem
from optuna_dsat.report.explain.proposals import Situation, proposals_by_name
from optuna_dsat.trials import attributes
from optuna_dsat.trials.lineage import MICRO_BATCH
from tests.harness.small_model import CONFIG, HARDWARE, KEPT, PROFILE

MACHINES = {
    "cpu-1": replace(HARDWARE, world_size=1, ranks_per_node=1, device="cpu"),
    "cpu-4": replace(HARDWARE, device="cpu"),
    "gpu-1": replace(HARDWARE, world_size=1, ranks_per_node=1),
    "gpu-4": HARDWARE,
    "gpu-2x4": replace(HARDWARE, world_size=8),
}
STUDIES: dict[str, dict[str, Any]] = {
    "free": {},
    "fixed": {"samples_per_rank": 2},
    "fixed-accumulating": {"samples_per_rank": 8},
    "capped": {"max_samples_per_rank": 3},
}
SEVERAL = {"cpu-4", "gpu-4", "gpu-2x4"}
ONLY_ON = {
    "memory": (set(MACHINES), {"free", "fixed-accumulating"}),
    "link": ({"gpu-4", "gpu-2x4"}, set(STUDIES)),
    "accumulation": (SEVERAL, {"free"}),
    "host": ({"gpu-1", "gpu-4", "gpu-2x4"}, set(STUDIES)),
    "compute": (set(MACHINES), set(STUDIES)),
}
"""Proposal -> the machines and the studies that it may be made for."""
FOREIGN = {
    "cpu": ("GPU", "device", "link", "network", "offload"),
    "gpu": ("NVMe", "processors"),
    "1": ("link", "network", "accumulation"),
    "4": ("network",),
    "2x4": ("link between",),
}
"""Words that no proposal for such a machine has; those for the CPU may name its option."""
SIZE = 2


def situation(machine: str, study: str, *, offloads: bool, bounds: dict[str, float], share: float = 0.9) -> Situation:
    hardware = MACHINES[machine]
    space = build_space(
        SpaceRequest(
            ds_config=CONFIG, zero_stages=(1, 2, 3), fix={}, no_tune=KEPT, nvme_path=None, params=PROFILE.params,
            micro_batch_cap=64, device=hardware.device, **STUDIES[study],
        )
    )  # fmt: skip
    profile = PROFILE if hardware.device == "cuda" else replace(PROFILE, flops_per_sample=10**10)
    planner = GuidedPlanner(Problem(profile=profile, hardware=hardware, config=CONFIG, space=space))
    wanted = {"zero_stage": 1, "offload_optimizer": "cpu" if offloads else "none"}
    params = {**space.completed(wanted), MICRO_BATCH: SIZE}
    winner = trial(params, **{attributes.PEAK_BYTES: round(share * planner.problem.device_bytes)})
    return Situation(planner=planner, trials=[], winner=winner, bounds=bounds, utilisation=None)


def trial(params: dict[str, Any], **attrs: Any) -> FrozenTrial:
    kinds = {name: CategoricalDistribution([value]) for name, value in params.items() if name != MICRO_BATCH}
    return create_trial(
        state=TrialState.COMPLETE,
        value=1.0,
        params=params,
        distributions={**kinds, MICRO_BATCH: IntDistribution(1, 64, log=True)},
        user_attrs=attrs,
    )


@pytest.mark.parametrize("offloads", [False, True], ids=["plain", "offloads"])
@pytest.mark.parametrize("study", STUDIES)
@pytest.mark.parametrize("machine", MACHINES)
def test_a_proposal_is_made_exactly_where_it_can_be_followed(machine: str, study: str, offloads: bool) -> None:
    bound = situation(machine, study, offloads=offloads, bounds={"link": 0.45, "host": 0.45, "compute": 0.1})
    given = proposals_by_name(bound)
    given |= proposals_by_name(situation(machine, study, offloads=offloads, bounds={"compute": 0.9}))
    wanted = {name for name, (machines, studies) in ONLY_ON.items() if machine in machines and study in studies}
    assert given.keys() == wanted - (set() if offloads else {"host"})
    if study == "free":
        bought = [text for name, text in given.items() if name not in ("compute", "memory")]
        for word in (*FOREIGN[machine[:3]], *FOREIGN[machine[4:]]):
            assert word not in "\n".join(bought)
    if machine.startswith("cpu"):
        assert "GPUs" not in "\n".join(given.values())


def test_nothing_is_proposed_against_data_or_listed_sizes_that_do_not_allow_it() -> None:
    bounds = {"link": 0.5, "compute": 0.5}
    free = situation("gpu-4", "free", offloads=False, bounds=bounds)
    short = trial({"zero_stage": 1, MICRO_BATCH: 1}, **{attributes.DATA_LIMIT: 2 * SIZE})
    given = proposals_by_name(free)
    assert {"memory", "accumulation"} <= given.keys()
    assert "exchanges less per sample" in given["accumulation"]
    assert proposals_by_name(replace(free, trials=[short])).keys() == {"memory", "link"}
    listed = replace(free.planner.problem.space, micro_batch_values=(1, SIZE))
    free.planner.problem.space = listed
    assert proposals_by_name(free).keys() == {"accumulation", "link"}


def test_no_larger_batch_is_proposed_where_the_time_of_a_step_is_what_counts() -> None:
    for study, expected in (("free", {"link"}), ("fixed-accumulating", {"link", "memory"})):
        now = situation("gpu-4", study, offloads=False, bounds={"link": 0.5, "compute": 0.5})
        now.planner.problem.metric = "latency"
        assert proposals_by_name(now).keys() == expected


def test_memory_is_proposed_only_where_it_is_full() -> None:
    result = proposals_by_name(situation("gpu-4", "free", offloads=False, bounds={"compute": 1.0}, share=0.5))
    assert result.keys() == {"compute"}
