from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from optuna_dsat.cost.step_time import COEFFICIENTS, Columns, StepTimeModel, Timings
from tests.harness.small_model import HARDWARE, PROFILE

THEORY = StepTimeModel(
    params=10**9,
    trainable=10**9,
    largest_layer=10**7,
    param_bytes=2,
    flops_per_sample=6 * 10**12,
    ranks=8,
    ranks_per_node=8,
)


def columns(count: int, **changes: float) -> Columns:
    values = {
        "stage": 2, "offload": 0, "nvme": 0, "offload_param": 0, "swapped": 0, "contiguous": 1, "overlap": 0,
        "scatter": 1, "bucket": 5e7, "prefetch": 5e7, "max_live": 1e9, "max_reuse": 1e9, "persistence": 1e5,
        "sub_group": 1e9, "copy_ranks": 1, "recomputed": 0, "host_share": 1, "pinned": 1,
    }  # fmt: skip
    return Columns(**{name: np.full(count, float(value)) for name, value in {**values, **changes}.items()})


def at(count: int, size: float = 4) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.full(count, size), np.ones(count), np.full(count, 0.5)


def phases(**changes: float) -> np.ndarray:
    result: np.ndarray = THEORY.phases(PRIOR, columns(1, **changes), *at(1))[:, 0]
    return result


def timings(sizes: list[float], logs: np.ndarray) -> Timings:
    count = len(sizes)
    size, ones, fill = np.array(sizes), np.ones(count), np.full(count, 0.5)
    result = THEORY.phases(logs, columns(count), size, ones, fill)
    return Timings(
        columns=columns(count),
        micro_batch=size,
        accumulation=ones,
        fill=fill,
        phases=result,
        latency=result.sum(axis=0),
    )


NOTHING = Timings(
    columns=columns(0),
    micro_batch=np.zeros(0),
    accumulation=np.zeros(0),
    fill=np.zeros(0),
    phases=np.zeros((4, 0)),
    latency=np.zeros(0),
)
PRIOR = THEORY.fit(NOTHING).mean
"""Logarithms of the medians before anything is measured; the sixth is the link."""


def test_steps_on_another_machine_are_learnt_from_three_launches() -> None:
    other = PRIOR + np.linspace(-1, 1, len(PRIOR))
    fitted = THEORY.fit(timings([1, 8, 32], other))
    asked = (columns(1), *at(1, 20))
    assert THEORY.phases(fitted.mean, *asked).sum() == pytest.approx(THEORY.phases(other, *asked).sum(), rel=0.03)
    assert THEORY.phases(PRIOR, *asked).sum() != pytest.approx(THEORY.phases(other, *asked).sum(), rel=0.2)
    assert np.trace(fitted.covariance) < np.trace(THEORY.fit(NOTHING).covariance)


def test_coefficients_are_fitted_to_whole_steps_without_phases() -> None:
    other = PRIOR + 0.7
    known = timings([1, 8, 32], other)
    fitted = THEORY.fit(replace(known, phases=np.full((4, 3), np.nan)))
    asked = (columns(1), *at(1, 20))
    assert THEORY.phases(fitted.mean, *asked).sum() == pytest.approx(THEORY.phases(other, *asked).sum(), rel=0.05)


def test_time_in_phases_where_the_formula_has_none_does_not_make_the_predicted_steps_too_short() -> None:
    known = timings([1, 4, 16, 64], PRIOR + np.linspace(-1, 1, len(PRIOR)))
    fitted = THEORY.fit(replace(known, phases=known.phases[[2, 0, 3, 1]]), error=0.12)
    result = THEORY.phases(fitted.mean, known.columns, known.micro_batch, known.accumulation, known.fill).sum(axis=0)
    too_long = np.log(result / known.latency)
    assert abs(too_long.mean()) < 0.1
    assert np.abs(too_long).max() < 0.5


def test_what_a_setting_changes_is_the_phase_where_deepspeed_uses_it() -> None:
    plain = phases()
    assert phases(offload=1)[2] > 5 * plain[2]
    assert phases(offload=1)[:2] == pytest.approx(plain[:2])
    assert phases(overlap=1)[1] < plain[1]
    assert phases(bucket=1e6)[1] > plain[1]
    assert phases(stage=3)[0] > plain[0]
    assert phases(stage=3, overlap=1, prefetch=5e8)[0] < phases(stage=3, overlap=1, prefetch=0)[0]
    assert phases(stage=3, offload_param=1)[0] > phases(stage=3)[0]


def test_nvme_costs_what_is_read_and_written_by_all_ranks_of_a_node() -> None:
    on_host, on_nvme = phases(stage=3, offload=1), phases(stage=3, offload=1, nvme=1)
    moved = 2 * 16 * THEORY.params  # states and gradients, read and written
    per_byte = math.exp(PRIOR[COEFFICIENTS.index("nvme")])
    assert on_nvme[2] - on_host[2] == pytest.approx(moved * per_byte)
    assert on_nvme[[0, 1, 3]] == pytest.approx(on_host[[0, 1, 3]])
    in_host, swapped = phases(stage=3, offload_param=1), phases(stage=3, offload_param=1, swapped=1)
    assert swapped[0] - in_host[0] > 0.9 * 2 * THEORY.params * per_byte
    assert swapped[1] > in_host[1]
    assert swapped[2] - in_host[2] == pytest.approx(2 * THEORY.params * per_byte)


