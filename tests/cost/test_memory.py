"""The memory model against published figures, against DeepSpeed's estimators, and against itself."""

from __future__ import annotations

import random
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

from optuna_dsat.config.ds_config import MICRO_BATCH_CAP
from optuna_dsat.cost.memory import (
    Hardware,
    ModelProfile,
    estimate,
    largest_micro_batch,
    swap_needs,
    swap_settings,
    zero_settings,
)
from optuna_dsat.cost.zero_states import optimizer_bytes_per_param
from optuna_dsat.runtime.events import ProfileMeasured
from optuna_dsat.study.space import hardware_of
from tests.harness.small_model import profiled_of
from tests.harness.studies import spec_of

GIB = 2**30
STATES = ("parameters", "gradients", "master", "optimizer")


def profile(**changes: Any) -> ModelProfile:
    values: dict[str, Any] = {
        "params": 1_000_000_000,
        "trainable_params": 1_000_000_000,
        "largest_layer_params": 50_000_000,
        "param_bytes": 2,
        "activation_bytes_per_sample": GIB,
        "flops_per_sample": 10**12,
        "device_memory_bytes": 80 * GIB,
        "host_memory_bytes": 1000 * GIB,
        "peak_bytes": 0,
    }
    return ModelProfile(**{**values, **changes})


def hardware(**changes: Any) -> Hardware:
    values: dict[str, Any] = {
        "world_size": 8,
        "ranks_per_node": 8,
        "device_memory_bytes": 80 * GIB,
        "host_memory_bytes": 1000 * GIB,
    }
    return Hardware(**{**values, **changes})


def config(stage: int, *, accumulation: int = 1, **zero: Any) -> dict[str, Any]:
    return {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW"},
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage, **zero},
    }


def offload(*keys: str, device: str = "cpu") -> dict[str, Any]:
    return {f"offload_{key}": {"device": device} for key in keys}


def states(a_profile: ModelProfile, ds_config: dict[str, Any], where: Hardware) -> float:
    parts = estimate(a_profile, ds_config, micro_batch=0, hardware=where).parts
    return sum(size for name, size in parts.items() if name in STATES)


def test_a_stage_of_a_pipeline_is_partitioned_among_the_ranks_that_have_it() -> None:
    known = replace(profiled_of(profile=profile()), pipeline=True, data_parallel_size=2)
    where = hardware_of(spec_of(Path("study"), slots_per_trial=8), known)
    assert states(profile(), config(1), where) == states(profile(), config(1), hardware(world_size=2))
    assert where.ranks_on_node == 8
    ulysses = replace(known, pipeline=False)  # its ranks share samples and partition among all
    assert hardware_of(spec_of(Path("study"), slots_per_trial=8), ulysses).partitions == 8


ZERO_TABLE_1: dict[int, dict[int, tuple[float, float, float]]] = {
    7_500_000_000: {
        1: (120, 120, 120), 4: (52.5, 41.3, 30), 16: (35.6, 21.6, 7.5), 64: (31.4, 16.6, 1.88), 256: (30.4, 15.4, 0.47),
        1024: (30.1, 15.1, 0.12),
    },
    128_000_000_000: {
        1: (2048, 2048, 2048), 4: (896, 704, 512), 16: (608, 368, 128), 64: (536, 284, 32), 256: (518, 263, 8),
        1024: (513, 257, 2),
    },
    10**12: {
        1: (16000, 16000, 16000), 4: (7000, 5500, 4000), 16: (4750, 2875, 1000), 64: (4187, 2218, 250),
        256: (4046, 2054, 62.5), 1024: (4011, 2013, 15.6),
    },
}  # fmt: skip
"""Rajbhandari et al., "ZeRO" (arXiv:1910.02054), table 1: parameters -> degree of data parallelism -> GB of states
per device with P_os, P_os+g and P_os+g+p.
"""


