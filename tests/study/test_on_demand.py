"""Knobs that are searched where a profile shows that they are useful, or where they are named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optuna_dsat.config.ds_config import MICRO_BATCH, ZERO, merge
from optuna_dsat.config.knobs import BIND_CORES, LEAF_MODULE, MODEL, PIN_MEMORY
from optuna_dsat.config.search_space import SearchSpace
from optuna_dsat.cost.memory import estimate, zero_settings
from optuna_dsat.cost.step_time import Columns, StepTimeModel
from optuna_dsat.errors import ConfigError
from optuna_dsat.study.profile.profiled import Profiled
from optuna_dsat.study.space import space_of
from tests.harness.small_model import CONFIG, GIB, HARDWARE, PROFILE, profiled_of
from tests.harness.studies import spec_of
from tests.study.conftest import ZERO_3_KNOBS

CPU = {"device": "cpu"}


def space(profiled: Profiled, **changes: Any) -> SearchSpace:
    return space_of(spec_of(Path("/x"), **{"method": "guided", "no_tune": ZERO_3_KNOBS, **changes}), profiled)


def choices(profiled: Profiled, name: str, **changes: Any) -> tuple[Any, ...] | None:
    return {tuned.name: tuned.choices for tuned in space(profiled, **changes).knobs}.get(name)


def mixture() -> Profiled:
    return profiled_of(profile=replace(PROFILE, leaf_classes=("Mixture",), leaf_params=10**8))


def test_a_mixture_of_experts_is_a_leaf_at_zero_3_unless_the_user_says_otherwise() -> None:
    assert choices(profiled_of(), LEAF_MODULE) is None
    searched = space(mixture())
    for params in searched.lineages():
        zero = searched.overlay({**params, MICRO_BATCH: 1})[ZERO]
        assert zero.get(LEAF_MODULE) == ({"classes": ["Mixture"]} if params["zero_stage"] == 3 else None)
    assert choices(mixture(), LEAF_MODULE, fix={LEAF_MODULE: False}) == (False,)
    assert choices(mixture(), LEAF_MODULE, no_tune=(LEAF_MODULE,)) is None
    own = {"stage": 3, LEAF_MODULE: {"classes": ["Mine"]}}
    assert choices(mixture(), LEAF_MODULE, ds_config={**CONFIG, ZERO: own}) is None
    with pytest.raises(ConfigError, match="no module of the model was seen to route samples"):
        space(profiled_of(), fix={LEAF_MODULE: True})


def test_a_leaf_is_gathered_as_a_whole() -> None:
    profile = mixture().profile
    plain, leaf = (
        estimate(profile, {**CONFIG, ZERO: {"stage": 3, **zero}}, micro_batch=1, hardware=HARDWARE).parts
        for zero in ({}, {LEAF_MODULE: {"classes": ["Mixture"]}})
    )
    assert leaf["gathered_parameters"] >= plain["gathered_parameters"]
    assert leaf["gather_in_flight"] > plain["gather_in_flight"]


@pytest.mark.parametrize(("host_gib", "searched"), [(512, False), (20, True), (1, False)])
def test_page_locked_memory_is_searched_where_only_other_memory_may_fit(host_gib: int, searched: bool) -> None:
    known = profiled_of(profile=replace(PROFILE, host_memory_bytes=host_gib * GIB))
    assert (choices(known, PIN_MEMORY) is not None) == searched
    assert choices(known, PIN_MEMORY, fix={PIN_MEMORY: False}) == (False,)
    assert choices(known, PIN_MEMORY, no_tune=(PIN_MEMORY,)) is None


@pytest.mark.parametrize(("nodes", "searched"), [(1, False), (2, True)])
def test_cores_of_ranks_are_searched_with_offloads_on_hosts_with_several_numa_nodes(nodes: int, searched: bool) -> None:
    known = profiled_of(profile=replace(PROFILE, numa_nodes=nodes))
    assert (choices(known, BIND_CORES) is not None) == searched
    assert choices(known, BIND_CORES, no_tune=(BIND_CORES,)) is None
    assert choices(known, BIND_CORES, ds_config={**CONFIG, MODEL: {BIND_CORES: True}}) is None
    offloaded = space(known, only=(BIND_CORES,), ds_config={**CONFIG, ZERO: {"stage": 2, "offload_optimizer": CPU}})
    overlays = [offloaded.overlay({**params, MICRO_BATCH: 1}) for params in offloaded.lineages()]
    assert [bool(overlay.get(MODEL, {}).get(BIND_CORES)) for overlay in overlays] == [False, True]


def test_a_share_of_the_optimizer_moves_from_the_host_to_the_device() -> None:
    adam = {"optimizer": {"type": "AdamW", "params": {}}}
    offload = {"stage": 3, "sub_group_size": PROFILE.params // 40, "offload_optimizer": CPU}
    owned, configs = PROFILE.params / HARDWARE.world_size, []
    for ratio in (1.0, 0.75, 0.25):
        configs.append(merge({**CONFIG, **adam, ZERO: offload}, {ZERO: {"offload_optimizer": {"ratio": ratio}}}))
    parts = [estimate(PROFILE, config, micro_batch=1, hardware=HARDWARE) for config in configs]
    persistent = [item.parts.get("master", 0) + item.parts.get("optimizer", 0) for item in parts]
    assert persistent == pytest.approx([0, 12 * owned * 0.2, 12 * owned * 0.7])  # of ten sub-groups, 2 and 7
    assert parts[0].host_bytes > parts[1].host_bytes > parts[2].host_bytes
    columns = Columns.of([zero_settings(PROFILE, config, HARDWARE) for config in configs])
    assert list(columns.host_share) == pytest.approx([1, 0.8, 0.3])
    model = StepTimeModel.of(PROFILE, HARDWARE, machine={})
    logs = model.prior_coefficients().mean
    update = model.phases(logs, columns, *(np.full(3, value) for value in (4.0, 1.0, 0.5)))[2]
    assert update[0] > update[1] > update[2]


def test_copies_from_other_memory_take_longer() -> None:
    configs = [
        {**CONFIG, ZERO: {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": pinned}}}
        for pinned in (True, False)
    ]
    columns = Columns.of([zero_settings(PROFILE, config, HARDWARE) for config in configs])
    model = StepTimeModel.of(PROFILE, HARDWARE, machine={})
    phases = model.phases(model.prior_coefficients().mean, columns, *(np.full(2, value) for value in (4.0, 1.0, 0.5)))
    assert phases[2, 1] > phases[2, 0]
