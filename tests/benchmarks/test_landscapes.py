from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from benchmarks.named_landscapes import LANDSCAPES, Trained, throughput
from benchmarks.optimum import Reach, reaches, search_space
from optuna_dsat.config import ds_config
from optuna_dsat.cost import memory
from optuna_dsat.outcome import Outcome

COARSE = {
    "stage3_max_live_parameters": 10**9,
    "stage3_max_reuse_distance": 10**8,
    "stage3_param_persistence_threshold": 10**5,
    "sub_group_size": 10**9,
}
"""Knobs held here for the sake of speed: they matter little to what the names claim."""


@cache
def reached(name: str) -> tuple[Reach, ...]:
    landscape = LANDSCAPES[name]
    return tuple(reaches(landscape, search_space(landscape, fix=COARSE)))


def best_of(found: list[Reach] | tuple[Reach, ...]) -> Reach:
    return max(found, key=lambda reach: reach.throughput)


def config_of(landscape: Trained, reach: Reach, micro_batch: int) -> dict[str, Any]:
    space = search_space(landscape, fix=COARSE)
    base = ds_config.effective(landscape.user_config)
    return ds_config.merge(base, space.overlay({**reach.params, "train_micro_batch_size_per_gpu": micro_batch}))


def stage(reach: Reach) -> int:
    return int(reach.params["zero_stage"])


def offloads(reach: Reach) -> bool:
    return bool(reach.params.get("offload_optimizer") == "cpu")


@pytest.mark.parametrize("name", LANDSCAPES)
def test_the_best_is_what_a_launch_shows_and_far_from_the_users_config(name: str) -> None:
    landscape, best = LANDSCAPES[name], best_of(reached(name))
    assert throughput(landscape, config_of(landscape, best, best.micro_batch)) == pytest.approx(best.throughput)
    assert 0 < throughput(landscape, landscape.user_config) < 0.8 * best.throughput
    results = [landscape.run(config_of(landscape, best, size), landscape.slots) for size in range(1, best.largest + 1)]
    assert all(a.peak_bytes <= b.peak_bytes for a, b in pairwise(results))
    assert all(a.latency_s < b.latency_s for a, b in pairwise(results))


@pytest.mark.parametrize("name", LANDSCAPES)
def test_what_fits_has_one_edge_and_enumeration_finds_it(name: str) -> None:
    landscape = LANDSCAPES[name]
    for reach in reached(name)[:: max(1, len(reached(name)) // 4)]:
        ran = [
            landscape.run(config_of(landscape, reach, size), landscape.slots).outcome is Outcome.MEASURED
            for size in range(1, reach.largest + 4)
        ]
        assert ran == [size <= reach.largest for size in range(1, reach.largest + 4)]


def test_no_memory_model_is_an_oracle_here() -> None:
    """The tuner's own is near, and wrong more often than not."""
    wrong, far = 0, 0
    for landscape in LANDSCAPES.values():
        profile = memory.ModelProfile.from_json(vars(landscape.profile(landscape.slots)))
        hardware = memory.Hardware(
            world_size=landscape.slots,
            ranks_per_node=landscape.hardware.gpus_per_node,
            device_memory_bytes=landscape.hardware.device_bytes,
            host_memory_bytes=landscape.hardware.host_bytes,
        )
        best = best_of(reached(landscape.name))
        predicted = memory.largest_micro_batch(profile, config_of(landscape, best, 1), hardware=hardware)
        wrong += predicted != best.largest
        far += abs(predicted - best.largest) > 0.35 * best.largest
    assert wrong >= len(LANDSCAPES) / 2
    assert far == 0


def test_on_tiny_many_gpus_everything_fits_hundreds_of_times() -> None:
    result = reached("tiny-many-gpus")
    assert LANDSCAPES["tiny-many-gpus"].slots == 64
    assert all(reach.largest > 300 for reach in result)


def test_fast_links_make_knobs_matter_little_and_slow_links_much() -> None:
    for name, least, most in (("fast-links", 0.95, 1.0), ("slow-links", 0.0, 0.8)):
        result = [reach for reach in reached(name) if not offloads(reach)]
        rates = sorted(reach.throughput for reach in result)
        assert least <= rates[len(rates) // 2] / rates[-1] <= most, name


def test_only_zero_3_fits() -> None:
    result = reached("only-zero-3")
    assert {stage(reach) for reach in result if reach.largest} == {3}
    assert any(offloads(reach) for reach in result if stage(reach) < 3)


def test_only_what_is_offloaded_fits() -> None:
    result = reached("only-offload")
    running = [reach for reach in result if reach.largest]
    assert running
    assert all(offloads(reach) for reach in running)
    assert {stage(reach) for reach in running} >= {2, 3}


def test_zero_3_wins_through_a_larger_micro_batch() -> None:
    result = reached("zero-3-larger-batch")
    third = best_of([reach for reach in result if stage(reach) == 3])
    second = best_of([reach for reach in result if stage(reach) < 3])
    assert second.largest > 0
    assert third.micro_batch > second.largest
    assert third.throughput > 1.05 * second.throughput
    landscape = LANDSCAPES["zero-3-larger-batch"]
    assert throughput(landscape, config_of(landscape, third, second.micro_batch)) < 1.02 * second.throughput


def test_the_peak_lies_well_inside() -> None:
    landscape, best = LANDSCAPES["peak-inside"], best_of(reached("peak-inside"))
    assert best.micro_batch < 0.75 * best.largest
    assert throughput(landscape, config_of(landscape, best, best.largest)) < 0.9 * best.throughput
