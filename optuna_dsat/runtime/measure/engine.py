"""Which engine of a script is measured: the first that it makes, unless that does not train.

A script of reinforcement learning or preference optimisation may make the engine of a reference model first, which
never steps, and one that trains folds or rounds makes an engine for each. The first engine counts until another one
makes two updates while it makes none, if it has made none at all, or if the other was made after it had begun to train.
Two models that train together, as those of a GAN, are made before either trains: the first that steps stays measured.

An engine whose optimizer the script steps itself (Lightning Fabric) takes no other's place.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from optuna_dsat.runtime.measure.memory import (
    process_limit_lifted,
)

__all__ = [
    "MOST_SKIPPED_STEPS",
    "SHM_OPERATOR",
    "UPDATES_ALONE",
    "OtherEngine",
    "SkipDetector",
    "compile_without_limit",
    "global_steps",
    "import_dependencies_of_initialize",
    "is_engine",
    "is_pipeline",
    "is_update_step",
    "loss_of",
    "replace_method",
]


def is_pipeline(engine: Any) -> bool:
    """Return whether an engine is a pipeline engine, whose ``train_batch`` runs a whole step."""
    return any(cls.__name__ == "PipelineEngine" for cls in type(engine).__mro__)


def global_steps(engine: Any) -> int | None:
    """Return the engine's own count of optimizer steps, with those of a loaded checkpoint; None if it keeps none."""
    count = getattr(engine, "global_steps", None)
    return count if isinstance(count, int) else None


def is_update_step(engine: Any) -> bool:
    """Return whether the next ``engine.step()`` updates the parameters."""
    managed = getattr(engine, "managed_gradient_accumulation", None)
    if managed is not None and not managed():
        return True  # the script accumulates gradients itself: every step() is an update
    return bool(engine.is_gradient_accumulation_boundary())


def loss_of(output: Any) -> Any:
    """Return the detached loss of a model's output (the output itself or its ``loss``); None if there is none."""
    loss = getattr(output, "loss", output)
    if hasattr(loss, "detach") and getattr(loss, "numel", lambda: 0)() == 1:
        return loss.detach()
    return None


UPDATES_ALONE = 2
"""Updates of another engine in a row at which it is the one that trains."""


def replace_method(
    owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[], None]:
    """Replace a method on an object by what ``wrap`` makes of it; return a function that puts it back."""
    own = vars(owner).get(name)
    setattr(owner, name, wrap(getattr(owner, name)))

    def undo() -> None:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)

    return undo


class OtherEngine:
    """Watches the updates of an engine beside the measured one.

    Args:
        engine: What ``deepspeed.initialize`` returned.
        measured: Returns how many updates the measured engine has made.
        takes_over: Called once this engine is the one that trains; it is not watched any more then.
    """

    def __init__(self, engine: Any, *, measured: Callable[[], int], takes_over: Callable[[], None]) -> None:
        self._measured = measured
        self._takes_over = takes_over
        self._seen = measured()
        self._is_later = self._seen > 0
        self._alone = 0
        self._unwatch = replace_method(engine, "train_batch" if is_pipeline(engine) else "step", self._wrap)
        self._engine = engine

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(*args: Any, **kwargs: Any) -> Any:
            updates = is_pipeline(self._engine) or is_update_step(self._engine)
            result = original(*args, **kwargs)
            if updates:
                self._updated()
            return result

        return step

    def _updated(self) -> None:
        done = self._measured()
        self._alone = 1 if done != self._seen else self._alone + 1
        self._seen = done
        if self._alone >= UPDATES_ALONE and (done == 0 or self._is_later):
            self._unwatch()
            self._takes_over()


MOST_SKIPPED_STEPS = 33
"""Skipped steps after which a launch goes on no longer: from 2^32, the largest initial scale that DeepSpeed's defaults
have had, a scaler with a hysteresis of 2 needs 33 to arrive at 1."""


class SkipDetector:
    """Tells whether the engine's last update was skipped.

    DeepSpeed counts the steps that its own scaler skipped (fp16, and non-finite gradients with bf16); at ZeRO 0 with
    ``torch_autocast`` the scaler is torch's, which lowers its scale whenever it skips.

    Args:
        engine: What ``deepspeed.initialize`` returned.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._counted = self._count()
        self._scale = self._torch_scale()

    def skipped(self, *, by_script: bool) -> bool:
        """Return whether the update that has just ended was skipped; called once per update.

        Args:
            by_script: Whether the script stepped the optimizer itself, which the engine then does not count.
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
    """Return whether an object has what is used of a DeepSpeed engine."""
    needed = ("module", "train_micro_batch_size_per_gpu", "zero_optimization_stage")
    return all(hasattr(candidate, name) for name in needed)


def compile_without_limit() -> None:
    """Make DeepSpeed build its operators without the memory limit, which compilers inherit and exceed."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    build = OpBuilder.jit_load

    @functools.wraps(build)
    def jit_load(self: Any, *args: Any, **kwargs: Any) -> Any:
        with process_limit_lifted():
            return build(self, *args, **kwargs)

    OpBuilder.jit_load = jit_load


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
