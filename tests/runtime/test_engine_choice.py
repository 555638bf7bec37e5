"""Choice of the measured engine in scripts with several engines."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from optuna_dsat.runtime.events import EngineReady, StepMeasured
from optuna_dsat.runtime.imports import patch
from optuna_dsat.runtime.measure.engine import OtherEngine
from tests.harness.meter import Engine as MeteredEngine
from tests.harness.meter import MeterBench
from tests.harness.ranks import Starter, WarmRanks

RANKS = (0, 1)


class Engine:
    """Engine for which every second ``step`` is an update."""

    def __init__(self) -> None:
        self.steps = 0

    def is_gradient_accumulation_boundary(self) -> bool:
        return self.steps % 2 == 1

    def step(self) -> None:
        self.steps += 1


@pytest.mark.parametrize(
    ("before", "between", "takes_over"),
    [
        (0, [0, 0], True),  # the measured engine is a reference model and never trains
        (0, [1, 1, 1], False),  # they take turns
        (0, [1, 0, 0, 0, 1], False),  # three updates of a critic per update of the measured engine
        (3, [0, 0], True),  # created later: the next fold
        (3, [1, 1, 1], False),
    ],
    ids=["reference", "turns", "critic", "fold", "later-turns"],
)
def test_an_engine_that_trains_alone_takes_the_place(before: int, between: Sequence[int], takes_over: bool) -> None:
    done, engine, taken = [before], Engine(), list[bool]()
    OtherEngine(engine, measured=lambda: done[0], takes_over=lambda: taken.append(True))
    for updates in between:
        done[0] += updates
        engine.step()
        engine.step()
    assert bool(taken) is takes_over
    assert ("step" in vars(engine)) is not takes_over  # no longer observed
    assert engine.steps == 2 * len(between)


def test_a_method_is_put_back_as_it_was() -> None:
    engine = Engine()
    undo = patch(engine, "step")(lambda original: (original(), original()))
    engine.step()
    assert engine.steps == 2
    undo()
    engine.step()
    assert (engine.steps, "step" in vars(engine)) == (3, False)


@pytest.mark.torchrun
@pytest.mark.parametrize(
    ("built", "overlay", "stages"),
    [
        ("reference", {"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": 3}}, [3, 3]),  # comes first
        ("folds", {}, [2, 2]),  # steps go on with the next
        ("class", {"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": 2}}, [2]),  # past initialize
    ],
)
def test_of_several_engines_the_one_that_trains_is_measured_with_the_trials_config(
    start: Starter, warm_ranks: WarmRanks, built: str, overlay: dict[str, Any], stages: list[int]
) -> None:
    launch = start.torchrun("several_engines.py", built, str(start.user_config), overlay=overlay, warm=warm_ranks)
    assert launch.exit_code == 0, launch.output + launch.log("stderr")
    for rank in RANKS:
        assert [engine.zero_stage for engine in launch.of(EngineReady, rank)] == stages
        steps = launch.of(StepMeasured, rank)
        assert [step.step for step in steps] == [1, 2, 3, 4, 5]
        assert {step.observed_micro_batch for step in steps} == {overlay.get("train_micro_batch_size_per_gpu", 2)}
    assert "trained to its end" not in launch.log("stdout")


def test_a_copy_of_the_module_is_made_and_not_measured() -> None:
    """A moving average of the parameters failed the script, as hooks had the process groups of the engine copied."""
    bench = MeterBench(MeteredEngine)
    bench.engine.group = threading.Lock()  # like a process group, it cannot be copied
    average = copy.deepcopy(bench.engine.module)
    average(torch.ones(64, 2))
    bench.micro_step()
    assert (bench.steps[0].samples, bench.steps[0].observed_micro_batch) == (4, 4)
