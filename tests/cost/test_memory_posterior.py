from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

from optuna_dsat.cost.memory_posterior import MemoryInputs, MemoryPosterior, knob_similarity, normal_cdf, sum_by_knob

GIB = 2.0**30
Numbers: TypeAlias = npt.NDArray[Any]


def loads(
    sizes: list[int],
    *,
    lineage: int = 0,
    structure: int = 0,
    relatives: tuple[int, int, int] | None = None,
    knobs: tuple[int, ...] = (0, 0),
    buffers: float = 0.0,
    others: float = 12 * GIB,
    activations: float = 1.0,
) -> MemoryInputs:
    count = len(sizes)
    return MemoryInputs(
        lineage=np.full(count, lineage),
        structure=np.full(count, structure),
        relatives=np.array([relatives or (structure,) * 3] * count),
        knobs=np.array([knobs] * count),
        micro_batch=np.array(sizes, dtype=np.float64),
        activations=np.full(count, activations),
        forward=np.full(count, 10 * GIB),
        others=np.full(count, others),
        buffers=np.full((count, len(knobs)), buffers),
        non_contiguous=np.zeros(count),
    )


def posterior() -> MemoryPosterior:
    return MemoryPosterior(device_bytes=int(40 * GIB), bytes_per_sample=int(GIB), on_cpu=False)


def peaks(sizes: list[int]) -> Numbers:
    """A machine whose activations take 10% more, and half a GiB whatever the micro-batch."""
    return 10.5 * GIB + 1.1 * GIB * np.array(sizes)


NONE = np.zeros(1, dtype=bool)


def test_without_a_launch_the_formulas_hold_and_little_is_certain() -> None:
    result, left, spread = posterior().predict(loads([1, 8]))
    assert result == pytest.approx([12 * GIB, 18 * GIB])
    assert left[1] + result[1] == pytest.approx(posterior().usable)
    assert (spread > GIB).all()


def test_one_peak_tells_its_lineage_and_less_of_others() -> None:
    known = posterior()
    known.observe(loads([10]), peaks([10]), NONE)
    own, _, own_spread = known.predict(loads([12]))
    other, _, other_spread = known.predict(loads([12], lineage=1, structure=1, knobs=(1, 1)))
    assert own == pytest.approx(peaks([12]), rel=0.02)
    assert 22 * GIB < other[0] < own[0]
    assert own_spread < other_spread


def test_a_peak_far_from_its_formula_makes_those_of_relatives_doubtful_too() -> None:
    """The formulas say 12 GiB more than is used: with ZeRO 3, whatever is offloaded."""
    near, far = posterior(), posterior()
    relative = loads([1], lineage=1, structure=1, relatives=(0, 1, 0))
    near.observe(loads([1]), peaks([1]) + 0.2 * GIB, NONE)
    far.observe(loads([1]), peaks([1]) - 12 * GIB, NONE)
    (as_said,), _, (sure,) = near.predict(relative)
    (corrected,), _, (doubtful,) = far.predict(relative)
    assert near.error_factor == 1
    assert far.error_factor > 10
    assert as_said - corrected > 5 * GIB
    assert doubtful > 2 * sure


def test_the_limit_is_no_less_than_a_peak_that_ran_whatever_ran_out_of_memory() -> None:
    known = posterior()
    sizes = [20, 21, 21, 21, 21]
    many = loads(sizes)
    failed = np.array([False, True, True, True, True])
    known.observe(many, np.where(failed, np.nan, 36 * GIB), failed)
    assert known.limit >= 36 * GIB
    _, free, _ = known.predict(loads([19]))
    assert free[0] > 0


def test_what_the_formulas_do_not_explain_is_no_surprise_of_the_limit() -> None:
    """Twice the formulas' memory: not the device is smaller, the formulas are wrong."""
    wrong = posterior()
    wrong.observe(loads([1, 20]), np.array([30 * GIB, np.nan]), np.array([False, True]))
    assert wrong.limit == pytest.approx(posterior().usable, rel=0.05)


def test_out_of_memory_at_about_a_peak_that_ran_is_not_explained_by_memory() -> None:
    known = posterior()
    sizes, lost = loads([2, 16, 8], activations=0.001), np.array([False, True, True])
    known.observe(sizes, np.where(lost, np.nan, 12 * GIB), lost)
    assert known.unexplained == 8
    known.observe(loads([2, 16, 8]), np.where(lost, np.nan, 12 * GIB), lost)
    assert known.unexplained == np.inf, "the samples may take more than predicted"


