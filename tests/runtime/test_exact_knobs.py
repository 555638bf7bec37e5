"""Knobs that are exact: DeepSpeed reads each of them on CPU ranks, and the training stays the same.

Page-locked memory and updates on a GPU show on a GPU only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from optuna_dsat.config import ds_config
from optuna_dsat.config.knobs import LEAF_MODULE, OFFLOAD_OPTIMIZER, OFFLOAD_RATIO, PIN_MEMORY, ZENFLOW_SECTION
from optuna_dsat.config.space_builder import SpaceRequest, build_space
from optuna_dsat.runtime.measure import blocks
from optuna_dsat.runtime.measure.blocks import RoutingWatch, expert_modules, gather_experts

SCRIPT = Path(__file__).with_name("exact_engines.py")
BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
    "bf16": {"enabled": True},
    "steps_per_print": 10**6,
}


def config(stage: int, **knobs: Any) -> dict[str, Any]:
    """Return the config that the search writes for values of knobs."""
    own = {**BASE, "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    small = {"reduce_bucket_size": 600, "sub_group_size": 150}
    named = {name: value for name, value in {**small, **knobs}.items() if stage == 3 or name != "sub_group_size"}
    space = build_space(
        SpaceRequest(
            ds_config=own,
            zero_stages=(stage,),
            fix=named,
            device="cpu",
            params=2_000,
            ranks_per_node=2,
            leaf_classes=("Mixture",),
        )
    )
    lineage = space.completed({"zero_stage": stage})
    result = ds_config.merge(own, space.overlay({**lineage, ds_config.MICRO_BATCH: 4}))
    return {key: value for key, value in result.items() if value is not None}


def trained(*items: dict[str, Any]) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(SCRIPT)]
    root = str(SCRIPT.parents[2])
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    done = subprocess.run([*command, json.dumps(items)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    result: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(set(result[0]["losses"])) == len(result[0]["losses"])
    return result


@pytest.mark.torchrun
def test_zero_2_reads_its_knobs_and_trains_alike() -> None:
    offload = {OFFLOAD_OPTIMIZER: "cpu"}
    plain, owners, offloaded, spread, unpinned = trained(
        {"config": config(2)},
        {"config": config(2, use_multi_rank_bucket_allreduce=False)},
        {"config": config(2, **offload)},
        {"config": config(2, **offload, round_robin_gradients=True)},
        {"config": config(2, **offload, **{PIN_MEMORY: False})},
    )
    assert owners["losses"] == plain["losses"]
    assert "reduce" not in plain["collectives"]
    assert owners["collectives"]["reduce"][0] > 0
    assert owners["collectives"].get("all_reduce", [0])[0] < plain["collectives"]["all_reduce"][0]
    assert spread["losses"] == offloaded["losses"] == unpinned["losses"]
    assert sorted(spread["order"]) == offloaded["order"] != spread["order"]
    assert (offloaded["pinned"], unpinned["pinned"]) == (True, False)


@pytest.mark.torchrun
def test_zenflow_counts_as_a_step_what_it_updates_at_a_time() -> None:
    """``loss_check`` compares the losses of every so many steps of the script."""
    plain = config(2, **{OFFLOAD_OPTIMIZER: "cpu"})
    late = ds_config.merge(plain, {"zero_optimization": {"zenflow": ZENFLOW_SECTION}})
    own, zenflow = trained({"config": plain}, {"config": late})
    assert (own["accumulation"], zenflow["accumulation"]) == (1, ZENFLOW_SECTION["update_interval"])
    assert own["losses"] != zenflow["losses"]


@pytest.mark.torchrun
def test_zero_3_leaves_a_share_of_the_sub_groups_to_the_device() -> None:
    whole, half, quarter = trained(
        *({"config": config(3, **{OFFLOAD_OPTIMIZER: "cpu", OFFLOAD_RATIO: ratio})} for ratio in (1.0, 0.5, 0.25))
    )
    assert whole["groups"] >= 4
    assert not whole["updated_by_torch"]
    for share in (half, quarter):
        assert share["updated_by_torch"]
        assert share["losses"] == pytest.approx(whole["losses"], rel=1e-3)


@pytest.mark.torchrun
def test_a_mixture_of_experts_is_a_leaf_of_zero_3() -> None:
    exact = {"bf16": {"enabled": False}}
    torch_adam = {"type": "AdamW", "params": {**BASE["optimizer"]["params"], "torch_adam": True}}
    (whole,) = trained({"config": BASE | exact | {"optimizer": torch_adam}, "mixture": True})
    assert (whole["routing"], whole["leaves"]) == (["Mixture"], [])
    leaf, other = config(3, **{LEAF_MODULE: True}), config(3)
    assert "leaf_module" not in other["zero_optimization"]
    gathered, profiled = trained(
        {"config": leaf | exact | {"optimizer": torch_adam}, "mixture": True},
        {"config": other | exact | {"optimizer": torch_adam}, "mixture": True, "profiled": True},
    )
    for result in (gathered, profiled):
        assert (result["routing"], result["leaves"]) == (["Mixture"], ["Mixture"])
        assert result["losses"] == pytest.approx(whole["losses"], rel=1e-5)


def test_experts_are_known_by_their_names_before_a_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "has_leaf_modules", lambda: True)

    def of(name: str, parts: nn.Module) -> nn.Module:
        module: nn.Module = type(name, (nn.Module,), {})()
        module.parts = parts
        return module

    def parts(count: int = 2) -> nn.ModuleList:
        return nn.ModuleList(nn.Linear(2, 2) for _ in range(count))

    inner = of("SparseMoe", parts())
    model = nn.Sequential(of("Stage", parts()), inner, of("MixtureOfExperts", nn.ModuleList([inner])))
    assert expert_modules(model) == [inner]
    for single in (of("Moe", parts()), of("Root", of("Moe", parts(1)))):
        assert expert_modules(single) == [], "a model is no leaf, nor is a single expert"
    for zero in ({"stage": 2}, {"stage": 3, LEAF_MODULE: {"names": ["1"]}}, {"stage": 3}):
        given: dict[str, Any] = {"zero_optimization": dict(zero)}
        gather_experts(model, given)
        named = {LEAF_MODULE: {"classes": ["SparseMoe"]}} if zero == {"stage": 3} else {}
        assert given["zero_optimization"] == {**zero, **named}


def test_only_modules_that_route_samples_are_reported() -> None:
    class Alike(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum((part(x) for part in self.parts), x)

    class Skips(Alike):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.parts[1](x)
            return result

    class Widens(Alike):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(4 * 2**index, 8 * 2**index) for index in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.parts:
                x = part(x)
            return x[:, :4]

    for kind, routes in ((Alike, False), (Skips, True), (Widens, False)):
        model = nn.Sequential(kind(), kind())
        watch = RoutingWatch(model)
        with watch.forward():
            model(torch.zeros(2, 4))
        assert len(watch.routing_modules()) == 2 * routes, kind
        assert not any(part._forward_pre_hooks for part in model.modules())


def test_a_ratio_is_written_with_sub_groups_that_make_it_act() -> None:
    space = build_space(
        SpaceRequest(ds_config=BASE, zero_stages=(1, 2, 3), params=4 * 10**8, ranks_per_node=2, device="cuda")
    )
    ratios = {tuned.name: tuned.choices for tuned in space.knobs}
    assert ratios["sub_group_size"] == (20_000_000, 400_000_000)
    for params in space.lineages():
        shared = params["zero_stage"] == 3 and params["offload_optimizer"] == "cpu"
        assert (OFFLOAD_RATIO in params) == (shared and params["sub_group_size"] == 20_000_000)
        section = space.overlay({**params, ds_config.MICRO_BATCH: 1})["zero_optimization"]["offload_optimizer"]
        assert (section or {}).get("ratio") == params.get(OFFLOAD_RATIO)
    for optimizer in ({"type": "SGD"}, {"type": "Adam", "params": {"adam_w_mode": False}}, {"type": "AdamW",
                      "params": {"torch_adam": True}}):  # fmt: skip
        other = build_space(SpaceRequest(ds_config={**BASE, "optimizer": optimizer}, params=4 * 10**8, device="cuda"))
        assert not any(OFFLOAD_RATIO in params for params in other.lineages())
