from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from optuna_dsat.cost.step_time import Columns, StepTimeModel, Timings

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
        "stage": 2, "offload": 0, "nvme": 0, "offload_param": 0, "contiguous": 1, "overlap": 0, "scatter": 1,
        "bucket": 5e7, "prefetch": 5e7, "max_live": 1e9, "max_reuse": 1e9, "persistence": 1e5, "sub_group": 1e9,
    }  # fmt: skip
    return Columns(**{name: np.full(count, float(value)) for name, value in {**values, **changes}.items()})


def at(count: int, size: float = 4) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.full(count, size), np.ones(count), np.full(count, 0.5)


def phases(**changes: float) -> np.ndarray:
    found: np.ndarray = THEORY.phases(PRIOR, columns(1, **changes), *at(1))[:, 0]
    return found


def timings(sizes: list[float], logs: np.ndarray) -> Timings:
    count = len(sizes)
    size, ones, fill = np.array(sizes), np.ones(count), np.full(count, 0.5)
    found = THEORY.phases(logs, columns(count), size, ones, fill)
    return Timings(
        columns=columns(count), micro_batch=size, accumulation=ones, fill=fill, phases=found, latency=found.sum(axis=0)
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


def test_what_a_setting_changes_is_the_phase_where_deepspeed_uses_it() -> None:
    plain = phases()
    assert phases(offload=1)[2] > 5 * plain[2]
    assert phases(offload=1)[:2] == pytest.approx(plain[:2])
    assert phases(overlap=1)[1] < plain[1]
    assert phases(bucket=1e6)[1] > plain[1]
    assert phases(stage=3)[0] > plain[0]
    assert phases(stage=3, overlap=1, prefetch=5e8)[0] < phases(stage=3, overlap=1, prefetch=0)[0]
    assert phases(stage=3, offload_param=1)[0] > phases(stage=3)[0]


def test_one_bucket_for_all_gradients_hides_nothing() -> None:
    assert phases(overlap=1, bucket=1e9)[1] == pytest.approx(phases(overlap=0, bucket=1e9)[1])


def test_one_rank_sends_nothing() -> None:
    alone = replace(THEORY, ranks=1, ranks_per_node=1)
    slow_link = PRIOR.copy()
    slow_link[5] += 5
    before, after = (alone.phases(logs, columns(1), *at(1)) for logs in (PRIOR, slow_link))
    assert after == pytest.approx(before)
