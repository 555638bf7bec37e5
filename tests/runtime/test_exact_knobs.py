"""Knobs that are exact: DeepSpeed reads each of them on CPU ranks, and the training stays the same.

Page-locked memory and updates on a GPU show on a GPU only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from optuna_dsat.config import ds_config
from optuna_dsat.config.conditions import OFFLOAD_OPTIMIZER
from optuna_dsat.config.knobs import LEAF_MODULE, OFFLOAD_RATIO, PIN_MEMORY, ZENFLOW_SECTION
from optuna_dsat.config.space_builder import SpaceRequest, build_space
from optuna_dsat.runtime.measure import blocks
from optuna_dsat.runtime.measure.blocks import RoutingWatch, expert_modules, gather_experts
from tests.harness.ranks import WarmRanks

SCRIPT = Path(__file__).with_name("exact_engines.py")
BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
    "bf16": {"enabled": True},
    "steps_per_print": 10**6,
}


BY_TORCH = {"optimizer": {"type": "AdamW", "params": {**BASE["optimizer"]["params"], "torch_adam": True}}}
"""No update on the device by ``FusedAdam``, which a compiler needs minutes for."""


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
    result = result if OFFLOAD_OPTIMIZER in knobs else ds_config.merge(result, BY_TORCH)
    return {key: value for key, value in result.items() if value is not None}


OFFLOADED = {OFFLOAD_OPTIMIZER: "cpu"}
EXACT = {"bf16": {"enabled": False}} | BY_TORCH
MIXTURE = {"mixture": True}
ASKED: dict[str, dict[str, Any]] = {
    "plain": {"config": config(2)},
    "owners": {"config": config(2, use_multi_rank_bucket_allreduce=False)},
    "offloaded": {"config": config(2, **OFFLOADED)},
    "spread": {"config": config(2, **OFFLOADED, round_robin_gradients=True)},
    "unpinned": {"config": config(2, **OFFLOADED, **{PIN_MEMORY: False})},
    "zenflow": {
        "config": ds_config.merge(config(2, **OFFLOADED), {"zero_optimization": {"zenflow": ZENFLOW_SECTION}}),
    },
    **{f"ratio {ratio:g}": {"config": config(3, **OFFLOADED, **{OFFLOAD_RATIO: ratio})} for ratio in (1.0, 0.5, 0.25)},
    "mixture": {"config": BASE | EXACT} | MIXTURE,
    "gathered": {"config": config(3, **{LEAF_MODULE: True}) | EXACT} | MIXTURE,
    "profiled": {"config": config(3) | EXACT, "profiled": True} | MIXTURE,
}


@pytest.fixture(scope="module")
def trained(warm_ranks: WarmRanks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Train with each of these in one launch."""
    folder = tmp_path_factory.mktemp("exact")
    results: list[dict[str, Any]] = warm_ranks.train_engines(SCRIPT, [*ASKED.values()], folder)
    assert len(set(results[0]["losses"])) == len(results[0]["losses"])
    return dict(zip(ASKED, results, strict=True))


@pytest.mark.torchrun
def test_zero_2_reads_its_knobs_and_trains_alike(trained: dict[str, dict[str, Any]]) -> None:
    names = ("plain", "owners", "offloaded", "spread", "unpinned")
    plain, owners, offloaded, spread, unpinned = (trained[name] for name in names)
    assert owners["losses"] == plain["losses"]
    assert "reduce" not in plain["collectives"]
    assert owners["collectives"]["reduce"][0] > 0
    assert owners["collectives"].get("all_reduce", [0])[0] < plain["collectives"]["all_reduce"][0]
    assert spread["losses"] == offloaded["losses"] == unpinned["losses"]
    assert sorted(spread["order"]) == offloaded["order"] != spread["order"]
    assert (offloaded["pinned"], unpinned["pinned"]) == (True, False)


@pytest.mark.torchrun
def test_zenflow_counts_as_a_step_what_it_updates_at_a_time(trained: dict[str, dict[str, Any]]) -> None:
    """``loss_check`` compares the losses of every so many steps of the script."""
    own, zenflow = trained["offloaded"], trained["zenflow"]
    assert (own["accumulation"], zenflow["accumulation"]) == (1, ZENFLOW_SECTION["update_interval"])
    assert own["losses"] != zenflow["losses"]


@pytest.mark.torchrun
def test_zero_3_leaves_a_share_of_the_sub_groups_to_the_device(trained: dict[str, dict[str, Any]]) -> None:
    whole = trained["ratio 1"]
    assert whole["groups"] >= 4
    assert not whole["updated_by_torch"]
    for share in (trained["ratio 0.5"], trained["ratio 0.25"]):
        assert share["updated_by_torch"]
        assert share["losses"] == pytest.approx(whole["losses"], rel=1e-3)


@pytest.mark.torchrun
def test_a_mixture_of_experts_is_a_leaf_of_zero_3(trained: dict[str, dict[str, Any]]) -> None:
    whole = trained["mixture"]
    assert (whole["routing"], whole["leaves"]) == (["Mixture"], [])
    assert "leaf_module" not in ASKED["profiled"]["config"]["zero_optimization"]
    for result in (trained["gathered"], trained["profiled"]):
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
