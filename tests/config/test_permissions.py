"""Knobs that are searched with ``--allow`` only: when they apply, and how they are written and read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from optuna_dsat.config import ds_config
from optuna_dsat.config.differences import knob_differences
from optuna_dsat.config.knobs import CHECKPOINT_EVERY, COMPILE, DEEPCOMPILE, KNOBS, MODEL
from optuna_dsat.config.space_builder import SearchSpace, SpaceRequest, build_space
from optuna_dsat.errors import ConfigError

BASE: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
SIZES = {knob.name: knob.default for knob in KNOBS if knob.kind == "size" and not knob.inert}


def make(permitted: set[str] | None = None, *, config: dict[str, Any] | None = None, **options: Any) -> SearchSpace:
    request: dict[str, Any] = {"zero_stages": (0, 1, 2, 3), "device": "cuda", "ranks_per_node": 2, **options}
    request["fix"] = {**SIZES, **request.get("fix", {})}
    return build_space(SpaceRequest(ds_config={**BASE, **(config or {})}, permitted=permitted or set(), **request))


def configs(space: SearchSpace) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return each lineage with its DeepSpeed config at micro-batch 4."""
    result = []
    for lineage in space.lineages():
        params = {**lineage, ds_config.MICRO_BATCH: 4}
        config = ds_config.merge(BASE, space.overlay(params))
        assert space.params_of(config) == params
        result.append((lineage, config))
    return result


def test_without_permission_none_is_in_the_space() -> None:
    names = {knob.name for knob in KNOBS if knob.permission}
    assert {COMPILE, DEEPCOMPILE} <= names
    assert not names & {tuned.name for tuned in make().knobs}


def test_with_permission_sizes_have_two_choices() -> None:
    request = SpaceRequest(ds_config=BASE, zero_stages=(3,), device="cuda", ranks_per_node=8, params=10**9)
    plain, allowed = build_space(request), build_space(replace(request, permitted=(COMPILE,)))
    sizes = {tuned.name: tuned.choices for tuned in allowed.knobs if tuned.knob.kind == "size"}
    assert sizes["reduce_bucket_size"] == (50_000_000, 500_000_000)
    assert sizes["stage3_param_persistence_threshold"] == (10_000, 100_000)
    assert allowed.classes() < plain.classes()


@pytest.mark.parametrize("fix", [{COMPILE: True}, {DEEPCOMPILE: "true"}])
def test_a_value_without_permission_is_refused(fix: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"with --allow compile.* does not hold here"):
        make(fix=fix)


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