@pytest.mark.parametrize("params", ZERO_TABLE_1)
def test_table_1_of_the_zero_paper(params: int) -> None:
    model = profile(params=params, trainable_params=params)
    for ranks, row in ZERO_TABLE_1[params].items():
        for stage, gigabytes in enumerate((16 * params / 1e9, *row)):
            result = states(model, config(stage), hardware(world_size=ranks)) / 1e9
            assert result == pytest.approx(gigabytes, rel=0.025), (ranks, stage)


@pytest.mark.parametrize(("stage", "billions"), [(0, 2.0), (1, 7.6), (2, 14.4), (3, 128.0)])
def test_table_2_of_the_zero_paper(stage: int, billions: float) -> None:
    """First row: billions of parameters whose model states fill 32 GB on 64 GPUs."""
    params = round(billions * 1e9)
    model = profile(params=params, trainable_params=params)
    assert states(model, config(stage), hardware(world_size=64)) / 1e9 == pytest.approx(32, rel=0.01)


@pytest.mark.parametrize(("gpus", "nodes"), [(1, 1), (1, 4), (8, 1), (4, 4)])
def test_deepspeeds_estimator_of_host_memory_with_both_offloads(gpus: int, nodes: int) -> None:
    """T0_3B of DeepSpeed's documentation: 2783 M parameters, 65 M in the largest layer."""
    params, layer = 2_783_000_000, 65_000_000
    model = profile(params=params, trainable_params=params, largest_layer_params=layer)
    where = hardware(world_size=gpus * nodes, ranks_per_node=gpus)
    host = estimate(model, config(3, **offload("optimizer", "param")), micro_batch=0, hardware=where).host_bytes
    cpu, _, _ = estimate_zero3_model_states_mem_needs(
        params, layer, gpus, nodes, True, True, additional_buffer_factor=1.0
    )
    assert host == pytest.approx(cpu, rel=0.12)  # ours keeps the half-precision gradients of the partition besides


@pytest.mark.parametrize("ranks", [1, 8, 64])
def test_deepspeeds_estimator_of_stage_2(ranks: int) -> None:
    """2P + 18P/N: the estimator counts the fp32 gradients of the optimizer step, ours lists them as such."""
    model = profile(params=7_500_000_000, trainable_params=7_500_000_000, activation_bytes_per_sample=0)
    small = config(2, reduce_bucket_size=2, contiguous_gradients=False)
    parts = estimate(model, small, micro_batch=0, hardware=hardware(world_size=ranks)).parts
    _, theirs = estimate_zero2_model_states_mem_needs(7_500_000_000, ranks, 1, cpu_offload=False)
    assert sum(parts.get(name, 0) for name in (*STATES, "fp32_gradients")) == pytest.approx(theirs, rel=1e-6)


def test_deepspeeds_estimator_of_stage_2_with_offload() -> None:
    model = profile(largest_layer_params=0)
    parts = estimate(model, config(2, **offload("optimizer")), micro_batch=0, hardware=hardware()).parts
    _, theirs = estimate_zero2_model_states_mem_needs(model.params, 8, 1, cpu_offload=True)
    assert sum(parts.get(name, 0) for name in (*STATES, "fp32_gradients")) == theirs


def test_host_memory_of_offload_stays_below_deepspeeds_estimator() -> None:
    """P * max(4N, 16) * 1.5; ours is without the factor of 1.5 and counts the fp32 gradients and the copies."""
    model = profile(params=10**9, largest_layer_params=0)
    host = estimate(model, config(2, **offload("optimizer")), micro_batch=0, hardware=hardware(world_size=4)).host_bytes
    theirs, _ = estimate_zero2_model_states_mem_needs(10**9, 4, 1, cpu_offload=True)
    assert host == 18 * 10**9
    assert theirs / 1.5 <= host <= theirs


