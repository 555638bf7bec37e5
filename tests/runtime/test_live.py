"""A running engine whose settings were changed trains as one built with them; orders and steps between two trials."""

from __future__ import annotations

import sys
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from optuna_dsat.config.knobs import KNOBS
from optuna_dsat.runtime.measure import live
from optuna_dsat.runtime.measure.engine import data_parallel_size
from optuna_dsat.runtime.measure.live import SETTERS, NotLiveError, Transition, await_order, change_settings, order_next
from tests.harness.ranks import WarmRanks

LIVE_KNOBS = {knob.name: knob.live for knob in KNOBS if knob.live}
SCRIPT = Path(__file__).with_name("live_engines.py")
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
OTHER_VALUES: dict[str, tuple[Any, Any]] = {
    "contiguous_gradients": (True, False),
    "overlap_comm": (False, True),
    "reduce_bucket_size": (100_000, 5_000),
    "reduce_scatter": (True, False),
    "stage3_max_live_parameters": (10**9, 1_000),
    "stage3_max_reuse_distance": (10**9, 0),
    "stage3_param_persistence_threshold": (0, 10_000),
    "stage3_prefetch_bucket_size": (10_000, 0),
    "use_multi_rank_bucket_allreduce": (True, False),
}
"""Knob -> two values, of which the second makes other collectives or none."""


_BOTH_WAYS = ("contiguous_gradients", "reduce_bucket_size", "stage3_param_persistence_threshold")
"""Knobs whose change makes or drops buffers."""


def config(stage: int, *, micro_batch: int = 8, accumulation: int = 1, **zero: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, **_small_sizes(stage), **zero},
        "steps_per_print": 10**6,
    }


def _small_sizes(stage: int) -> dict[str, Any]:
    return {knob: values[0] for knob, values in OTHER_VALUES.items() if stage in LIVE_KNOBS[knob]}


def changes_at(stage: int, **zero: Any) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    before = config(stage, **zero)
    changes = [("batch", before, config(stage, micro_batch=16, accumulation=2, **zero))]
    for knob, stages in LIVE_KNOBS.items():
        if stage in stages and not (zero and stage == 2 and knob == "contiguous_gradients"):
            ways = (OTHER_VALUES[knob], OTHER_VALUES[knob][::-1])
            for value, other in ways if knob in _BOTH_WAYS else ways[:1]:
                names = {**zero, knob: value}, {**zero, knob: other}
                changes.append((f"{knob}: {value} -> {other}", config(stage, **names[0]), config(stage, **names[1])))
    return changes


STRUCTURES: tuple[tuple[int, dict[str, Any]], ...] = ((1, {}), (2, {}), (2, OFFLOAD), (3, {}))


@pytest.mark.torchrun
def test_a_changed_engine_is_as_a_fresh_one(warm_ranks: WarmRanks, tmp_path: Path) -> None:
    changes = [(f"ZeRO {stage} {zero}: {name}", before, after)
               for stage, zero in STRUCTURES for name, before, after in changes_at(stage, **zero)]  # fmt: skip
    assert len(changes) > 3 * len(STRUCTURES)
    compared: list[list[Any]] = warm_ranks.train_engines(SCRIPT, changes, tmp_path)
    assert len(compared) == len(changes)
    for name, equal, collectives, of_fresh in compared:
        assert equal, name
        assert collectives == of_fresh, name


def test_every_live_knob_has_a_setter() -> None:
    assert SETTERS.keys() == LIVE_KNOBS.keys()


def test_a_setting_that_deepspeed_does_not_have_is_refused() -> None:
    class Engine:
        optimizer = object()

    with pytest.raises(NotLiveError, match=r"no object\.reduce_scatter"):
        change_settings(Engine(), {"zero_optimization.reduce_scatter": True})


def test_a_compiled_model_takes_no_other_size_but_an_optimizer_that_compiles_its_update_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class MuonWithAuxAdam:
        pass

    sizes = SimpleNamespace(train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=1, world_size=1)
    engine = SimpleNamespace(_config=sizes, module=torch.nn.Linear(1, 1), basic_optimizer=MuonWithAuxAdam())
    dynamo = SimpleNamespace(counters={"stats": {"unique_graphs": 3}})
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", dynamo)
    change_settings(engine, {"train_micro_batch_size_per_gpu": 4})
    assert (sizes.train_micro_batch_size_per_gpu, sizes.train_batch_size) == (4, 4)
    engine.basic_optimizer = object()
    with pytest.raises(NotLiveError, match="compiled for its batch size"):
        change_settings(engine, {"train_micro_batch_size_per_gpu": 8})


def test_the_ranks_do_not_depend_on_the_accumulation_that_zenflow_sets_after_the_batch_size() -> None:
    config = SimpleNamespace(
        train_batch_size=2, train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=4, world_size=2
    )
    assert data_parallel_size(config) == 2


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


def begun(
    *, micro_batch: int | None = 8, accumulated: int = 1, in_flight: int = 3, realigns: bool = False
) -> Transition:
    transition = Transition()
    assert not any(transition.includes(size, 1) for size in (4, 3))  # the last batch of an epoch is smaller
    ratios: list[Fraction] = []

    def rescale(ratio: Fraction) -> int:
        ratios.append(ratio)
        return in_flight

    transition.begin(micro_batch=micro_batch, accumulated=Fraction(accumulated), rescale=rescale, realigns=realigns)
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
    with pytest.raises(NotLiveError, match="the passes of a step are 1, not 3"):
        begun(micro_batch=None, accumulated=3).includes(4, 1)


def test_a_trainer_that_counts_passes_by_epoch_has_one_step_to_follow() -> None:
    transition = begun(micro_batch=None, accumulated=3, realigns=True)
    assert [transition.includes(4, passes) for passes in (2, 3)] == [True, False]
    with pytest.raises(NotLiveError, match="the passes of a step are 2, not 3"):
        transition.includes(4, 2)


def test_a_size_that_may_be_the_length_is_not_changed() -> None:
    """A benchmark with time first was measured at twice its batch: it had as many time steps as samples."""
    transition = Transition()
    transition.includes(4, 1, is_ambiguous=True)
    transition.begin(micro_batch=None, accumulated=Fraction(1), rescale=lambda _: 1)
    with pytest.raises(NotLiveError, match="two dimensions"):
        transition.begin(micro_batch=8, accumulated=Fraction(1), rescale=lambda _: 1)


def test_a_size_that_was_never_observed_is_not_changed() -> None:
    with pytest.raises(NotLiveError, match="no tensors"):
        Transition().begin(micro_batch=8, accumulated=Fraction(1), rescale=lambda _: 1)
