"""Knobs that are searched with ``--allow`` only: when they apply, and how they are written and read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from optuna_dsat.config import ds_config
from optuna_dsat.config.conditions import BF16, BF16_MASTER, BF16_STATES
from optuna_dsat.config.differences import knob_differences, lossy_settings
from optuna_dsat.config.knobs import (
    CHECKPOINT_EVERY,
    COMPILE,
    DEEPCOMPILE,
    KNOBS,
    MODEL,
    QUANTIZED,
    ZENFLOW,
    ZENFLOW_SECTION,
)
from optuna_dsat.config.search_space import SearchSpace
from optuna_dsat.config.space_builder import SpaceRequest, build_space
from optuna_dsat.errors import ConfigError

BASE: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
SIZES = {knob.name: knob.default for knob in KNOBS if knob.kind == "size" and not knob.inert}


def make(permitted: set[str] | None = None, *, config: dict[str, Any] | None = None, **options: Any) -> SearchSpace:
    request: dict[str, Any] = {"zero_stages": (0, 1, 2, 3), "device": "cuda", "ranks_per_node": 2, **options}
    request["fix"] = {**SIZES, **request.get("fix", {})}
    return build_space(SpaceRequest(ds_config={**BASE, **(config or {})}, permitted=permitted or set(), **request))


def configs(space: SearchSpace, base: dict[str, Any] = BASE) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return each lineage with its DeepSpeed config at micro-batch 4."""
    result = []
    for lineage in space.lineages():
        params = {**lineage, ds_config.MICRO_BATCH: 4}
        config = ds_config.merge(base, space.overlay(params))
        assert space.params_of(config) == params
        result.append((lineage, config))
    return result


def test_without_permission_none_is_in_the_space_nor_may_be_fixed() -> None:
    names = {knob.name for knob in KNOBS if knob.permission}
    assert {COMPILE, DEEPCOMPILE} <= names
    assert not names & {tuned.name for tuned in make().knobs}
    for fix in ({COMPILE: True}, {DEEPCOMPILE: "true"}):
        with pytest.raises(ConfigError, match=r"with --allow compile.* does not hold here"):
            make(fix=fix)


def test_with_permission_sizes_have_two_choices() -> None:
    request = SpaceRequest(ds_config=BASE, zero_stages=(3,), device="cuda", ranks_per_node=8, params=10**9)
    plain, allowed = build_space(request), build_space(replace(request, permitted=(COMPILE, *QUANTIZED)))
    sizes = {tuned.name: tuned.choices for tuned in allowed.knobs if tuned.knob.kind == "size"}
    assert sizes["reduce_bucket_size"] == (50_000_000, 500_000_000)
    assert sizes["stage3_param_persistence_threshold"] == (10_000, 100_000)
    assert allowed.classes() < plain.classes()


def test_a_model_is_compiled_and_deepcompile_is_a_part_of_it() -> None:
    seen = {
        (lineage["zero_stage"], lineage[COMPILE], lineage.get(DEEPCOMPILE)): config
        for lineage, config in configs(make({COMPILE, DEEPCOMPILE}))
    }
    stages = (1, 2, 3)
    assert seen.keys() == {
        *((0, on, None) for on in (False, True)),
        *((stage, False, None) for stage in stages),
        *((stage, True, deep) for stage in stages for deep in (False, True)),
    }
    assert [seen[2, on, None].get(MODEL) for on in (False,)] == [None]
    plain, deep = seen[2, True, False], seen[2, True, True]
    assert (plain[MODEL], plain.get("compile")) == ({COMPILE: True}, None)
    assert (deep[MODEL], deep["compile"]) == ({COMPILE: True}, {"deepcompile": True})
    assert len({ds_config.canonical_key(config) for config in seen.values()}) == len(seen)
    assert knob_differences(deep, BASE)[DEEPCOMPILE] is True
    assert knob_differences(deep, BASE)[COMPILE] is True


def test_deepcompile_is_not_tried_with_checkpointing_nor_compilation_with_pipelines() -> None:
    space = make({COMPILE, DEEPCOMPILE}, worthwhile={CHECKPOINT_EVERY})
    assert {lineage.get(DEEPCOMPILE) for lineage in space.lineages() if lineage[CHECKPOINT_EVERY]} == {None}
    assert all(COMPILE not in lineage for lineage in make({COMPILE}, pipeline=True).lineages())


def test_bf16_replaces_another_precision_and_allows_its_states() -> None:
    base = {**BASE, "fp16": {"enabled": True, "initial_scale_power": 8}}
    seen = configs(make({BF16, BF16_STATES}, config=base, zero_stages=(0, 2)), base)
    for lineage, config in seen:
        assert (ds_config.precision_of(config) == "bf16") is lineage[BF16]
        assert ("fp16" in config) is not lineage[BF16]
        assert (BF16_STATES in lineage) == (lineage[BF16] and lineage["zero_stage"] == 2)
        states = config.get("bf16", {}).get(BF16_STATES)
        assert states == config.get("bf16", {}).get(BF16_MASTER) == (lineage.get(BF16_STATES) or None)
        expected = {name: True for name in (BF16, BF16_STATES) if lineage.get(name)}
        assert lossy_settings(config, base) == (expected | {BF16_MASTER: True} if BF16_STATES in expected else expected)
    assert any(lineage.get(BF16_STATES) for lineage, _ in seen)
    assert lossy_settings(base, base) == {}