@pytest.mark.parametrize("ranks", [8, 64])
def test_deepspeeds_estimator_of_stage_3(ranks: int) -> None:
    """4 * largest layer + 18P/N, with an error of the 2P/N that the estimator leaves out."""
    layer, params = 50_000_000, 7_500_000_000
    model = profile(params=params, trainable_params=params, largest_layer_params=layer)
    small = config(3, reduce_bucket_size=1, stage3_prefetch_bucket_size=0, stage3_max_reuse_distance=0)
    ours = estimate(model, small, micro_batch=0, hardware=hardware(world_size=ranks)).parts
    _, theirs, _ = estimate_zero3_model_states_mem_needs(params, layer, ranks, 1, False, False)
    result = sum(ours.get(name, 0) for name in (*STATES, "fp32_gradients")) + 4 * layer
    assert result == pytest.approx(theirs + 2 * params / ranks, rel=1e-6)


@pytest.mark.parametrize(("keys", "params_on_device"), [(("optimizer",), True), (("optimizer", "param"), False)])
def test_deepspeeds_estimator_of_stage_3_with_offload(keys: tuple[str, ...], params_on_device: bool) -> None:
    model = profile()
    parts = estimate(model, config(3, **offload(*keys)), micro_batch=0, hardware=hardware()).parts
    _, theirs, layer = estimate_zero3_model_states_mem_needs(model.params, 50_000_000, 8, 1, True, not params_on_device)
    assert sum(parts.get(name, 0) for name in STATES) == theirs - layer


def test_fp32_training_keeps_a_master_copy_only_with_zero() -> None:
    model = profile(param_bytes=4)
    plain = {"optimizer": {"type": "AdamW"}}
    where = hardware(world_size=1)
    assert states(model, plain, where) == 16 * model.params
    assert states(model, {**plain, "zero_optimization": {"stage": 2}}, where) == 20 * model.params


@pytest.mark.parametrize(
    ("section", "profiled", "expected"),
    [
        ({"type": "AdamW"}, "SGD", 8),
        ({}, "SGD", 0),
        ({"type": "SGD", "params": {"momentum": 0.9}}, "", 4),
        ({"type": "SGD", "params": {"momentum": "auto"}}, "", 4),
        ({"type": "SGD", "params": {"momentum": None}}, "", 0),
        ({"type": "Lion"}, "", 4),
        ({"type": "Adagrad"}, "", 4),
        ({}, "Adafactor", 0),
        ({}, "FusedLamb", 8),
        ({}, "SomethingNew", 8),
    ],
)
def test_optimizer_state(section: dict[str, Any], profiled: str, expected: int) -> None:
    assert optimizer_bytes_per_param({"optimizer": section} if section else {}, profiled) == expected


def test_frozen_parameters_have_neither_gradients_nor_state() -> None:
    adapter = profile(trainable_params=10_000_000)
    parts = estimate(adapter, config(0), micro_batch=0, hardware=hardware()).parts
    assert parts["parameters"] == 2 * adapter.params
    assert parts["optimizer"] == 8 * adapter.trainable_params
    assert states(adapter, config(1), hardware()) < states(profile(), config(1), hardware())


def test_the_parts_add_up() -> None:
    for stage in range(4):
        result = estimate(profile(), config(stage), micro_batch=3, hardware=hardware())
        assert sum(result.parts.values()) == result.device_bytes


def test_each_stage_and_each_offload_needs_less_on_the_device() -> None:
    ladder = [
        config(0),
        config(1),
        config(2),
        config(2, **offload("optimizer")),
        config(3, **offload("optimizer"), stage3_max_reuse_distance=0, stage3_prefetch_bucket_size=0),
        config(3, **offload("optimizer", "param"), stage3_max_reuse_distance=0, stage3_prefetch_bucket_size=0),
    ]
    sizes = [estimate(profile(), rung, micro_batch=1, hardware=hardware()).device_bytes for rung in ladder]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == len(sizes)
    hosts = [estimate(profile(), rung, micro_batch=1, hardware=hardware()).host_bytes for rung in ladder]
    assert hosts[:3] == [0, 0, 0]
    assert 0 < hosts[3] < hosts[5]


