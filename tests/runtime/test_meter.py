"""The meter on stub engines, with a manually advanced clock."""

from __future__ import annotations

import warnings
from collections import UserDict
from collections.abc import Callable
from contextlib import nullcontext
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from optuna_dsat.runtime.events import Event
from optuna_dsat.runtime.measure.engine import MOST_SKIPPED_STEPS, DeviceClock, SkipDetector
from optuna_dsat.runtime.measure.inputs import InputSize, leading_dimension, size_of
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


class FullEngine(Engine):
    """Engine without memory for its input."""

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        try:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")
        except RuntimeError as cause:
            raise ValueError("the batch is too large") from cause


def test_a_failed_allocation_in_the_engine_is_counted_once_though_the_script_catches_it() -> None:
    bench = MeterBench(FullEngine)
    bench.state.device = "cpu"
    for failures in (1, 2):
        with pytest.raises(ValueError, match="too large") as caught:
            bench.engine(torch.ones(4, 2))
        bench.state.note_error(caught.value)  # the script frees memory
        assert bench.state.allocation_failures == bench.state.fed == failures  # an epoch of them is the last


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
def test_where_it_failed_is_known_and_failed_passes_fed_nothing(phase: str) -> None:
    bench = MeterBench(Engine)
    assert bench.state.phase == "between"
    bench.engine.failing = phase
    with pytest.raises(RuntimeError, match=phase):
        bench.micro_step(torch.ones(8, 2))
    assert bench.state.phase == phase
    bench.engine.failing = ""
    bench.micro_step()
    assert bench.state.phase == "between"
    assert bench.steps[0].observed_micro_batch == (8 if phase == "step" else 4)


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


class Strict(dict[str, Any]):
    __getattr__ = dict.__getitem__


@pytest.mark.parametrize(
    ("output", "loss"),
    [
        (torch.ones(1), 1.0),
        (SimpleNamespace(loss=torch.tensor(2.0)), 2.0),
        (Strict(logits=torch.ones(2)), None),
        (torch.ones(2), None),
        ({"logits": torch.ones(1)}, None),
    ],
    ids=["scalar", "output object", "attributes", "logits", "dict"],
)
def test_the_loss_is_read_where_it_can_be_seen(output: Any, loss: float | None) -> None:
    bench = MeterBench(lambda clock: _answering(clock, output))
    bench.engine(torch.ones(4, 2))
    bench.engine.step()
    assert bench.steps[0].loss == loss


def test_recording_a_step_is_no_part_of_the_next() -> None:
    bench = MeterBench(Engine)

    def write(event: Event) -> None:
        bench.events.append(event)
        bench.clock.time += 5.0

    bench.meter._write = write
    bench.micro_step()
    bench.micro_step()
    assert [step.latency_s for step in bench.steps] == [3.25, 3.25]


def test_the_peaks_of_a_trial_begin_after_the_steps_with_an_earlier_trials_batch() -> None:
    bench = MeterBench(Engine)
    bench.micro_step(torch.ones(8, 2))
    bench.meter.transition.begin(micro_batch=4, accumulated=Fraction(1), rescale=lambda _: 2)
    bench.micro_step(torch.ones(8, 2))
    assert (len(bench.steps), bench.memory.restarts) == (1, 1)
    bench.micro_step(torch.ones(4, 2))
    assert (len(bench.steps), bench.memory.restarts) == (2, 1)


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


def test_inputs_of_a_backward_pass_are_one_micro_batch() -> None:
    """Samples of triplets were counted three times, crops of two resolutions by a third too often."""
    bench = MeterBench(Engine)
    for rows in (8, 24):
        bench.engine(torch.ones(rows, 2))
    bench.engine.backward(torch.tensor(0.5))
    bench.engine.step()
    step = bench.steps[0]
    assert (step.observed_micro_batch, step.samples, step.elements) == (24, 24, 64)
    bench.meter._size_of = lambda _: InputSize(samples=4, loaded=8, is_ambiguous=True)  # parts of a batch
    for _ in range(2):
        bench.engine(torch.ones(4, 2))
    bench.engine.backward(torch.tensor(0.5))
    bench.engine.step()
    assert (bench.steps[1].observed_micro_batch, bench.steps[1].samples) == (4, 8)
    assert [step.is_ambiguous for step in bench.steps] == [False, True]


