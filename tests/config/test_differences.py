"""What two configs differ in, and whether a running engine can take on another."""

from __future__ import annotations

from typing import Any

import pytest

from optuna_dsat.config.differences import knob_differences, live_changes
from optuna_dsat.words import config_in_words

OWN = {"zero_optimization": {"stage": 2, "overlap_comm": True, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}


@pytest.mark.parametrize(
    ("own", "zero", "expected"),
    [
        ({}, {"stage": 2}, {}),
        ({}, {"stage": 2, "overlap_comm": False, "reduce_bucket_size": 5e8}, {}),  # DeepSpeed's defaults
        ({}, {"stage": 2, "overlap_comm": True}, {"overlap_comm": True}),
        ({}, {"stage": 0, "overlap_comm": True, "reduce_bucket_size": 5}, {}),  # read at no stage 0
        ({}, {"stage": 1, "stage3_prefetch_bucket_size": 7}, {}),
        (OWN, {"stage": 2, "overlap_comm": True}, {}),  # an offload is part of the structure
        (OWN, {"stage": 2}, {"overlap_comm": False}),
        (OWN, {"stage": 3, "overlap_comm": True, "reduce_bucket_size": 5e7}, {"reduce_bucket_size": 5e7}),
        (OWN, {**OWN["zero_optimization"], "offload_optimizer": {"device": "cpu", "ratio": 0.7}},
         {"offload_optimizer.ratio": 0.7}),
        ({}, {"stage": 1, "reduce_bucket_size": 2_000_000, "allgather_bucket_size": 900_000},
         {"allgather_bucket_size": 900_000}),  # beyond the parameters all are alike
    ],
)  # fmt: skip
def test_what_deepspeed_treats_otherwise_is_named(
    own: dict[str, Any], zero: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert knob_differences({"zero_optimization": zero}, own, params_count=10**6) == expected


def test_two_configurations_of_one_structure_are_told_apart_and_accumulation_is_named_where_it_is_another() -> None:
    config = {"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 4}
    assert knob_differences(config, {"gradient_accumulation_steps": 4}) == {}
    assert knob_differences(config, {}) == {"gradient_accumulation_steps": 4}
    first = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 50000000}, "train_micro_batch_size_per_gpu": 32}
    other = {"zero_optimization": {"stage": 2, "overlap_comm": True}, "train_micro_batch_size_per_gpu": 32}
    assert config_in_words(first) == config_in_words(other) == "ZeRO 2, micro-batch 32"
    assert config_in_words(first, user={}) == "ZeRO 2, micro-batch 32; reduce_bucket_size=5e7"
    assert config_in_words(other, user={}) == "ZeRO 2, micro-batch 32; overlap_comm=true"


def config(micro_batch: int = 2, **zero: Any) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": micro_batch, "zero_optimization": {"stage": 2, **zero}}


def test_a_micro_batch_and_live_knobs_change_in_a_running_engine_and_a_missing_key_is_deepspeeds_default() -> None:
    changes = live_changes(config(), {**config(8, reduce_bucket_size=5_000_000), "train_batch_size": 16})
    assert changes == {"train_micro_batch_size_per_gpu": 8, "zero_optimization.reduce_bucket_size": 5_000_000}
    assert live_changes(config(contiguous_gradients=True), config()) == {}
    assert live_changes(config(reduce_scatter=False), config()) == {"zero_optimization.reduce_scatter": True}
    assert live_changes(config(stage=3), config(stage=3, overlap_comm=True)) == {}


@pytest.mark.parametrize(
    ("running", "wanted"),
    [
        (config(), config(stage=1)),
        (config(), config(offload_optimizer={"device": "cpu"})),
        (config(), {**config(), "bf16": {"enabled": True}}),
        (config(stage=3), config(stage=3, overlap_comm=False)),
        (config(stage=3), config(stage=3, sub_group_size=1_000)),
        (config(stage=1), config(stage=1, contiguous_gradients=False)),
        (config(stage=1, contiguous_gradients=False), config(stage=1, contiguous_gradients=False, overlap_comm=True)),
        (
            config(stage=3, offload_param={"device": "cpu"}),
            config(stage=3, offload_param={"device": "cpu"}, stage3_param_persistence_threshold=10),
        ),
        (config(stage=0), config(stage=0, reduce_bucket_size=10)),
        (config(), {"zero_optimization": {"stage": 2}}),
    ],
)
def test_what_an_engine_reads_once_needs_another_engine(running: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert live_changes(running, wanted) is None
