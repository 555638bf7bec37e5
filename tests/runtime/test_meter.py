"""The meter on stub engines, with a manually advanced clock."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from optuna_dsat.runtime.clock import DeviceClock
from optuna_dsat.runtime.inputs import leading_dimension
from tests.harness.meter import Engine, FakeClock, MeterBench, PipelineEngine


def test_a_step_is_timed_end_to_end_and_by_phase() -> None:
    bench = MeterBench(Engine)
    bench.micro_step(data_s=10.0)
    bench.micro_step(data_s=20.0)
    first, second = bench.steps
    assert (first.step, first.latency_s) == (1, 13.25)
    assert (second.step, second.latency_s) == (2, 23.25)
    assert (second.forward_s, second.backward_s, second.step_s) == (1.0, 2.0, 0.25)
    assert (second.rank, second.samples, second.observed_micro_batch, second.loss) == (3, 4, 4, 0.5)
    assert (second.peak_allocated_bytes, second.peak_reserved_bytes, second.rss_bytes) == (1, 2, 3)


def test_the_rank_leaves_after_the_last_profile_step_and_not_before() -> None:
    bench = MeterBench(Engine)
    bench.micro_step()
    assert bench.left == 0
    bench.micro_step()
    assert bench.left == 1
    assert bench.state.steps == 2


class Optimizer:
    """Optimizer of an engine, which some scripts step directly."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.steps = 0

    def step(self) -> None:
        self.clock.time += 0.5
        self.steps += 1


class SteppingEngine(Engine):
    def __init__(self, clock: FakeClock, accumulation: int = 1) -> None:
        super().__init__(clock, accumulation)
        self.optimizer = Optimizer(clock)

    def step(self) -> None:
        if self.is_gradient_accumulation_boundary():
            self.optimizer.step()
        super().step()


def test_an_optimizer_that_the_script_steps_itself_ends_a_step() -> None:
    bench = MeterBench(SteppingEngine)
    bench.engine.backward(bench.engine(torch.ones(4, 2)))
    bench.engine.optimizer.step()
    [step] = bench.steps
    assert (step.samples, step.step_s, step.latency_s) == (4, 0.5, 3.5)
    assert bench.engine.optimizer.step.__func__ is not None  # torch's schedulers require a bound method


def test_the_engines_own_call_of_its_optimizer_is_part_of_its_step() -> None:
    bench = MeterBench(lambda clock: SteppingEngine(clock, accumulation=2))
    bench.micro_step()
    bench.micro_step()
    [step] = bench.steps
    assert (step.samples, step.step_s) == (8, 1.0)
    assert bench.engine.optimizer.steps == 1


def test_a_step_holds_all_its_micro_batches() -> None:
    bench = MeterBench(lambda clock: Engine(clock, accumulation=3))
    for size in (4, 6, 2):
        assert bench.steps == []
        bench.micro_step(torch.ones(size, 2), data_s=1.0)
    [step] = bench.steps
    assert (step.samples, step.observed_micro_batch) == (12, 6)
    assert (step.forward_s, step.backward_s, step.step_s, step.latency_s) == (3.0, 6.0, 0.75, 12.75)


def test_measuring_costs_a_fixed_few_calls_a_step() -> None:
    bench = MeterBench(lambda clock: Engine(clock, accumulation=4))
    bench.clock.waits = 0
    for _ in range(4):
        bench.micro_step()
    assert len(bench.events) == 1
    assert bench.clock.waits == 1
    assert bench.clock.marks == 4 * 3 * 2
    assert bench.memory.samples == 4 * 3
    assert bench.memory.reads == 1


def test_evaluation_is_no_training() -> None:
    bench = MeterBench(Engine)
    bench.engine.module.eval()
    bench.engine(torch.ones(64, 2))
    bench.engine.module.train()
    with torch.no_grad():
        bench.engine(torch.ones(32, 2))
    bench.micro_step()
    assert (bench.steps[0].samples, bench.steps[0].forward_s) == (4, 1.0)
    assert bench.steps[0].latency_s == 5.25  # but it takes time


def test_a_backward_on_the_loss_itself_is_what_lies_between_forward_and_step() -> None:
    bench = MeterBench(Engine)
    bench.engine(torch.ones(4, 2))
    bench.clock.time += 7.0  # loss.backward()
    bench.engine.step()
    assert (bench.steps[0].backward_s, bench.steps[0].loss) == (7.0, 0.5)


def test_a_script_that_accumulates_by_itself_ends_a_step_with_every_step() -> None:
    bench = MeterBench(lambda clock: Engine(clock, accumulation=8))
    object.__setattr__(bench.engine, "managed_gradient_accumulation", lambda: False)
    bench.micro_step()
    assert len(bench.steps) == 1


