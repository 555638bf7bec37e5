"""The measured engine of a script and its clock: the first engine created, unless it does not train.

Scripts for reinforcement learning or preference optimization may first create the engine of a reference model, which
never steps; scripts that train folds or rounds create an engine for each. Another engine replaces the measured engine
after two updates in a row without an update of the measured engine, if the measured engine has never made an update, or
if the other engine was created after the measured engine had begun to train. Models that train together, as in a GAN,
are created before either trains: the first engine that steps remains measured.

An engine whose optimizer is stepped directly by the script (Lightning Fabric) never replaces the measured engine.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping
from time import perf_counter  # the function itself: a script may replace it in the module
from typing import Any

from optuna_dsat.runtime.imports import patch
from optuna_dsat.runtime.measure.memory import process_limit_lifted


def data_parallel_size(config: Any) -> int:
    """Return for how many ranks the global batch counts samples: ``dp_world_size`` may be None (Ulysses)."""
    return int(config.world_size)  # not from the accumulation steps, which ZenFlow replaces afterwards


def sequence_shards(engine: Any) -> int:
    """Return among how many ranks the sequence of a sample is split (DeepSpeed Ulysses); 1 if it is not."""
    return int(getattr(engine, "sequence_parallel_size", 1))


def is_pipeline(engine: Any) -> bool:
    """Return whether an engine is a pipeline engine, whose ``train_batch`` runs a whole step."""
    return any(cls.__name__ == "PipelineEngine" for cls in type(engine).__mro__)


def micro_batches_in_flight(engine: Any) -> int:
    """Return the number of micro-batches whose activations a rank holds at once: several on early pipeline stages.

    A stage starts as many before its first backward pass as there are stages from it on, unless a step has fewer
    (``deepspeed.runtime.pipe.schedule.TrainSchedule``).
    """
    return int(engine.num_stages - engine.stage_id) if is_pipeline(engine) else 1


def global_steps(engine: Any) -> int | None:
    """Return the engine's optimizer step count, including steps of a loaded checkpoint; None without a count."""
    count = getattr(engine, "global_steps", None)
    return count if isinstance(count, int) else None


def is_update_step(engine: Any) -> bool:
    """Return whether the next ``engine.step()`` updates the parameters."""
    managed = getattr(engine, "managed_gradient_accumulation", None)
    if managed is not None and not managed():
        return True  # the script accumulates gradients itself: every step() is an update
    return bool(engine.is_gradient_accumulation_boundary())


def loss_of(output: Any) -> Any:
    """Return the detached loss of a model's output (the output itself or its ``loss``), or None."""
    with contextlib.suppress(Exception):  # objects of the script may raise anything for an attribute that is missing
        loss = getattr(output, "loss", output)
        return loss.detach() if loss.numel() == 1 else None
    return None


UPDATES_ALONE = 2
"""Consecutive updates after which another engine counts as the training engine."""


class OtherEngine:
    """Observer of the updates of an engine that is not measured.

    ``takes_over`` is called once this engine counts as the training engine, compared with the number of updates of the
    ``measured`` engine; the observation then ends.
    """

    def __init__(self, engine: Any, *, measured: Callable[[], int], takes_over: Callable[[], None]) -> None:
        self._measured = measured
        self._takes_over = takes_over
        self._seen = measured()
        self._is_later = self._seen > 0
        self._alone = 0
        self._unwatch = patch(engine, "train_batch" if is_pipeline(engine) else "step")(self._step)
        self._engine = engine

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        updates = is_pipeline(self._engine) or is_update_step(self._engine)
        result = original(*args, **kwargs)
        if updates:
            self._updated()
        return result

    def _updated(self) -> None:
        done = self._measured()
        self._alone = 1 if done != self._seen else self._alone + 1
        self._seen = done
        if self._alone >= UPDATES_ALONE and (done == 0 or self._is_later):
            self._unwatch()
            self._takes_over()


MOST_SKIPPED_STEPS = 33
"""Skipped steps after which a launch ends: a scaler with a hysteresis of 2 needs 33 steps from 2^32, the largest
initial scale that DeepSpeed's defaults have had, down to 1."""


class SkipDetector:
    """Detector of skipped updates.

    DeepSpeed counts steps that its own scaler skipped; torch's, at ZeRO 0 with ``torch_autocast``, lowers its scale.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._counted = self._count()
        self._scale = self._torch_scale()

    def skipped(self, *, by_script: bool) -> bool:
        """Return whether the latest update was skipped; call once per update.

        The engine does not count updates ``by_script``, which calls ``optimizer.step()`` directly.
        """
        counted, self._counted = self._counted, self._count()
        scale, self._scale = self._scale, self._torch_scale()
        if by_script:
            return bool(getattr(self._engine.optimizer, "overflow", False))
        return self._counted > counted or self._scale < scale

    def _count(self) -> int:
        count = getattr(self._engine, "skipped_steps", 0)
        return count if isinstance(count, int) else 0

    def _torch_scale(self) -> float:
        scaler = getattr(self._engine, "torch_autocast_z0_gradscaler", None)
        return 0.0 if scaler is None else float(scaler.get_scale())


SHM_OPERATOR = "deepspeed_shm_comm"


def is_engine(candidate: Any) -> bool:
    """Return whether an object has the attributes of a DeepSpeed engine that this package uses."""
    needed = ("module", "train_micro_batch_size_per_gpu", "zero_optimization_stage")
    return all(hasattr(candidate, name) for name in needed)


def compile_without_limit() -> None:
    """Make DeepSpeed build its operators without the memory limit, which compilers inherit and exceed."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    @patch(OpBuilder, "jit_load")
    def jit_load(original: Any, *args: Any, **kwargs: Any) -> Any:
        with process_limit_lifted():
            return original(*args, **kwargs)


def import_dependencies_of_initialize(overlay: Mapping[str, Any]) -> None:
    """Import modules that ``deepspeed.initialize`` would import, so that CPU limit and peak do not count them.

    Measured with DeepSpeed 0.19.8 at ZeRO 3: of the 121 MiB that initialize adds to ``VmData``, 25 remain.
    """
    names = ["torch._dynamo"]
    zero = overlay.get("zero_optimization")
    if isinstance(zero, Mapping) and zero.get("stage", 0) > 0:
        names.append("deepspeed.runtime.zero.muon.original_muon")
    for name in names:
        with contextlib.suppress(ImportError):  # other versions of DeepSpeed lack the module
            importlib.import_module(name)


class Clock:
    """Clock of devices that execute synchronously (the CPU)."""

    def synchronize(self) -> None:
        """Wait until the device has completed all queued work."""

    def now(self) -> float:
        """Return the host's monotonic time in seconds."""
        return perf_counter()

    def completed(self) -> float:
        """Return the time at which the device has completed all queued work."""
        self.synchronize()
        return self.now()

    def mark(self) -> Any:
        """Return a timestamp in the device's work queue, without waiting for the device."""
        return perf_counter()

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks; valid only after ``synchronize``."""
        return float(end - start)


class DeviceClock(Clock):
    """Clock of devices that execute asynchronously: phases are timed by events on the device's current stream.

    Synchronizing after every phase would change the measurement: the host could not run ahead. It is done once per
    step.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def synchronize(self) -> None:
        """Wait for the device."""
        self._accelerator.synchronize()

    def mark(self) -> Any:
        """Record an event on the current stream."""
        event = self._accelerator.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two events on the device."""
        return float(start.elapsed_time(end)) / 1000.0
