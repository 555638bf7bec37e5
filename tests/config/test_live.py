"""Which configs a running engine can take on."""

from __future__ import annotations

from typing import Any

import pytest

from optuna_dsat.config.differences import live_changes


def config(micro_batch: int = 2, **zero: Any) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": micro_batch, "zero_optimization": {"stage": 2, **zero}}


def test_a_micro_batch_and_live_knobs_change_in_a_running_engine() -> None:
    changes = live_changes(config(), {**config(8, reduce_bucket_size=5_000_000), "train_batch_size": 16})
    assert changes == {"train_micro_batch_size_per_gpu": 8, "zero_optimization.reduce_bucket_size": 5_000_000}


def test_a_missing_key_is_deepspeeds_default() -> None:
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
