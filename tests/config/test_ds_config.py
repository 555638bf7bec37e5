"""Completing, merging, keying and writing DeepSpeed configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from optuna_dsat.config import ds_config
from optuna_dsat.errors import ConfigError


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (True, {"stage": 1, "allgather_bucket_size": 500_000_000}),
        ({"stage": 2, "cpu_offload": True}, {"stage": 2, "offload_optimizer": {"device": "cpu"}}),
        ({"stage": 2, "cpu_offload": False}, {"stage": 2}),
        (
            {"stage": 3, "cpu_offload_param": True, "cpu_offload_use_pin_memory": True},
            {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}},
        ),
        ({"stage": 3, "prefetch_bucket_size": 7}, {"stage": 3, "stage3_prefetch_bucket_size": 7}),
    ],
)
def test_old_spellings_become_todays(section: Any, expected: dict[str, Any]) -> None:
    assert ds_config.zero_section({"zero_optimization": section}) == expected


def test_merge_overlays_objects_replaces_values_and_removes_by_none() -> None:
    base = {"a": 1, "b": {"x": [1], "y": 2}, "auto": "auto", "zero_optimization": True}
    merged = ds_config.merge(base, {"a": None, "b": {"y": None, "z": {"k": None}}, "zero_optimization": {"stage": 2}})
    assert merged == {"b": {"x": [1], "z": {}}, "auto": "auto", "zero_optimization": {"stage": 2}}
    merged["b"]["x"].append(2)
    assert base["b"] == {"x": [1], "y": 2}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"train_batch_size": 32}, (32, 8, 1)),
        ({"train_micro_batch_size_per_gpu": 2}, (8, 2, 1)),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, (24, 2, 3)),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2}, (32, 2, 4)),
        ({"train_batch_size": 32, "gradient_accumulation_steps": 2}, (32, 4, 2)),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}, (32, 4, 2)),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": [4, 8]}, (16, 4, 1)),
        ({"gradient_accumulation_steps": "auto"}, (4, 1, 1)),
        ({"train_batch_size": 3.2e1}, (32, 8, 1)),
    ],
)
def test_the_batch_triangle_is_completed(config: dict[str, Any], expected: tuple[int, int, int]) -> None:
    triangle = ds_config.batch_triangle(config, world_size=4)
    result = (triangle.train_batch_size, triangle.micro_batch, triangle.gradient_accumulation_steps)
    assert result == expected


@pytest.mark.parametrize(
    ("train", "accumulation", "ranks"),
    [(64, 2, 4), (32, 2, 2), (16, 2, 1), (8, None, 1), (48, 2, 4)],
    ids=["all", "two stages", "four stages", "a global batch of one rank", "a contradiction"],
)
def test_the_stages_of_a_pipeline_share_a_batch(train: int, accumulation: int | None, ranks: int) -> None:
    sizes = {
        "train_batch_size": train,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": accumulation,
    }
    assert ds_config.data_parallel_ranks(sizes, 4) == ranks


@pytest.mark.parametrize(
    ("config", "numbers"),
    [
        ({"train_batch_size": 30}, ["is 30", "multiple of 4 ranks = 4", "28 or 32"]),
        ({"train_batch_size": 2}, ["is 2", "set it to 4"]),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 5}, ["is 32", "20 or 40"]),
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 16}, ["is 8", "set it to 64"]),
        (
            {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1},
            ["is 32", "= 16", "set train_batch_size to 16"],
        ),
        ({"train_batch_size": 32, "gradient_accumulation_steps": 16}, ["is 32", "= 64", "set it to 64"]),
    ],
)
def test_a_triangle_that_cannot_hold_says_what_to_change(config: dict[str, Any], numbers: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        ds_config.batch_triangle(config, world_size=4)
    assert all(number in str(caught.value) for number in numbers), str(caught.value)


BASE = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}


def with_zero(**zero: Any) -> dict[str, Any]:
    return ds_config.merge(BASE, {"zero_optimization": zero})


@pytest.mark.parametrize(
    ("config", "is_same"),
    [
        ({"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 4}, True),
        ({**BASE, "gradient_accumulation_steps": 1}, True),
        ({**BASE, "autotuning": {"enabled": True}}, True),
        ({**BASE, "bf16": {"enabled": False}, "fp16": {"enabled": False, "loss_scale": 0}, "scheduler": {}}, True),
        (with_zero(reduce_bucket_size=5e8, contiguous_gradients=True, overlap_comm=False), True),
        (with_zero(reduce_bucket_size=2_000_000), True),
        (with_zero(offload_optimizer={"device": "none"}), True),
        (with_zero(offload_param={"device": "cpu"}, stage3_max_live_parameters=3), True),
        ({**BASE, "train_micro_batch_size_per_gpu": 5}, False),
        ({**BASE, "gradient_accumulation_steps": 2}, False),
        ({**BASE, "bf16": {"enabled": True}}, False),
        (with_zero(reduce_bucket_size=999_999), False),
        (with_zero(overlap_comm=True), False),
        (with_zero(offload_optimizer={"device": "cpu"}), False),
        (with_zero(stage=3), False),
        (with_zero(stage=0), False),
    ],
)
def test_configs_that_behave_alike_and_no_others_share_a_key(config: dict[str, Any], is_same: bool) -> None:
    keys = [ds_config.canonical_key(item, params_count=1_000_000) for item in (config, BASE)]
    assert (keys[0] == keys[1]) is is_same


def test_the_key_knows_that_overlap_is_the_default_of_stage_3() -> None:
    explicit = with_zero(stage=3, overlap_comm=True)
    assert ds_config.canonical_key(explicit) == ds_config.canonical_key(with_zero(stage=3))


def test_our_defaults_are_deepspeeds() -> None:
    model = pytest.importorskip("deepspeed.runtime.zero.config").DeepSpeedZeroConfig
    for stage in (1, 2, 3):
        theirs = model(stage=stage).model_dump(by_alias=True)
        for key in ("overlap_comm", *(key for key in ds_config._ZERO_DEFAULTS if key != "stage")):
            assert ds_config.zero_default(key, stage=stage) == theirs[key], key


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "best.json"
    ds_config.write_json_atomic(target, {"a": 1})
    with pytest.raises(TypeError):
        ds_config.write_json_atomic(target, {"a": object()})
    assert json.loads(target.read_text()) == {"a": 1}
    with pytest.raises(FileNotFoundError):
        ds_config.write_json_atomic(tmp_path / "none" / "x.json", {})
    assert [path.name for path in tmp_path.iterdir()] == ["best.json"]
    assert target.stat().st_mode & 0o777 == 0o644, "the usual mode"


def test_values_are_set_and_removed_at_dotted_keys() -> None:
    config = {"a": {"b": 1, "c": 2}, "d": 3}
    assert ds_config.with_values(config, {"a.b": None, "a.x.y": 5, "d": 4}) == {"a": {"c": 2, "x": {"y": 5}}, "d": 4}
    optimizer = {"optimizer": {"type": "Adam", "params": {"lr": 1}}, "d": 3}
    gone = {"optimizer.type": None, "optimizer.params.lr": None, "e.f": None}
    assert ds_config.with_values(optimizer, gone) == {"d": 3}
    assert config == {"a": {"b": 1, "c": 2}, "d": 3}