def test_a_measured_speed_of_nvme_is_its_prior() -> None:
    measured = StepTimeModel.of(PROFILE, replace(HARDWARE, nvme_bytes_per_s=4e9), machine={}).prior_coefficients()
    unknown = StepTimeModel.of(PROFILE, HARDWARE, machine={}).prior_coefficients()
    place = COEFFICIENTS.index("nvme")
    assert math.exp(measured.mean[place]) == pytest.approx(1 / 4e9)
    assert measured.covariance[place, place] < unknown.covariance[place, place]
    assert np.delete(measured.mean, place) == pytest.approx(np.delete(unknown.mean, place))


def test_one_bucket_for_all_gradients_hides_nothing() -> None:
    assert phases(overlap=1, bucket=1e9)[1] == pytest.approx(phases(overlap=0, bucket=1e9)[1])


def test_one_rank_sends_nothing() -> None:
    alone = replace(THEORY, ranks=1, ranks_per_node=1)
    slow_link = PRIOR.copy()
    slow_link[5] += 5
    before, after = (alone.phases(logs, columns(1), *at(1)) for logs in (PRIOR, slow_link))
    assert after == pytest.approx(before)


TWO_NODES = replace(THEORY, ranks=16, ranks_per_node=8)


def on_nodes(logs: np.ndarray, *, model: StepTimeModel = TWO_NODES, steps: int = 1, **changes: float) -> np.ndarray:
    size, _, fill = at(1)
    result: np.ndarray = model.phases(logs, columns(1, **changes), size, np.full(1, float(steps)), fill)[:, 0]
    return result


def with_coefficient(**medians: float) -> np.ndarray:
    logs = PRIOR.copy()
    for name, median in medians.items():
        logs[COEFFICIENTS.index(name)] = np.log(median)
    return logs


def test_on_several_nodes_the_slower_of_links_and_network_counts_and_on_one_the_links_alone() -> None:
    fast, slow = with_coefficient(link=1e-11, network=1e-10), with_coefficient(link=1e-11, network=1e-9)
    assert on_nodes(slow)[1] > 2 * on_nodes(fast)[1]
    assert on_nodes(slow, model=THEORY) == pytest.approx(on_nodes(fast, model=THEORY))
    links = with_coefficient(link=1e-8, network=1e-10)
    assert on_nodes(links)[1] == pytest.approx(on_nodes(with_coefficient(link=1e-8, network=1e-9))[1])
    single = replace(TWO_NODES, ranks=2, ranks_per_node=1)
    assert on_nodes(links, model=single) == pytest.approx(on_nodes(with_coefficient(network=1e-10), model=single))


def test_a_second_copy_in_the_node_keeps_all_gathers_but_the_first_off_the_network() -> None:
    logs = with_coefficient(link=1e-11, network=1e-9, latency=1e-9)
    stage3: dict[str, Any] = {"stage": 3, "max_reuse": 0, "persistence": 0}
    plain, copied = (on_nodes(logs, **stage3, copy_ranks=ranks) for ranks in (1, 8))
    assert copied[0] == pytest.approx(plain[0])
    gather_s = 2 * 10**9 * 15 / 16 * 1e-9
    assert plain[1] - copied[1] == pytest.approx(gather_s, rel=0.02)
    four, copied_four = (on_nodes(logs, **stage3, steps=4, copy_ranks=ranks) for ranks in (1, 8))
    assert four[0] - copied_four[0] == pytest.approx(3 * gather_s, rel=0.02)
    wide = on_nodes(logs, **stage3, copy_ranks=16)
    assert wide[1] == pytest.approx(plain[1], rel=1e-3)  # a copy that is spread over nodes saves nothing


def test_the_network_is_learnt_from_launches_on_several_nodes() -> None:
    truth = with_coefficient(network=4e-10)
    size, ones, fill = np.array([1.0, 8, 32]), np.ones(3), np.full(3, 0.5)
    result = TWO_NODES.phases(truth, columns(3), size, ones, fill)
    steps = Timings(
        columns=columns(3), micro_batch=size, accumulation=ones, fill=fill, phases=result, latency=result.sum(axis=0)
    )
    fitted = TWO_NODES.fit(steps)
    network = COEFFICIENTS.index("network")
    assert fitted.mean[network] == pytest.approx(np.log(4e-10), abs=0.5)
    assert fitted.covariance[network, network] < 0.5 * TWO_NODES.prior_coefficients().covariance[network, network]
    alone = THEORY.fit(timings([1, 8, 32], truth))
    assert alone.mean[network] == pytest.approx(PRIOR[network])