def test_buckets_cost_what_they_hold_and_double_with_overlap() -> None:
    def buckets(**zero: Any) -> int:
        result = estimate(profile(), config(2, **zero), micro_batch=1, hardware=hardware())
        return result.parts.get("reduce_buckets", 0)

    assert buckets(reduce_bucket_size=5e7) == 10**8
    assert buckets(reduce_bucket_size=5e7, overlap_comm=True) == 2 * 10**8
    assert buckets(reduce_bucket_size=5e7, contiguous_gradients=False, overlap_comm=False) == 0


@pytest.mark.parametrize(
    ("moment", "stage", "micro_batch", "ranks", "zero"),
    [
        ("forward", 1, 20, 2, {}),
        ("backward", 1, 0, 64, {"reduce_bucket_size": 5e8}),
        ("convert", 2, 0, 2, {"reduce_bucket_size": 2}),
        ("step", 0, 0, 2, {}),
    ],
)
def test_the_peak_comes_when_it_must(
    moment: str, stage: int, micro_batch: int, ranks: int, zero: dict[str, Any]
) -> None:
    result = estimate(profile(), config(stage, **zero), micro_batch=micro_batch, hardware=hardware(world_size=ranks))
    assert result.moment == moment


MEASURED: list[tuple[int, str, dict[str, Any], int]] = [
    (0, "fp32", {}, 1137),
    (1, "fp32", {}, 908),
    (1, "fp32", {"overlap_comm": True}, 908),
    (1, "fp32", {"contiguous_gradients": False}, 908),
    (2, "fp32", {}, 908),
    (2, "fp32", {"overlap_comm": True}, 908),
    (2, "fp32", offload("optimizer"), 1041),
    (3, "fp32", {}, 1034),
    (3, "fp32", {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}, 920),
    (3, "fp32", offload("optimizer", "param"), 1154),
    (0, "bf16", {}, 1159),
    (1, "bf16", {}, 800),
    (2, "bf16", {}, 800),
    (3, "bf16", {}, 807),
]
"""Stage, precision, settings, growth of the resident set in 10**6 bytes.

24 linear layers of 1536 x 1536 with ReLU, micro-batch 64, reduce_bucket_size 4e6, torch's AdamW, two CPU ranks,
DeepSpeed 0.19.8, torch 2.13; peak of the second and third step over what it was before the model was built, with
``MALLOC_MMAP_THRESHOLD_=65536`` so that freed tensors leave the resident set.
"""


@pytest.mark.parametrize(("stage", "precision", "zero", "megabytes"), MEASURED)
def test_what_real_runs_on_two_cpu_ranks_took(stage: int, precision: str, zero: dict[str, Any], megabytes: int) -> None:
    width, layers, element = 1536, 24, 2 if precision == "bf16" else 4
    model = profile(
        params=layers * width * (width + 1),
        trainable_params=layers * width * (width + 1),
        largest_layer_params=width * (width + 1),
        param_bytes=element,
        activation_bytes_per_sample=layers * width * element,
    )
    ds_config = {
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "bf16": {"enabled": precision == "bf16"},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 4_000_000, **zero},
    }
    where = hardware(device="cpu", world_size=2, ranks_per_node=2)
    result = estimate(model, ds_config, micro_batch=64, hardware=where)
    assert result.device_bytes / 1e6 == pytest.approx(megabytes, rel=0.03)


def test_accumulated_gradients_stay_during_the_forward_pass() -> None:
    where = hardware()
    once = estimate(profile(), config(1), micro_batch=30, hardware=where)
    twice = estimate(profile(), config(1, accumulation=2), micro_batch=30, hardware=where)
    assert once.moment == twice.moment == "forward"
    assert twice.device_bytes - once.device_bytes >= 2 * profile().params


def test_on_a_cpu_offload_saves_nothing() -> None:
    where = hardware(device="cpu", world_size=2, ranks_per_node=2)
    model = profile(param_bytes=4)
    kept = estimate(model, {"zero_optimization": {"stage": 2}}, micro_batch=1, hardware=where)
    moved = estimate(model, {"zero_optimization": {"stage": 2, **offload("optimizer")}}, micro_batch=1, hardware=where)
    assert moved.device_bytes > 0.8 * kept.device_bytes
    assert kept.host_bytes == 2 * kept.device_bytes