@pytest.mark.parametrize("fed", ["engine", "module"])
def test_evaluation_between_steps_is_recorded_apart(fed: str) -> None:
    bench = MeterBench(Engine)
    bench.micro_step()
    if fed == "module":
        bench.engine.module.forward = slow(bench)
    bench.clock.time += 5.0  # training data
    fed_to = bench.engine if fed == "engine" else bench.engine.module
    fed_to.eval()
    bench.clock.time += 7.0  # start of the evaluation loader's workers
    for _ in range(3):
        fed_to(torch.ones(64, 2))  # takes 1 s by the engine
        bench.clock.time += 10.0  # evaluation data
    fed_to.train()
    bench.micro_step()
    first, second = bench.steps
    forward_s, start_s = (1.0, 7.0) if fed == "engine" else (2.0, 0.0)
    assert (first.evaluation_s, second.evaluation_s) == (0.0, start_s + 2 * 10.0 + 3 * forward_s)
    assert second.latency_s == 5.0 + 7.0 + 3 * (10.0 + forward_s) + 3.25
    assert second.samples == 4


@pytest.mark.parametrize("fed", ["engine", "module"])
@pytest.mark.parametrize("backward", ["engine", "loss"])
def test_a_script_that_never_leaves_eval_mode_trains_in_it(fed: str, backward: str) -> None:
    """As in scripts that call ``from_pretrained`` but not ``train()``."""
    bench = MeterBench(Engine)
    bench.engine.module.eval()
    for _ in range(2):
        forward = bench.engine if fed == "engine" else bench.engine.module
        forward(torch.ones(4, 2))
        if backward == "engine":
            bench.engine.backward(torch.tensor(0.5))
        with torch.no_grad():
            bench.engine(torch.ones(64, 2))
        bench.engine.step()
    assert [step.samples for step in bench.steps] == [4, 4]
    assert bench.steps[1].evaluation_s == 1.0, "without gradients it is evaluation still"


def test_evaluation_with_gradients_on_is_not_training_where_the_script_trains_in_training_mode() -> None:
    bench = MeterBench(Engine)
    bench.micro_step()
    bench.engine.module.eval()
    bench.engine(torch.ones(64, 2))
    bench.engine.module.train()
    bench.micro_step()
    assert [step.samples for step in bench.steps] == [4, 4]


def ragged(*lengths: int, layout: torch.layout = torch.jagged) -> torch.Tensor:
    rows = [torch.ones(length, dtype=torch.int64) for length in lengths]
    with warnings.catch_warnings(action="ignore"):  # prototype API
        return torch.nested.nested_tensor(rows, layout=layout)


class ScalingEngine(Engine):
    """Skips the given updates, like DeepSpeed's engine after an overflow."""

    def __init__(self, clock: FakeClock, skips: str = "", accumulation: int = 1) -> None:
        super().__init__(clock, accumulation)
        self.skips = skips
        self.updates = 0
        self.skipped_steps = 7  # from a loaded checkpoint

    def step(self) -> None:
        if self.is_gradient_accumulation_boundary():
            self.skipped_steps += self.skips[self.updates : self.updates + 1] == "x"
            self.updates += 1
        super().step()


@pytest.mark.parametrize(("steps", "ends"), [(0, True), (1, False)])
def test_a_script_that_skips_each_batch_that_runs_out_of_memory_is_ended(steps: int, ends: bool) -> None:
    bench = MeterBench(Engine)
    for _ in range(steps):
        bench.micro_step()
    bench.state.allocation_failures = MOST_SKIPPED_STEPS - 1
    bench.engine(torch.ones(4, 2))
    assert bench.left == 0
    bench.state.host_allocation_failures = 1
    bench.engine(torch.ones(4, 2))
    assert bench.left == ends


def test_a_skipped_step_is_recorded_and_another_is_run_for_it() -> None:
    bench = MeterBench(lambda clock: ScalingEngine(clock, "x.x", accumulation=2))
    for _ in range(8):
        assert bench.left == 0
        bench.micro_step()
        bench.state.allocation_failures += 1
    assert [step.caught for step in bench.steps] == [1, 3, 5, 7]
    assert [(step.step, step.number, step.skipped, step.skipped_before) for step in bench.steps] == [
        (1, 1, True, 0),
        (2, 1, False, 1),
        (3, 2, True, 1),
        (4, 2, False, 2),
    ]
    assert (bench.left, bench.state.steps, bench.state.skipped) == (1, 2, 2)


