"""How many GPUs are worth it, by prediction."""

from __future__ import annotations

from dataclasses import replace

import pytest

from optuna_dsat.cli.plan import _scaling
from optuna_dsat.cost.gpus import find_gpu
from optuna_dsat.plan.from_shape import Machine, plan_shape
from optuna_dsat.plan.prediction import Subject
from optuna_dsat.plan.rows import Plan, counts_up_to, plan_rows, scaling
from optuna_dsat.plan.transformer import shape_of


def subject(
    params: float, gpu: str, *, gpus: int, nodes: int = 1, network: float = 100.0, host_bytes: int | None = None
) -> Subject:
    machine = Machine(
        gpu=find_gpu(gpu),
        gpus_per_node=gpus,
        nodes=nodes,
        given_network_gbit_per_s=network,
        given_host_bytes=host_bytes,
    )
    shape = shape_of(params=round(params), hidden=None, layers=None, heads=None)
    return plan_shape(shape, machine, config=None, memory_margin=0.05).subject


@pytest.mark.parametrize(
    ("devices", "counts"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8)), (16, (1, 2, 4, 8, 16))]
)
def test_powers_of_two_up_to_what_there_is(devices: int, counts: tuple[int, ...]) -> None:
    assert counts_up_to(devices) == counts


def test_a_small_model_scales_almost_linearly_over_nvlink() -> None:
    result = scaling(subject(350e6, "a100-80g", gpus=8), (1, 2, 4, 8))
    assert [item.devices for item in result] == [1, 2, 4, 8]
    assert result[0].share_of_linear == 1
    assert all(item.share_of_linear and 0.8 < item.share_of_linear <= 1.2 for item in result)
    rates = [item.samples_per_s or 0 for item in result]
    assert rates == sorted(rates)
    assert result[3].samples_per_s_each == pytest.approx(rates[3] / 8)


def test_the_last_is_the_plan_itself() -> None:
    machine = subject(1.3e9, "a100-40g", gpus=4)
    plan = plan_shape(
        shape_of(params=round(1.3e9), hidden=None, layers=None, heads=None),
        Machine(
            gpu=find_gpu("a100-40g"), gpus_per_node=4, nodes=1, given_network_gbit_per_s=None, given_host_bytes=None
        ),
        config=None,
        memory_margin=0.05,
    )
    (last,) = scaling(machine, (4,))
    assert plan.recommended is not None
    assert last.samples_per_s == pytest.approx(plan.recommended.samples_per_s)


def test_where_one_gpu_is_too_small_scaling_begins_at_the_first_that_is_not() -> None:
    alone, all_eight = scaling(subject(7e9, "a100-40g", gpus=8, host_bytes=64 * 2**30), (1, 8))
    assert (alone.row, alone.samples_per_s, alone.share_of_linear) == (None, None, None)
    assert alone.to_json()["samples_per_s_per_device"] is None
    assert all_eight.row is not None
    assert all_eight.share_of_linear == 1


def test_a_slow_network_shows_where_the_second_host_begins() -> None:
    inside, across = scaling(subject(1.3e9, "a100-80g", gpus=8, nodes=2, network=10.0), (8, 16))
    assert inside.share_of_linear == 1
    assert across.share_of_linear is not None
    assert across.share_of_linear < 0.9


def test_scaling_is_relative_to_the_smallest_number_without_offload() -> None:
    """Eight GPUs scaled by 784% relative to one that offloads."""
    result = scaling(subject(7e9, "a100-40g", gpus=8), (1, 2, 4, 8))
    rows = [item.row for item in result if item.row is not None]
    assert rows[0].structure.offloads
    first = next(item for item in result if item.row is not None and not item.row.structure.offloads)
    assert first.share_of_linear == 1
    assert result[0].share_of_linear is not None
    assert result[0].share_of_linear < 1


def test_no_number_is_smaller_than_that_of_the_stages_of_a_pipeline() -> None:
    pipeline = replace(subject(350e6, "a100-80g", gpus=8), pipeline=True, ranks_per_sample=2)
    assert [item.devices for item in _scaling(Plan(subject=pipeline, rows=plan_rows(pipeline)))] == [2, 4, 8]
    alone = replace(pipeline, ranks_per_sample=8)
    assert _scaling(Plan(subject=alone, rows=plan_rows(alone))) == ()