def configs_at_random(count: int) -> list[tuple[dict[str, Any], ModelProfile, Hardware]]:
    rng = random.Random(7)
    result = []
    for _ in range(count):
        stage = rng.randrange(4)
        keys = [key for key in ("optimizer", "param") if rng.random() < 0.4]
        ds_config = config(
            stage,
            accumulation=rng.choice([1, 4]),
            overlap_comm=rng.random() < 0.5,
            contiguous_gradients=rng.random() < 0.7,
            reduce_bucket_size=rng.choice([10**6, 5 * 10**8]),
            **offload(*keys),
        )
        params = rng.choice([10**7, 10**9, 7 * 10**9])
        model = profile(
            params=params,
            trainable_params=params // rng.choice([1, 3]),
            largest_layer_params=params // 20,
            activation_bytes_per_sample=rng.choice([10**6, 123_456_789, 5 * 10**9]),
        )
        where = hardware(
            world_size=rng.choice([1, 8, 64]),
            device_memory_bytes=rng.choice([16, 80]) * GIB,
            device=rng.choice(["cuda", "cuda", "cpu"]),
        )
        result.append((ds_config, model, where))
    return result


def test_the_largest_micro_batch_fits_and_one_more_does_not() -> None:
    fitting = 0
    for ds_config, model, where in configs_at_random(300):
        limit = where.device_memory_bytes
        if where.device == "cpu":
            limit = min(limit, where.host_memory_bytes // min(where.ranks_per_node, where.world_size))
        result = largest_micro_batch(model, ds_config, hardware=where)
        if result:
            fitting += 1
            assert estimate(model, ds_config, micro_batch=result, hardware=where).device_bytes <= limit
        if result == MICRO_BATCH_CAP:
            continue
        over = estimate(model, ds_config, micro_batch=result + 1, hardware=where)
        assert over.device_bytes > limit or over.host_bytes > where.host_memory_bytes
    assert 100 < fitting < 300


def test_memory_never_falls_with_micro_batch_parameters_or_activations() -> None:
    for ds_config, model, where in configs_at_random(200):

        def size(a_model: ModelProfile, micro_batch: int, ds: Any = ds_config, at: Hardware = where) -> int:
            return estimate(a_model, ds, micro_batch=micro_batch, hardware=at).device_bytes

        bigger = {**model.to_json(), "params": model.params + 10**8, "trainable_params": model.trainable_params + 10**8}
        wider = {**model.to_json(), "activation_bytes_per_sample": model.activation_bytes_per_sample * 2}
        assert size(model, 4) <= size(model, 5)
        assert size(model, 4) <= size(ModelProfile.from_json(bigger), 4)
        assert size(model, 4) <= size(ModelProfile.from_json(wider), 4)


def test_the_cap_and_the_host_bound_the_answer() -> None:
    unbounded = profile(activation_bytes_per_sample=0)
    assert largest_micro_batch(unbounded, config(2), hardware=hardware()) == MICRO_BATCH_CAP
    tight = hardware(host_memory_bytes=GIB)
    assert largest_micro_batch(profile(), config(2, **offload("optimizer")), hardware=tight) == 0
    assert largest_micro_batch(profile(), config(2), hardware=tight) > 0
    assert largest_micro_batch(profile(), config(0), hardware=hardware(device_memory_bytes=GIB)) == 0


def test_a_profile_survives_json_and_comes_from_an_event() -> None:
    event = ProfileMeasured(rank=0, time=1.0, **{**profile().to_json(), "device_name": "H", "optimizer": "AdamW"})
    result = ModelProfile.from_json(asdict(event))
    assert result.optimizer == "AdamW"
    assert ModelProfile.from_json({**result.to_json(), "newer": 1}) == result


@pytest.mark.parametrize(
    "changes", [{"trainable_params": 2_000_000_000}, {"param_bytes": 3}, {"activation_bytes_per_sample": -1}]
)
def test_an_impossible_profile_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        profile(**changes)


def test_a_second_copy_in_each_node_takes_its_share_of_the_parameters_where_these_are() -> None:
    where = hardware(world_size=16)
    plain, copied = (
        estimate(profile(), config(3, zero_hpz_partition_size=ranks), micro_batch=1, hardware=where) for ranks in (1, 8)
    )
    assert copied.parts["second_copy"] == 2 * profile().params // 8 == copied.device_bytes - plain.device_bytes
    assert copied.host_bytes == plain.host_bytes
    on_host = config(3, zero_hpz_partition_size=8, **offload("param"))
    without = config(3, **offload("param"))
    both = [estimate(profile(), item, micro_batch=1, hardware=where) for item in (on_host, without)]
    assert both[0].device_bytes == both[1].device_bytes
    assert both[0].host_bytes - both[1].host_bytes == 2 * profile().params
    below = [
        estimate(profile(), config(2, zero_hpz_partition_size=ranks), micro_batch=1, hardware=where) for ranks in (1, 8)
    ]
    assert below[0] == below[1]


def test_hosts_are_counted_and_each_holds_what_its_own_ranks_offload() -> None:
    item, two = hardware(), hardware(world_size=16)
    assert (item.nodes, two.nodes, hardware(world_size=4).nodes, two.ranks_on_node) == (1, 2, 1, 8)
    host = [
        estimate(profile(), config(3, **offload("optimizer")), micro_batch=1, hardware=where).host_bytes
        for where in (item, two)
    ]
    assert host[0] == pytest.approx(2 * host[1], rel=1e-6)


def test_nvme_leaves_buffers_on_the_host_and_the_rest_on_the_drive() -> None:
    """1 billion parameters on 8 ranks: buffers of sub-groups and of parameters (``deepspeed.runtime.swap_tensor``)."""
    zero = {
        **offload("optimizer", device="nvme"),
        "offload_param": {"device": "nvme", "buffer_size": 7_000_000, "max_in_cpu": 0},
        "sub_group_size": 25_000_000,
    }
    on_nvme = estimate(profile(), config(3, **zero), micro_batch=1, hardware=hardware())
    on_host = estimate(profile(), config(3, **offload("optimizer", "param")), micro_batch=1, hardware=hardware())
    optimizer, buffers, written, gradients = 4 * 4 * 25_000_000, 5 * 2 * 7_000_000, 2 * 25_000_000, 2 * 125_000_000
    assert on_nvme.host_bytes == 8 * (optimizer + buffers + written + gradients)
    assert on_nvme.host_bytes < on_host.host_bytes
    assert on_nvme.device_bytes == on_host.device_bytes
    swap_bytes, locked_bytes = swap_needs(profile(), config(3, **zero), hardware())
    assert swap_bytes == (16 + 2) * 1_000_000_000
    assert locked_bytes == optimizer + buffers + written
    nothing = swap_needs(profile(), config(3, **offload("optimizer", "param")), hardware())
    assert nothing == (0, 0)


def test_parameters_are_on_nvme_alone_beyond_what_stays_on_the_host() -> None:
    default = config(3, **offload("param", device="nvme"))
    large = profile(params=80_000_000_000, trainable_params=80_000_000_000)
    assert zero_settings(profile(), default, hardware()).swapped_params == 0
    assert zero_settings(large, default, hardware()).swapped_params == 9_000_000_000
    settings = swap_settings(profile(), config(3), hardware())
    assert settings == {"buffer_size": 7_000_000, "max_in_cpu": 0}
    assert swap_settings(large, config(3), hardware()) == {"buffer_size": 7_000_000}
    own = {"device": "nvme", "buffer_size": 1, "max_in_cpu": 2}
    assert swap_settings(profile(), config(3, offload_param=own), hardware()) == {}
    fast = {"device": "nvme", "fast_init": True}
    assert swap_settings(profile(), config(3, offload_optimizer=fast), hardware()) == {"max_in_cpu": 0}