def test_a_launch_of_skipped_steps_alone_has_an_end() -> None:
    bench = MeterBench(lambda clock: ScalingEngine(clock, "x" * 100))
    for _ in range(MOST_SKIPPED_STEPS):
        assert bench.left == 0
        bench.micro_step()
    assert (bench.left, bench.state.steps, bench.state.skipped) == (1, 0, MOST_SKIPPED_STEPS)


def test_the_observer_forgets_a_skipped_step() -> None:
    seen: list[Any] = []

    def observe(phase: str, step: int) -> Any:
        seen.append((phase, step))
        return nullcontext()

    observer = SimpleNamespace(
        observe=observe,
        boundary=lambda step, _: seen.append(step),
        discard=lambda: seen.append("discard"),
    )
    bench = MeterBench(lambda clock: ScalingEngine(clock, "x."), observer)
    bench.micro_step()
    bench.micro_step()
    phases = [(phase, 1) for phase in ("forward", "backward", "step")]
    assert seen == [*phases, "discard", *phases, 1]


def test_a_skip_by_an_optimizer_that_the_script_steps_is_seen() -> None:
    bench = MeterBench(SteppingEngine)
    for overflow in (True, False):
        bench.engine.optimizer.overflow = overflow
        bench.engine.backward(bench.engine(torch.ones(4, 2)))
        bench.engine.optimizer.step()
    assert [step.skipped for step in bench.steps] == [True, False]


def test_a_skip_by_torchs_own_scaler_is_seen_by_its_lower_scale() -> None:
    bench = MeterBench(Engine)
    scales = iter([8.0, 4.0, 4.0, 8.0])
    scaler = SimpleNamespace(get_scale=lambda: next(scales))
    object.__setattr__(bench.engine, "torch_autocast_z0_gradscaler", scaler)
    bench.meter._skips = SkipDetector(bench.engine)
    for _ in range(3):
        bench.micro_step()
    assert [step.skipped for step in bench.steps] == [True, False, False]


def test_a_context_of_one_micro_batch_ends_a_skipped_step_once() -> None:
    bench = MeterBench(lambda clock: ScalingEngine(clock, "x"))
    with bench.meter.micro_batch():
        bench.micro_step()
    assert [step.skipped for step in bench.steps] == [True]


def test_the_elements_of_all_micro_batches_are_noted() -> None:
    bench = MeterBench(lambda clock: Engine(clock, accumulation=2))
    for length in (5, 9):
        bench.micro_step(
            {"input_ids": torch.ones(4, length, dtype=torch.int64), "mask": torch.ones(4, 1, length, length)}
        )
    [step] = bench.steps
    assert (step.samples, step.elements, step.elements_are_tokens) == (8, 4 * 14, True)


def test_ranks_that_share_a_sequence_count_its_tokens_together() -> None:
    class Sharing(Engine):
        sequence_parallel_size = 2

    bench = MeterBench(Sharing)
    bench.micro_step(torch.zeros(4, 6, dtype=torch.long))
    assert [(step.samples, step.elements) for step in bench.steps] == [(4, 2 * 4 * 6)]


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.ones(2, 3, 8, 8), (2, 384, False)),
        ((torch.ones(2, 3, 8, 8), torch.ones(2, dtype=torch.int64)), (2, 384, False)),
        ((torch.ones(2, 3, 8, 8), torch.ones(2, 5, dtype=torch.int64)), (2, 384, False)),
        ({"ids": torch.ones(2, 7, dtype=torch.int32), "labels": torch.ones(2, 5, dtype=torch.int64)}, (2, 14, True)),
        ((torch.ones(2, 9, dtype=torch.uint8),), (2, 18, False)),
        (numpy.ones((2, 7), dtype=numpy.int64), (2, 14, True)),
        (lambda: ragged(3, 5), (2, 8, True)),
        (lambda: (ragged(3, 5, layout=torch.strided), torch.ones(2, 5)), (2, 10, False)),
        (Strict(ids=torch.ones(2, 7, dtype=torch.int64)), (2, 14, True)),
        (torch.tensor(1.0), None),
    ],
    ids=[
        "images",
        "images and classes",
        "images and texts",
        "source and target",
        "bytes",
        "NumPy's",
        "ragged",
        "ragged without a shape",
        "attributes",
        "a number",
    ],
)
def test_the_size_of_inputs_is_that_of_tokens_or_of_the_largest(batch: Any, size: tuple[int, int, bool] | None) -> None:
    result = size_of(batch() if callable(batch) else batch)  # torch takes a second to import what makes ragged ones
    assert size == (None if result is None else (result.samples, result.elements, result.are_tokens))
