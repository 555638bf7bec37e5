"""A meter on stub engines, with a manually advanced clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from optuna_dsat.runtime.events import Event, StepMeasured
from optuna_dsat.runtime.measure.engine import Clock
from optuna_dsat.runtime.measure.memory import CudaMemory, MemoryPeaks
from optuna_dsat.runtime.measure.meter import Meter, RankState


class FakeClock(Clock):
    def __init__(self) -> None:
        self.time = 100.0
        self.waits = 0
        self.marks = 0

    def synchronize(self) -> None:
        self.waits += 1

    def now(self) -> float:
        return self.time

    def mark(self) -> float:
        self.marks += 1
        return self.time

    def seconds(self, start: float, end: float) -> float:
        return end - start


class FakeMemory(CudaMemory):
    def __init__(self) -> None:
        self.samples = 0
        self.reads = 0
        self.restarts = 0

    def restart(self) -> None:
        self.restarts += 1

    def engine_ready(self) -> None:
        pass

    def sample(self) -> None:
        self.samples += 1

    def peaks(self) -> MemoryPeaks:
        self.reads += 1
        return MemoryPeaks(allocated=1, reserved=2, resident=3)


class Engine(torch.nn.Module):
    """Stub of DeepSpeed's engine; every phase takes a known time."""

    def __init__(self, clock: FakeClock, accumulation: int = 1) -> None:
        super().__init__()
        self.module = torch.nn.Linear(2, 1)
        self.clock = clock
        self.accumulation = accumulation
        self.micro_steps = 0
        self.failing = ""

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        self._take("forward", 1.0)
        return torch.tensor(0.5)

    def backward(self, loss: torch.Tensor) -> torch.Tensor:
        self._take("backward", 2.0)
        return loss

    def step(self) -> None:
        self._take("step", 0.25)
        self.micro_steps += 1

    def is_gradient_accumulation_boundary(self) -> bool:
        return (self.micro_steps + 1) % self.accumulation == 0

    def _take(self, phase: str, seconds: float) -> None:
        if self.failing == phase:
            raise RuntimeError(phase)
        self.clock.time += seconds


class PipelineEngine:
    def __init__(self, clock: FakeClock) -> None:
        self.module = torch.nn.Linear(2, 1)
        self.clock = clock

    def train_batch(self) -> torch.Tensor:
        for _ in range(3):
            self.module(torch.ones(4, 2))
            self.clock.time += 1.0
        return torch.tensor(0.5)


class MeterBench:
    """A meter on an engine, with everything it recorded."""

    def __init__(self, engine: Callable[[FakeClock], Any], profiler: Any = None) -> None:
        self.clock = FakeClock()
        self.memory = FakeMemory()
        self.state = RankState(phase="script")
        self.events: list[Event] = []
        self.left = 0
        self.engine = engine(self.clock)
        self.meter = Meter(
            self.engine,
            rank=3,
            write=self.events.append,
            clock=self.clock,
            memory=self.memory,
            state=self.state,
            last_step=2,
            exit_process=self._exit,
            profiler=profiler,
        )
        self.meter.attach()

    def _exit(self) -> None:
        self.left += 1

    @property
    def steps(self) -> list[StepMeasured]:
        return [event for event in self.events if isinstance(event, StepMeasured)]

    def micro_step(self, batch: Any = None, data_s: float = 0.0) -> None:
        self.clock.time += data_s
        loss = self.engine(torch.ones(4, 2) if batch is None else batch)
        self.engine.backward(loss)
        self.engine.step()
