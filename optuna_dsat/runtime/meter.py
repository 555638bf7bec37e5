"""Measures the steps of one DeepSpeed engine, from outside: its methods are wrapped on the instance.

A step ends at a gradient-accumulation boundary, counted from 1 here: DeepSpeed's own counters leave out
nothing today, but schedulers and fp16 overflows act on them. What runs in evaluation mode, or without
gradients, is no training.
"""

from __future__ import annotations

import functools
import time
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from optuna_dsat.runtime.clock import Clock
from optuna_dsat.runtime.device_memory import MemoryProbe
from optuna_dsat.runtime.events import Event, StepMeasured

__all__ = ["Meter", "RankState", "StepObserver", "is_pipeline", "leading_dimension"]

_DEPTH = 4
"""How deep batches nest before a tensor is found; deeper ones count as not seen."""


@dataclass
class RankState:
    """Where this rank is; shared by hook and meter, read when it fails."""

    phase: str = "script"
    steps: int = 0
    device: str = ""
    limited: bool = False
    takes_local_rank: bool = False


class StepObserver(Protocol):
    """Looks closer at single steps: the profiler."""

    def observe(self, phase: str, step: int) -> Any:
        """Return a context manager around a phase (``forward``, ``backward``, ``batch``) of a step."""
        ...

    def boundary(self, step: int, samples: int) -> None:
        """A step is over, measured and recorded."""
        ...


@dataclass
class _Step:
    """What was seen of the step in progress."""

    spans: list[tuple[str, Any, Any]] = field(default_factory=list)
    samples: int = 0
    micro_batch: int | None = None
    loss: Any = None
    forward_end: Any = None
    """Mark of the last forward's end while no backward has followed."""


