"""Measures the optimizer steps of a DeepSpeed engine by wrapping its methods on the instance.

A step ends at a gradient-accumulation boundary. Steps are counted here, from 1. Steps that the loss scaler skipped are
recorded but not counted: the launch runs an additional step for each, up to ``MOST_SKIPPED_STEPS``. Forward passes in
evaluation mode or without gradients do not count as training; their time between the phases is recorded separately,
from the start of evaluation mode to the last of them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.events import Event, StepMeasured
from optuna_dsat.runtime.failure import diagnose, exception_chain
from optuna_dsat.runtime.imports import patch
from optuna_dsat.runtime.measure.engine import (
    MOST_SKIPPED_STEPS,
    Clock,
    SkipDetector,
    global_steps,
    is_pipeline,
    is_update_step,
    loss_of,
    sequence_shards,
)
from optuna_dsat.runtime.measure.inputs import InputSize, micro_batches, size_of
from optuna_dsat.runtime.measure.live import Transition, forget_shapes
from optuna_dsat.runtime.measure.memory import CpuMemory, CudaMemory
from optuna_dsat.runtime.measure.profiler import Profiler
from optuna_dsat.runtime.user_code import Place, places_of

_COUNTED = "_counted_by_optuna_dsat"
"""Attribute of a counted error."""


@dataclass
class RankState:
    """Current state of this rank; updated by hook and meter, read when the rank fails."""

    phase: str = "script"
    """See ``RankFailed.phase``."""
    steps: int = 0
    """Global steps completed, without steps that the loss scaler skipped."""
    skipped: int = 0
    """Global steps that the loss scaler skipped."""
    updates: int = 0
    """Steps of the measured engines in all trials of the launch, and between them."""
    allocation_failures: int = 0
    """Out-of-memory errors of the current trial, which the script may have caught."""
    host_allocation_failures: int = 0
    """The same of the host's memory, where the device is a GPU."""
    saves: list[str] = field(default_factory=list)
    """Methods of each checkpoint that the current trial skipped."""
    steps_completed: int | None = None
    """Batches completed, as counted by the script around its current step; None if not reported."""
    device: str = ""
    """``cuda`` or ``cpu``; empty before DeepSpeed was imported."""
    limited: bool = False
    """Whether this rank's host memory is limited."""
    script_facts: dict[str, Any] = field(default_factory=dict)
    """Fields of ``EngineReady`` that the runtime has found out about the script."""
    if_failed: list[Event] = field(default_factory=list)
    """Events to write only if this rank fails before it trains."""
    fed: int = 0
    """Number of training inputs of the engine or its module."""
    fed_size: int = 0
    """Samples of the largest input."""
    fed_from: Sequence[Place] = ()
    """Places in the user's code that led to the first input, innermost first."""

    def has_measured(self, last_step: int) -> bool:
        """Return whether a launch up to ``last_step`` ends here, perhaps as the script skips each batch that fails."""
        lost = 0 if self.steps else self.allocation_failures + self.host_allocation_failures
        return self.steps >= last_step or max(self.skipped, lost) >= MOST_SKIPPED_STEPS

    def restart(self) -> None:
        """Forget what is counted per trial."""
        self.steps = self.skipped = self.allocation_failures = self.host_allocation_failures = 0
        self.saves.clear()

    def note_error(self, error: BaseException) -> None:
        """Count an error that means out of memory, once; also an allocator's ``RuntimeError``, by its message."""
        outcome = diagnose(error, phase=self.phase, device=self.device, limited=self.limited).outcome
        if outcome in (Outcome.OUT_OF_MEMORY, Outcome.HOST_OUT_OF_MEMORY):
            is_new = not any(hasattr(link, _COUNTED) for link in exception_chain(error))
            self.allocation_failures += is_new and outcome is Outcome.OUT_OF_MEMORY
            self.host_allocation_failures += is_new and outcome is Outcome.HOST_OUT_OF_MEMORY
            setattr(error, _COUNTED, True)


@dataclass
class _Step:
    """Measurements of the current step."""

    spans: list[tuple[str, Any, Any]] = field(default_factory=list)
    """(phase, start mark, end mark)."""
    fed: InputSize = field(default_factory=lambda: InputSize(samples=0))
    """All inputs."""
    micro_batch: int | None = None
    """Largest leading dimension of an input; None if not observed."""
    passes_back: int = 0
    """Backward passes of the engine; micro-batches of a pipeline engine, whose phases are not observed."""
    passes: list[InputSize] = field(default_factory=list)
    """Inputs of the engine since the last backward pass."""
    direct: list[InputSize] = field(default_factory=list)
    """Inputs passed directly to its module since the last backward pass."""
    by_script: bool = False
    """Whether the script called ``optimizer.step()`` directly."""
    loss: Any = None
    """Loss tensor of the last micro-batch; None if not observed."""
    forward_end: Any = None
    """Mark at the end of the last forward; None after the following backward."""
    evaluation_s: float = 0.0
    """Duration of completed evaluation intervals."""