@pytest.mark.parametrize("phase", ["forward", "backward", "step"])
def test_where_it_failed_is_known(phase: str) -> None:
    bench = MeterBench(Engine)
    assert bench.state.phase == "between"
    bench.engine.failing = phase
    with pytest.raises(RuntimeError, match=phase):
        bench.micro_step()
    assert bench.state.phase == phase
    bench.engine.failing = ""
    bench.micro_step()
    assert bench.state.phase == "between"


def test_a_pipeline_is_measured_by_whole_batches() -> None:
    bench = MeterBench(PipelineEngine)
    bench.clock.time += 5.0
    assert bench.engine.train_batch().item() == 0.5
    [step] = bench.steps
    assert (step.latency_s, step.forward_s, step.backward_s, step.step_s) == (8.0, 0.0, 0.0, 0.0)
    assert (step.samples, step.observed_micro_batch, step.loss) == (12, 4, 0.5)


def test_an_observer_sees_every_phase_and_boundary() -> None:
    seen: list[Any] = []

    def observe(phase: str, step: int) -> Any:
        seen.append((phase, step))
        return nullcontext()

    observer = SimpleNamespace(observe=observe, boundary=lambda step, samples: seen.append((step, samples)))
    MeterBench(Engine, observer).micro_step()
    assert seen == [("forward", 1), ("backward", 1), ("step", 1), (1, 4)]


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.ones(3, 9), 3),
        ((torch.tensor(1.0), torch.ones(5)), 5),
        ((("text", {"labels": [torch.ones(6, 1)]}), {}), 6),
        (((), {"input_ids": torch.ones(7, 2)}), 7),
        (UserDict({"input_ids": torch.ones(8, 2)}), 8),
        ((["a", "b"], {}), None),
        ([[[[[[torch.ones(2)]]]]]], None),
        (None, None),
    ],
    ids=str,
)
def test_the_batch_is_the_first_leading_dimension(batch: Any, size: int | None) -> None:
    assert leading_dimension(batch) == size


@pytest.mark.parametrize(
    ("output", "loss"),
    [
        (torch.ones(1), 1.0),
        (SimpleNamespace(loss=torch.tensor(2.0)), 2.0),
        (torch.ones(2), None),
        ({"logits": torch.ones(1)}, None),
    ],
    ids=["scalar", "output object", "logits", "dict"],
)
def test_the_loss_is_read_where_it_can_be_seen(output: Any, loss: float | None) -> None:
    bench = MeterBench(lambda clock: _answering(clock, output))
    bench.engine(torch.ones(4, 2))
    bench.engine.step()
    assert bench.steps[0].loss == loss


def _answering(clock: FakeClock, output: Any) -> Engine:
    engine = Engine(clock)
    object.__setattr__(engine, "forward", lambda *_, **__: output)
    return engine


def test_device_phases_are_timed_by_events_and_waited_for_once() -> None:
    class Recorded:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.at: float | None = None

        def record(self) -> None:
            self.at = next(times)

        def elapsed_time(self, end: Recorded) -> float:
            assert self.at is not None
            assert end.at is not None
            return end.at - self.at

    times = iter([1000.0, 3500.0])
    waits: list[None] = []
    clock = DeviceClock(SimpleNamespace(Event=Recorded, synchronize=lambda: waits.append(None)))
    start, end = clock.mark(), clock.mark()
    assert waits == []
    clock.synchronize()
    assert len(waits) == 1
    assert clock.seconds(start, end) == 2.5


def slow(bench: MeterBench) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a forward that takes two seconds."""

    def forward(batch: torch.Tensor) -> torch.Tensor:
        bench.clock.time += 2.0
        return batch

    return forward


@pytest.mark.parametrize("fed", ["engine", "module"])
def test_evaluation_between_steps_is_recorded_apart(fed: str) -> None:
    bench = MeterBench(Engine)
    bench.micro_step()
    if fed == "module":
        bench.engine.module.forward = slow(bench)
    bench.clock.time += 5.0  # training data
    bench.engine.module.eval()
    for _ in range(3):
        if fed == "engine":
            bench.engine(torch.ones(64, 2))  # takes 1 s
        else:
            bench.engine.module(torch.ones(64, 2))
        bench.clock.time += 10.0  # evaluation data
    bench.engine.module.train()
    bench.micro_step()
    first, second = bench.steps
    forward_s = 1.0 if fed == "engine" else 2.0
    assert (first.evaluation_s, second.evaluation_s) == (0.0, 2 * 10.0 + 3 * forward_s)
    assert second.latency_s == 5.0 + 3 * (10.0 + forward_s) + 3.25
    assert second.samples == 4
