"""How probable it is that a configuration runs, where the posterior of memory is sure of the wrong thing."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from optuna_dsat.guided.candidates import Observations
from optuna_dsat.guided.planner import GuidedPlanner
from optuna_dsat.guided.problem import Problem
from optuna_dsat.guided.run_probability import RunProbability
from tests.harness.small_model import CONFIG, GIB, HARDWARE, KEPT, PROFILE, small_space

Launches = Sequence[tuple[int, int, bool]]
"""Row, micro-batch, and whether it fitted, of each."""


@pytest.fixture(scope="module")
def problem() -> Problem:
    space = small_space(no_tune=KEPT[1:])
    return GuidedPlanner(Problem(profile=PROFILE, hardware=HARDWARE, config=CONFIG, space=space)).problem


def observed(launches: Launches) -> Observations:
    rows, sizes, fits = (np.array(column) for column in zip(*launches, strict=True))
    count, no = len(launches), np.zeros(len(launches), dtype=bool)
    unknown = np.full(count, np.nan)
    return Observations(
        number=np.arange(count),
        row=rows,
        micro_batch=sizes.astype(np.float64),
        accumulation=np.ones(count),
        value=unknown,
        peak=unknown,
        phases=np.full((4, count), np.nan),
        overhead=unknown,
        device_out_of_memory=~fits.astype(bool),
        host_out_of_memory=no,
        broken=no,
        fits=fits.astype(bool),
        pending=no,
        launch=np.arange(count),
        used={},
    )


def chances(problem: Problem, launches: Launches, asked: Sequence[tuple[int, int]]) -> list[float]:
    """Return the probabilities to fit of rows at micro-batches, by a posterior that is sure that all fit."""

    def predict(inputs: Any) -> tuple[Any, Any, Any]:
        count = len(inputs.lineage)
        return np.full(count, 1.0), np.full(count, 10.0 * GIB), np.full(count, 1.0 * GIB)

    result = RunProbability(problem, observed(launches), SimpleNamespace(predict=predict))  # type: ignore[arg-type]
    rows, sizes = (np.array(column) for column in zip(*asked, strict=True))
    return [float(fit) for fit in result.fits(rows, sizes)[1]]


def rows_of_a_structure(problem: Problem) -> list[int]:
    """Return lineages of one structure, those with the smallest buffers first."""
    table = problem.table
    rows = np.flatnonzero(table.structure == np.bincount(table.structure).argmax())
    return [int(row) for row in rows[np.argsort(table.buffers[rows].sum(axis=1), kind="stable")]]


def test_an_edge_that_is_far_from_where_it_was_thought_is_bisected(problem: Problem) -> None:
    """Ten launches in a row ran out of memory, each a sample or two smaller than the one before."""
    lean, *_, large, larger, largest, other = rows_of_a_structure(problem)
    failed = [(largest, 40, False), (larger, 37, False), (large, 34, False), (other, 32, False)]
    launches = [(lean, 1, True), *failed]
    near, below = chances(problem, launches, [(lean, 29), (lean, 5)])
    assert near <= 0.4
    assert below == pytest.approx(1.0, abs=1e-3)
    localised = [(lean, 28, True), *failed]
    assert chances(problem, localised, [(lean, 29)])[0] > 0.6


def test_more_samples_than_leaner_buffers_save_do_not_fit_either(problem: Problem) -> None:
    rows = rows_of_a_structure(problem)
    lean, fat = rows[0], rows[-1]
    saved = float(problem.table.buffers[fat].sum() - problem.table.buffers[lean].sum())
    samples = int(np.ceil(2 * saved / PROFILE.activation_bytes_per_sample))
    assert samples > 1
    launches = [(lean, 20, True), (fat, 20, False)]
    few, many = chances(problem, launches, [(lean, 20 + samples // 4), (lean, 20 + samples)])
    assert few > 0.9
    assert many <= 0.2