class Meter:
    """Wraps ``forward``, ``backward`` and ``step`` of an engine, or ``train_batch`` of a pipeline engine.

    Costs a step two marks per phase, one wait for the device and one line in the event file; nothing else is
    written or waited for. Phases of a pipeline engine are interleaved by its schedule and reported as 0.

    A script that reaches the engine in another way says with ``micro_batch`` where its steps are.

    Args:
        engine: What ``deepspeed.initialize`` returned.
        rank: Global rank, for the events.
        write: Records an event.
        clock: Measures.
        memory: Follows memory.
        state: Told of phases and steps.
        last_step: The step after which ``exit_process`` is called.
        exit_process: Ends this process; does not return.
        observer: Looks closer at single steps.
    """

    def __init__(
        self,
        engine: Any,
        *,
        rank: int,
        write: Callable[[Event], None],
        clock: Clock,
        memory: MemoryProbe,
        state: RankState,
        last_step: int,
        exit_process: Callable[[], None],
        observer: StepObserver | None = None,
    ) -> None:
        self._engine = engine
        self._rank = rank
        self._write = write
        self._clock = clock
        self._memory = memory
        self._state = state
        self._last_step = last_step
        self._exit_process = exit_process
        self._observer = observer
        self._step = _Step()
        self._boundary_s = clock.now()
        self._in_forward = False
        self._module_hooked = False
        self._end_observation: Callable[[], None] | None = None
        """Ends the observation of a whole micro-batch, where one is under way."""

    def attach(self) -> None:
        """Start measuring; the first step counts from now."""
        if is_pipeline(self._engine):
            self._engine.module.register_forward_pre_hook(self._on_pipeline_input, with_kwargs=True)
            self._engine.train_batch = self._wrap_train_batch(self._engine.train_batch)
        else:
            self._engine.forward = self._wrap_forward(self._engine.forward)
            self._engine.backward = self._wrap_backward(self._engine.backward)
            self._engine.step = self._wrap_step(self._engine.step)
            self._wrap_optimizer_step()
        self._state.phase = "between"
        self._clock.synchronize()
        self._boundary_s = self._clock.now()

    def _wrap_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self._is_training():
                return original(*args, **kwargs)
            self._count_samples((args, kwargs))
            self._in_forward = True
            try:
                with self._phase("forward"):
                    output = original(*args, **kwargs)
            finally:
                self._in_forward = False
            self._step.forward_end = self._step.spans[-1][2]
            self._step.loss = _scalar(output)
            return output

        return forward

    def _wrap_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def backward(loss: Any, *args: Any, **kwargs: Any) -> Any:
            with self._phase("backward"):
                result = original(loss, *args, **kwargs)
            self._step.forward_end = None
            self._step.loss = _scalar(loss)
            return result

        return backward

    def _wrap_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(*args: Any, **kwargs: Any) -> Any:
            self._close_backward()
            boundary = _is_update_step(self._engine)
            with self._phase("step"):
                result = original(*args, **kwargs)
            if boundary:
                self._finish_step()
            return result

        return step

    def _wrap_optimizer_step(self) -> None:
        """Count the updates of a script that steps the optimizer itself, past the engine: Lightning Fabric does."""
        optimizer = getattr(self._engine, "optimizer", None)
        original = getattr(optimizer, "step", None)
        if optimizer is None or original is None:
            return

        @functools.wraps(original)
        def step(_: Any, *args: Any, **kwargs: Any) -> Any:
            if self._state.phase != "between":
                return original(*args, **kwargs)  # the engine's own call
            self._close_backward()
            with self._phase("step"):
                result = original(*args, **kwargs)
            self._finish_step()
            return result

        optimizer.step = types.MethodType(step, optimizer)  # bound, as torch's schedulers want it

    def _close_backward(self) -> None:
        if self._step.forward_end is not None:
            # The script called loss.backward(): what lies between forward and step stands for it.
            self._step.spans.append(("backward", self._step.forward_end, self._clock.mark()))
            self._step.forward_end = None

    def _wrap_train_batch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def train_batch(*args: Any, **kwargs: Any) -> Any:
            with self._phase("batch"):
                loss = original(*args, **kwargs)
            self._step.loss = _scalar(loss)
            self._finish_step()
            return loss

        return train_batch

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Around forward, backward and step of one micro-batch, however the script calls them.

        What the wrapped methods see within is theirs, be it one phase or many steps. A step that they do not see
        ends here once the engine has counted one; it is one ``batch``, as a pipeline's.
        """
        self._hook_module_input()
        steps, counted, spans = self._state.steps, _global_steps(self._engine), len(self._step.spans)
        self._state.phase = "forward"
        start = self._clock.mark()
        with ExitStack() as observation:
            if self._observer is not None:
                observation.enter_context(self._observer.observe("batch", steps + 1))
                self._end_observation = observation.close
            yield
        self._end_observation = None
        self._state.phase = "between"
        if self._state.steps > steps:
            return
        if len(self._step.spans) == spans:
            self._step.spans.append(("batch", start, self._clock.mark()))
            self._memory.sample()
        if counted is None or _global_steps(self._engine) != counted:
            self._finish_step()

    def _hook_module_input(self) -> None:
        if self._module_hooked or is_pipeline(self._engine):
            return
        self._module_hooked = True
        self._engine.module.register_forward_pre_hook(self._on_module_input, with_kwargs=True)

    def _on_module_input(self, _module: Any, args: Any, kwargs: Any) -> None:
        if not self._in_forward and self._is_training():
            self._count_samples((args, kwargs))

    def _on_pipeline_input(self, module: Any, args: Any, kwargs: Any) -> None:
        if module.training:
            self._count_samples((args, kwargs))

    def _is_training(self) -> bool:
        import torch

        return bool(self._engine.module.training) and torch.is_grad_enabled()

    def _count_samples(self, batch: Any) -> None:
        size = leading_dimension(batch)
        if size is not None:
            self._step.samples += size
            self._step.micro_batch = max(size, self._step.micro_batch or 0)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        # "batch" holds all three phases: a failure in it is reported as one of the forward pass, where it
        # starts.
        self._state.phase = "forward" if name == "batch" else name
        if self._end_observation is not None:  # the phases are seen one by one: each is observed for itself
            self._end_observation()
            self._end_observation = None
        start = self._clock.mark()
        if self._observer is None:
            yield
        else:
            with self._observer.observe(name, self._state.steps + 1):
                yield
        self._step.spans.append((name, start, self._clock.mark()))
        self._memory.sample()
        self._state.phase = "between"

    def _finish_step(self) -> None:
        self._clock.synchronize()
        now = self._clock.now()
        step, self._step = self._step, _Step()
        latency_s, self._boundary_s = now - self._boundary_s, now
        self._state.steps += 1
        seconds = {"forward": 0.0, "backward": 0.0, "step": 0.0, "batch": 0.0}
        for name, start, end in step.spans:
            seconds[name] += self._clock.seconds(start, end)
        peaks = self._memory.peaks()
        self._write(
            StepMeasured(
                rank=self._rank,
                time=time.time(),
                step=self._state.steps,
                latency_s=latency_s,
                forward_s=seconds["forward"],
                backward_s=seconds["backward"],
                step_s=seconds["step"],
                samples=step.samples,
                observed_micro_batch=step.micro_batch,
                loss=None if step.loss is None else float(step.loss),
                peak_allocated_bytes=peaks.allocated,
                peak_reserved_bytes=peaks.reserved,
                rss_bytes=peaks.resident,
            )
        )
        if self._observer is not None:
            self._observer.boundary(self._state.steps, step.samples)
        if self._state.steps >= self._last_step:
            self._exit_process()


def leading_dimension(batch: Any, depth: int = _DEPTH) -> int | None:
    """Return the leading dimension of the first tensor in a batch, None where none is seen.

    Args:
        batch: A tensor, or sequences and mappings of them (a ``BatchEncoding`` is a mapping).
        depth: Levels of nesting still looked into.
    """
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) > 0 else None
    if depth == 0:
        return None
    if isinstance(batch, Mapping):
        items: Any = batch.values()
    elif isinstance(batch, list | tuple):
        items = batch
    else:
        return None
    sizes = (leading_dimension(item, depth - 1) for item in items)
    return next((size for size in sizes if size is not None), None)


def is_pipeline(engine: Any) -> bool:
    """Return whether an engine is a pipeline engine, whose ``train_batch`` does a whole step."""
    return any(cls.__name__ == "PipelineEngine" for cls in type(engine).__mro__)


def _global_steps(engine: Any) -> int | None:
    """Return the engine's own count of optimizer steps, None where it keeps none."""
    count = getattr(engine, "global_steps", None)
    return count if isinstance(count, int) else None


def _is_update_step(engine: Any) -> bool:
    """Return whether the coming ``engine.step()`` is one that updates the parameters."""
    managed = getattr(engine, "managed_gradient_accumulation", None)
    if managed is not None and not managed():
        return True  # the script accumulates by itself: every step() is an update
    return bool(engine.is_gradient_accumulation_boundary())


def _scalar(output: Any) -> Any:
    """Return the loss in a model's output (itself or its ``loss``) without its graph, None without one."""
    loss = getattr(output, "loss", output)
    if hasattr(loss, "detach") and getattr(loss, "numel", lambda: 0)() == 1:
        return loss.detach()
    return None