def test_running_out_of_memory_below_what_the_device_held_speaks_against_the_structures_formula() -> None:
    """One structure ran with 34 GiB; another one runs out of memory where its formula says 22, again and again."""
    sizes, failed = [20, 10, 10, 10], np.array([False, True, True, True])
    many = loads(sizes)
    many.structure[1:], many.relatives[1:], many.lineage[1:] = 1, 1, [1, 2, 3]
    known = posterior()
    known.observe(many, np.where(failed, np.nan, 34 * GIB), failed)
    before = posterior()
    before.observe(loads(sizes[:1]), np.array([34 * GIB]), NONE)
    assert known.limit == pytest.approx(before.limit, rel=0.05)
    (_, _, spread), (_, _, sure) = known.predict(loads([22])), before.predict(loads([22]))
    assert spread[0] < 1.5 * sure[0]
    other = loads([10, 6], structure=1, lineage=4)
    free = known.predict(other)[1]
    assert free[0] < before.predict(other)[1][0] - 6 * GIB


def test_activations_may_add_to_the_other_moments_of_a_step() -> None:
    """The formulas say 30 GiB whatever the micro-batch; each sample takes a GiB all the same."""
    sizes, asked = [1, 4], [8]
    known = posterior()
    known.observe(loads(sizes, others=30 * GIB), 30 * GIB + GIB * np.array(sizes), np.zeros(2, dtype=bool))
    result, _, _ = known.predict(loads(asked, others=30 * GIB))
    assert result == pytest.approx([38 * GIB], rel=0.05)
    within = 36 * GIB
    edge = int(known.largest(loads([1], others=30 * GIB), within)[0])
    assert known.peaks(loads([edge], others=30 * GIB))[0] <= within < known.peaks(loads([edge + 1], others=30 * GIB))[0]


def test_two_peaks_tell_the_edge_to_a_sample() -> None:
    known = posterior()
    known.observe(loads([4, 16]), peaks([4, 16]), np.zeros(2, dtype=bool))
    edge = known.largest(loads([0]), 36 * GIB)
    assert abs(edge[0] - int((36 - 10.5) / 1.1)) <= 1
    assert known.largest(loads([0]), 11 * GIB)[0] == 0


def test_running_out_of_memory_lowers_the_probability_to_fit() -> None:
    before = posterior()
    before.observe(loads([10]), peaks([10]), NONE)
    after = posterior()
    after.observe(loads([10, 24]), np.array([*peaks([10]), np.nan]), np.array([False, True]))
    chances = [
        normal_cdf(left / spread) for _, left, spread in (b.predict(loads([10, 23, 24])) for b in (before, after))
    ]
    assert (chances[1][1:] < chances[0][1:]).all()
    assert chances[1][2] < 0.5 < chances[1][0]
    assert after.limit < before.limit


def test_equal_launches_that_run_out_of_memory_where_one_ran_make_that_size_doubtful() -> None:
    result, sizes, lost = posterior(), [8] * 7, np.array([False] * 3 + [True] * 4)
    result.observe(loads(sizes), np.where(lost, np.nan, peaks(sizes)), lost)
    _, left, spread = result.predict(loads([8, 30]))
    assert np.isfinite([*left, *spread]).all()
    assert left[1] < left[0]


def test_a_limit_far_below_the_expected_one_is_found_out() -> None:
    known = posterior()
    known.observe(loads([4, 3, 2, 1]), np.full(4, np.nan), np.ones(4, dtype=bool))
    _, left, spread = known.predict(loads([1]))
    assert normal_cdf(left / spread)[0] < 0.5


def test_sums_over_knobs_are_those_of_the_matrix() -> None:
    chance = np.random.default_rng(1)
    knobs, asked = chance.integers(0, 3, (20, 4)), chance.integers(0, 3, (9, 4))
    structure, of_asked = chance.integers(0, 2, 20), chance.integers(0, 2, 9)
    weights = chance.normal(size=20)
    matrix = knob_similarity(asked, knobs) * (of_asked[:, None] == structure[None, :])
    assert sum_by_knob(structure, knobs, weights, of_asked, asked) == pytest.approx(matrix @ weights)
