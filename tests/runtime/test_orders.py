"""Between two trials of a launch: the order to ranks that wait, and the steps until the script has followed it."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from optuna_dsat.runtime.measure import live
from optuna_dsat.runtime.measure.live import NotLiveError, Transition, await_order, order_next


def test_the_latest_order_names_the_next_trial_or_none(tmp_path: Path) -> None:
    order_next(tmp_path, tmp_path / "trial-0001" / "launch.json")
    assert await_order(tmp_path) == tmp_path / "trial-0001" / "launch.json"
    order_next(tmp_path, None)
    assert await_order(tmp_path) is None


def test_a_rank_leaves_a_tuner_that_stands_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_LONGEST_WAIT_S", 0.02)
    assert await_order(tmp_path) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"launch": 7}', "\0"])
def test_a_rank_leaves_if_the_order_is_not_one(tmp_path: Path, text: str) -> None:
    (tmp_path / live._ORDER).write_text(text)
    assert await_order(tmp_path) is None


def test_a_folder_in_the_place_of_an_order_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / live._ORDER).mkdir()
    assert await_order(tmp_path) is None


def begun(*, micro_batch: int | None = 8, accumulated: int = 1, in_flight: int = 3) -> Transition:
    transition = Transition()
    assert not transition.includes(4, 1)
    ratios: list[Fraction] = []

    def rescale(ratio: Fraction) -> int:
        ratios.append(ratio)
        return in_flight

    transition.begin(micro_batch=micro_batch, accumulated=Fraction(accumulated), rescale=rescale)
    assert ratios == ([] if micro_batch is None else [Fraction(micro_batch, 4)])
    return transition


def test_steps_with_prefetched_batches_are_part_of_no_trial() -> None:
    transition = begun()
    assert [transition.includes(size, 1) for size in (4, 4, 8, 8)] == [True, True, False, False]


@pytest.mark.parametrize("in_flight", [0, 1, 3])
def test_a_script_that_never_reaches_the_size_is_refused_once_nothing_is_in_flight(in_flight: int) -> None:
    transition = begun(in_flight=in_flight)
    assert [transition.includes(4, 1) for _ in range(max(1, in_flight))] == [True] * max(1, in_flight)
    with pytest.raises(NotLiveError, match="the batch size is 4, not 8"):
        transition.includes(4, 1)


def test_a_script_that_accumulates_otherwise_is_refused_at_once() -> None:
    assert not begun(micro_batch=None, accumulated=3).includes(4, 3)
    with pytest.raises(NotLiveError, match="the forward passes of a step are 1, not 3"):
        begun(micro_batch=None, accumulated=3).includes(4, 1)


def test_a_size_that_was_never_observed_is_not_changed() -> None:
    with pytest.raises(NotLiveError, match="no tensors"):
        Transition().begin(micro_batch=8, accumulated=Fraction(1), rescale=lambda _: 1)
