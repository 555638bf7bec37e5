from __future__ import annotations

from typing import Any

import pytest

from optuna_dsat.config.differences import knob_differences
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


def test_accumulation_is_named_where_it_is_another() -> None:
    config = {"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 4}
    assert knob_differences(config, {"gradient_accumulation_steps": 4}) == {}
    assert knob_differences(config, {}) == {"gradient_accumulation_steps": 4}


def test_two_configurations_of_one_structure_are_told_apart() -> None:
    first = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 50000000}, "train_micro_batch_size_per_gpu": 32}
    other = {"zero_optimization": {"stage": 2, "overlap_comm": True}, "train_micro_batch_size_per_gpu": 32}
    assert config_in_words(first) == config_in_words(other) == "ZeRO 2, micro-batch 32"
    assert config_in_words(first, own={}) == "ZeRO 2, micro-batch 32; reduce_bucket_size=5e7"
    assert config_in_words(other, own={}) == "ZeRO 2, micro-batch 32; overlap_comm=true"