def test_states_in_bf16_need_deepspeeds_adam_on_the_host_and_no_nvme() -> None:
    bf16 = {"bf16": {"enabled": True}}
    permitted = {BF16_STATES, BF16_MASTER}
    for optimizer, own in ((BASE["optimizer"], True), ({"type": "SGD"}, False)):
        base = {**BASE, **bf16, "optimizer": optimizer}
        space = make(permitted, config=base, zero_stages=(1, 2, 3), nvme_path="/nvme")
        for lineage in space.lineages():
            on_host = lineage["offload_optimizer"] == "cpu"
            on_nvme = bool(lineage.get("offload_optimizer_nvme"))
            assert (BF16_STATES in lineage) == (not on_nvme and (own or not on_host))
            assert (BF16_MASTER in lineage) == (BF16_STATES in lineage and on_host and not lineage[BF16_STATES])
    accumulated = {**BASE, **bf16, "data_types": {"grad_accum_dtype": "fp32"}}
    first = make(permitted, config=accumulated, zero_stages=(1,))
    assert {(lineage["offload_optimizer"], BF16_STATES in lineage) for lineage in first.lineages()} == {
        ("none", False), ("cpu", True),
    }  # fmt: skip


def test_a_value_of_the_users_own_is_dropped_where_it_would_be_refused() -> None:
    own = {"bf16": {"enabled": True, BF16_STATES: True, BF16_MASTER: True}}
    base = {**BASE, **own}
    by_stage = {lineage["zero_stage"]: config for lineage, config in configs(
        make({BF16_STATES, BF16_MASTER}, config=base, zero_stages=(0, 2), fix={"offload_optimizer": "none"}), base
    ) if lineage.get(BF16_STATES, True)}  # fmt: skip
    assert by_stage[0]["bf16"] == {"enabled": True}
    assert by_stage[2]["bf16"] == own["bf16"]


def test_zero_quantises_at_stage_3_and_its_gradients_between_nodes() -> None:
    one, several = (make(set(QUANTIZED), nodes=nodes, zero_stages=(2, 3)) for nodes in (1, 2))
    for lineage in one.lineages():
        assert (QUANTIZED[0] in lineage) == (lineage["zero_stage"] == 3)
        assert QUANTIZED[1] not in lineage
    for lineage in several.lineages():
        assert (QUANTIZED[1] in lineage) == bool(lineage["zero_stage"] == 3 and lineage.get("reduce_scatter", True))
    assert not any(QUANTIZED[0] in lineage for lineage in make(set(QUANTIZED), ranks_per_node=1).lineages())


def test_zenflow_is_a_section_of_offloads_without_accumulation() -> None:
    space = make({ZENFLOW})
    for lineage, config in configs(space):
        applies = lineage["zero_stage"] in (1, 2) and lineage["offload_optimizer"] == "cpu"
        applies = applies and lineage.get("reduce_scatter", True)
        assert (ZENFLOW in lineage) == applies
        section = config["zero_optimization"].get(ZENFLOW)
        assert section == (ZENFLOW_SECTION if lineage.get(ZENFLOW) else None)
        assert lossy_settings(config, BASE) == ({ZENFLOW: True} if section else {})
    at_batch = space.at_batch(8)
    assert at_batch is not None
    assert not any(lineage.get(ZENFLOW) for lineage in at_batch.lineages())
    own = {"stage": 2, "offload_optimizer": {"device": "cpu"}, ZENFLOW: {"topk_ratio": 0.2}}
    mine = make({ZENFLOW}, config={"zero_optimization": own}, zero_stages=(2,))
    sections = {str(config["zero_optimization"].get(ZENFLOW)) for _, config in
                configs(mine, {**BASE, "zero_optimization": own})}  # fmt: skip
    assert sections == {"None", str(own[ZENFLOW])}


def test_a_users_zenflow_stays_where_deepspeed_accepts_it() -> None:
    own = {"stage": 2, "offload_optimizer": {"device": "cpu"}, ZENFLOW: {"topk_ratio": 0.2}}
    space = make(config={"zero_optimization": own})
    lineages = list(space.lineages())
    assert {(lineage["zero_stage"], lineage["offload_optimizer"]) for lineage in lineages} == {(1, "cpu"), (2, "cpu")}
    assert not any("reduce_scatter" in lineage for lineage in lineages)
    assert any("overlap_comm" in lineage for lineage in lineages)
    assert space.holds_accumulation
    selective = {**own, "overlap_comm": True, ZENFLOW: {"offload": True}}
    for permitted in (set(), {ZENFLOW}):
        mine = make(permitted, config={"zero_optimization": selective}, zero_stages=(2,))
        assert not any("overlap_comm" in lineage for lineage in mine.lineages()), "DeepSpeed asserts it"
    with pytest.raises(ConfigError, match="ZenFlow runs with ZeRO 1 and 2 only"):
        make(config={"zero_optimization": own}, zero_stages=(0, 3))
    assert all(lineage.get("reduce_scatter", True) for lineage in make({ZENFLOW}).lineages() if lineage.get(ZENFLOW))