class Meter:
    """Wraps ``forward``, ``backward`` and ``step`` of an engine, or ``train_batch`` of a pipeline engine.

    Overhead per step: two marks per phase, one device synchronization and one line in the event file. A pipeline
    engine's schedule interleaves its phases; they are reported as 0. Scripts that drive the engine in another way mark
    their micro-batches with ``micro_batch``.

    After ``last_step``, not counting skipped steps, ``exit_process`` ends the script with an exception; again if the
    script catches it and continues training. ``size_of`` returns the size of a forward pass's inputs, ``sized`` its
    arguments in the trial's batch size.
    """

    def __init__(
        self,
        engine: Any,
        *,
        rank: int,
        write: Callable[[Event], None],
        clock: Clock,
        memory: CpuMemory | CudaMemory,
        state: RankState,
        last_step: int,
        exit_process: Callable[[], None],
        profiler: Profiler | None = None,
        size_of: Callable[[Any], InputSize | None] = size_of,
        sized: Callable[[Any, Any], tuple[Any, Any]] = lambda args, kwargs: (args, kwargs),
    ) -> None:
        self._engine = engine
        self._rank = rank
        self._write = write
        self._clock = clock
        self._memory = memory
        self._state = state
        self._unproven: InputSize | None = None
        self._fed_in_training = False
        self._drawn = 0
        self._trains_in_eval_mode = False
        self._last_step = last_step
        self._exit_process = exit_process
        self._profiler = profiler
        self._size_of = size_of
        self._sized = sized
        self._skips = SkipDetector(engine)
        self._step = _Step()
        self.transition = Transition()
        """Steps between two trials, which are not recorded."""
        self._boundary_s = clock.now()
        self._in_forward = False
        self._module_hooked = False
        self._evaluation: tuple[float, float] | None = None
        """Start of the current evaluation interval and end of its last forward; None outside of evaluation."""
        self._end_observation: Callable[[], None] | None = None
        """Ends the current observation of a whole micro-batch; None outside of such an observation."""
        self._undo: list[Callable[[], None]] = []

    def __deepcopy__(self, _: Any) -> Meter:
        """Return itself: a script may copy the module with its hooks, for a moving average of the parameters."""
        return self

    def attach(self) -> None:
        """Start measuring; the first step's latency counts from this call."""
        if is_pipeline(self._engine):
            hook = self._engine.module.register_forward_pre_hook(self._on_pipeline_input, with_kwargs=True)
            self._undo.append(hook.remove)
            self._undo.append(patch(self._engine, "train_batch")(self._train_batch))
            if hasattr(self._engine, "eval_batch"):
                self._undo.append(patch(self._engine, "eval_batch")(self._evaluate))
        else:
            wrapped = {"forward": self._forward, "backward": self._backward, "step": self._engine_step}
            wrapped["eval"] = wrapped["train"] = self._leave_training
            self._undo += [patch(self._engine, name)(method) for name, method in wrapped.items()]
            optimizer = getattr(self._engine, "optimizer", None)
            if getattr(optimizer, "step", None) is not None:
                self._undo.append(patch(optimizer, "step", is_method=True)(self._optimizer_step))
            self._hook_module_input()
        self._state.phase = "between"
        self._boundary_s = self._clock.completed()

    def take_on(self, *, last_step: int) -> None:
        """Measure from the next step on for another trial, up to its last step."""
        self._profiler = None
        self._last_step = last_step
        self._boundary_s = self._clock.completed()

    def detach(self) -> None:
        """Stop measuring and restore the engine's methods."""
        while self._undo:
            self._undo.pop()()
        self._state.phase = "between"

    def _evaluate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._evaluation_begins()
        result = original(*args, **kwargs)
        self._evaluation_continues()
        return result

    def _leave_training(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Have an evaluation interval begin before its first forward: a loader's workers may start before that."""
        was_training = self._engine.module.training
        result = original(*args, **kwargs)
        if was_training and not self._engine.module.training:
            self._evaluation_begins()
        return result

    def _evaluation_begins(self) -> None:
        """Start an evaluation interval at a forward outside of training, unless already started."""
        if self._state.phase == "between" and self._evaluation is None:
            now = self._clock.completed()
            self._evaluation = now, now

    def _evaluation_continues(self) -> None:
        """Extend the evaluation interval to the end of a forward."""
        if self._evaluation is not None:
            self._evaluation = self._evaluation[0], self._clock.completed()

    def _close_evaluation(self) -> None:
        """End the current evaluation interval, if any, at its last forward: training continues."""
        if self._evaluation is not None:
            start, end = self._evaluation
            self._step.evaluation_s += end - start
            self._evaluation = None

    def _forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._is_training():
            self._note_unproven((args, kwargs))
            return self._evaluate(original, *args, **kwargs)
        args, kwargs = self._sized(args, kwargs)
        fed = self._fed_sizes((args, kwargs))
        self._in_forward = True
        try:
            with self._phase("forward"):
                output = original(*args, **kwargs)
        finally:
            self._in_forward = False
        self._step.passes += fed  # not of a failed pass, which the script may have caught
        self._step.forward_end, self._step.loss = self._step.spans[-1][2], loss_of(output)
        return output

    def _backward(self, original: Callable[..., Any], loss: Any, *args: Any, **kwargs: Any) -> Any:
        self._prove_training()
        passes, self._step.passes = self._step.passes, []
        if not (passes or self._step.direct) and (size := self._size_of(())) and size.drawn > self._drawn:
            self._note_feeding(size)  # by a method of the module
            passes = [size]
        with self._phase("backward"):
            result = original(loss, *args, **kwargs)
        self._step.passes_back += 1
        self._close_inputs(*passes)
        self._step.forward_end = None
        self._step.loss = loss_of(loss)
        return result

    def _engine_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._prove_training()
        self._close_backward()
        boundary = is_update_step(self._engine)
        with self._phase("step"):
            result = original(*args, **kwargs)
        if boundary:
            self._finish_step()
        return result

    def _optimizer_step(self, original: Callable[..., Any], _: Any, *args: Any, **kwargs: Any) -> Any:
        """Count updates of scripts that call ``optimizer.step()`` instead of ``engine.step()`` (Lightning Fabric)."""
        if self._state.phase != "between":
            return original(*args, **kwargs)  # the engine's own call
        self._prove_training()
        self._close_backward()
        with self._phase("step"):
            result = original(*args, **kwargs)
        self._step.by_script = True
        self._finish_step()
        return result

    def _close_backward(self) -> None:
        self._close_inputs()
        if self._step.forward_end is not None:
            # The script called loss.backward(): the time between forward and step counts as backward.
            self._step.spans.append(("backward", self._step.forward_end, self._clock.mark()))
            self._step.forward_end = None

    def _train_batch(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._phase("batch"):
            loss = original(*args, **kwargs)
        self._step.loss = loss_of(loss)
        self._finish_step()
        return loss

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Measure forward, backward and step of a micro-batch, however the script calls them.

        Phases and steps observed by the wrapped methods are recorded as usual. If they observe none, the context is
        recorded as a ``batch`` phase, as for pipelines. The step then ends with the context in which the engine's
        ``global_steps`` increased, or with every context if the engine does not count steps.
        """
        self._hook_module_input()
        state, counted, spans = self._state, global_steps(self._engine), len(self._step.spans)
        ended = state.steps + state.skipped
        self._state.phase = "forward"
        start = self._clock.mark()
        with ExitStack() as observation:
            if self._profiler is not None:
                observation.enter_context(self._profiler.observe("batch", state.steps + 1))
                self._end_observation = observation.close
            yield
        self._end_observation = None
        self._state.phase = "between"
        self._close_inputs()
        if state.steps + state.skipped > ended:
            return
        if len(self._step.spans) == spans:
            self._step.spans.append(("batch", start, self._clock.mark()))
            self._memory.sample()
        if counted is None or global_steps(self._engine) != counted:
            self._finish_step()

    def _hook_module_input(self) -> None:
        if self._module_hooked or is_pipeline(self._engine):
            return
        self._module_hooked = True
        before = self._engine.module.register_forward_pre_hook(self._on_module_input, with_kwargs=True)
        after = self._engine.module.register_forward_hook(lambda *_: self._evaluation_continues())
        self._undo += [before.remove, after.remove]

    def _on_module_input(self, module: Any, args: Any, kwargs: Any) -> None:
        if self._in_forward or module is not self._engine.module:
            return
        if self._is_training():
            self._close_evaluation()
            self._step.direct += self._fed_sizes((args, kwargs))
        else:
            self._note_unproven((args, kwargs))
            self._evaluation_begins()

    def _on_pipeline_input(self, module: Any, args: Any, kwargs: Any) -> None:
        if module.training:
            self._step.passes_back += 1
            self._count(*self._fed_sizes((args, kwargs)))

    def _is_training(self) -> bool:
        if not sys.modules["torch"].is_grad_enabled():
            return False
        if self._engine.module.training:
            self._trains_in_eval_mode = False
        return bool(self._engine.module.training) or self._trains_in_eval_mode

    def _note_unproven(self, batch: Any) -> None:
        """Record an input in eval mode with gradients: counts as evaluation unless a backward pass follows."""
        if sys.modules["torch"].is_grad_enabled():
            self._unproven = self._size_of(batch)

    def _prove_training(self) -> None:
        """Count inputs in eval mode as training if a backward pass follows and no input came in train mode.

        ``from_pretrained`` returns models in eval mode; scripts that never call ``train()`` train in eval mode.
        """
        size, self._unproven = self._unproven, None
        if size is not None and not self._fed_in_training:
            self._trains_in_eval_mode = True
            self._evaluation = None
            self._note_feeding(size)
            self._count(size)
            self._drawn = size.drawn
        self._fed_in_training = False

    def _fed_sizes(self, batch: Any) -> list[InputSize]:
        """Record a training input; return its size in a list, empty if it is unknown."""
        self._fed_in_training = True
        size = self._size_of(batch)
        if size is None:
            return []
        self._note_feeding(size)
        return [size]

    def _note_feeding(self, size: InputSize) -> None:
        state = self._state
        state.fed += 1
        state.fed_size = max(state.fed_size, size.samples)
        if not state.fed_from:
            state.fed_from = places_of(sys._getframe(1))

    def _count(self, *sizes: InputSize) -> None:
        for size in sizes:
            self._step.fed += size
            self._step.micro_batch = max(size.samples, self._step.micro_batch or 0)

    def _close_inputs(self, *sizes: InputSize) -> None:
        """Count the inputs before a backward pass."""
        sizes, self._step.direct = (*sizes, *self._step.direct), []
        self._count(*micro_batches(sizes, drawn_before=self._drawn))
        self._drawn = max([self._drawn, *(size.drawn for size in sizes)])

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self._exit_if_measured()
        self._close_evaluation()
        # "batch" contains all three phases and starts with forward; failures are reported as forward.
        self._state.phase = "forward" if name == "batch" else name
        if self._end_observation is not None:  # the wrapped methods observe each phase separately
            self._end_observation()
            self._end_observation = None
        start = self._clock.mark()
        profiler = self._profiler
        try:
            with profiler.observe(name, self._state.steps + 1) if profiler else nullcontext():
                yield
        except Exception as error:
            self._state.note_error(error)
            raise
        self._step.spans.append((name, start, self._clock.mark()))
        self._memory.sample()
        self._state.phase = "between"

    def _finish_step(self) -> None:
        self._count(*self._step.passes)  # without a backward pass of the engine, there may have been several
        self._close_inputs()
        self._close_evaluation()
        now = self._clock.completed()
        step, self._step = self._step, _Step()
        latency_s, self._boundary_s = now - self._boundary_s, now
        state = self._state
        state.updates += 1
        skipped = self._skips.skipped(by_script=step.by_script)
        passes = step.passes_back or sum(name in ("forward", "batch") for name, *_ in step.spans)
        if self.transition.includes(step.micro_batch, passes, is_ambiguous=step.fed.is_ambiguous):
            forget_shapes(self._engine)
            self._memory.restart()
            return  # it is part of no trial
        state.skipped += skipped
        state.steps += not skipped
        seconds = {"forward": 0.0, "backward": 0.0, "step": 0.0, "batch": 0.0}
        for name, start, end in step.spans:
            seconds[name] += self._clock.seconds(start, end)
        peaks = self._memory.peaks()
        self._write(
            StepMeasured(
                rank=self._rank,
                time=time.time(),
                step=state.steps + state.skipped,
                latency_s=latency_s,
                forward_s=seconds["forward"],
                backward_s=seconds["backward"],
                step_s=seconds["step"],
                samples=step.fed.samples,
                observed_micro_batch=step.micro_batch,
                loss=None if step.loss is None else float(step.loss),
                peak_allocated_bytes=peaks.allocated,
                peak_reserved_bytes=peaks.reserved,
                rss_bytes=peaks.resident,
                evaluation_s=step.evaluation_s,
                skipped=skipped,
                skipped_before=state.skipped - skipped,
                elements=step.fed.elements * sequence_shards(self._engine),
                elements_are_tokens=step.fed.are_tokens,
                steps_completed=self._steps_completed(),
                is_ambiguous=step.fed.is_ambiguous,
                caught=state.allocation_failures + state.host_allocation_failures,
            )
        )
        if self._profiler is not None:
            if skipped:
                self._profiler.discard()
            else:
                self._profiler.boundary(state.steps, step.fed.samples)
        self._boundary_s = self._clock.now()  # recording a step is no part of the next
        self._exit_if_measured()

    def _exit_if_measured(self) -> None:
        if self._state.has_measured(self._last_step):
            self._exit_process()

    def _steps_completed(self) -> int:
        """Return the number of completed batches: the script's count, else the engine's, else the meter's."""
        state = self._state
        if state.steps_completed is not None:
            return state.steps_completed
        return max(global_steps(self._engine) or 0, state.steps + state.skipped)
