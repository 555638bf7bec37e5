"""Activation checkpointing of a model whose script does not offer it, or has it on.

The forward pass of a checkpointed block keeps its inputs alone; the backward pass computes the rest again. A Hugging
Face model does it by its own method. Of other models the ``forward`` of the repeated blocks is replaced: modules,
parameters and their names stay, unlike with torch's ``checkpoint_wrapper``, which renames modules in
``named_parameters()``. It must happen before the engine is built, since ZeRO 3 hooks the children of blocks and then
gathers their weights for the second forward pass too.

Models for which the second forward pass may differ are refused (``runtime/measure/blocks.py``). The script's own
checkpointing is switched off: flags of the model, as transformers, diffusers and timm have, and calls of
``torch.utils.checkpoint`` and ``deepspeed.checkpointing``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from optuna_dsat.runtime.adapt.ranks import bind_cores
from optuna_dsat.runtime.imports import patch
from optuna_dsat.runtime.measure.blocks import (
    DEEPSPEED_CHECKPOINT,
    TORCH_CHECKPOINT,
    ForwardCheck,
    compiled_by_script,
    library_model,
    own_switches,
    reason_against,
    repeated_blocks,
)
from optuna_dsat.runtime.overlay import BIND_CORES, CHECKPOINT_EVERY, COMPILE


class CheckpointingError(ValueError):
    """The activations of a model cannot be checkpointed; the message has the reason."""


def checkpoint_blocks(model: Any, every: int = 1) -> Any:
    """Checkpoint the activations of a model's repeated blocks, in place; call it before ``deepspeed.initialize``.

    Losses and gradients stay the same, with dropout too: the state of torch's random number generators is restored for
    the second forward pass. Blocks that draw from another generator train differently. Names and types of modules and
    parameters stay. ``every`` is 1 for every block, 2 for every second block, and so on.

    Returns:
        The model.

    Raises:
        CheckpointingError: If it cannot be right, such as for blocks with BatchNorm or fewer than two repeated blocks;
            the reason may show in the first forward pass only.
        ValueError: If ``every`` is below 1.
    """
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every is {every!r}; write 1 for every block, 2 for every second block.")
    reason = reason_against(model)
    library = library_model(model)
    if not reason and library is not None and every > 1 and not hasattr(library, "activation_checkpointing_enable"):
        reason = "this version of transformers checkpoints every block or none"
    if reason:
        raise CheckpointingError(f"Activations are not checkpointed: {reason}.")
    if library is None:
        for block in repeated_blocks(model)[::every]:
            block.forward = _CheckpointedForward(block)
    elif every > 1:
        library.activation_checkpointing_enable({"use_reentrant": False}, every_n_layers=every)
    elif hasattr(library, "activation_checkpointing_enable"):
        library.activation_checkpointing_enable({"use_reentrant": False})
    else:
        library.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _checkpoint(model: Any, every: int, on_switched_off: Callable[[], None]) -> None:
    """Checkpoint a model's blocks as asked, instead of as the script does, which is called back if it does."""
    for module, name in own_switches(model):
        setattr(module, name, type(getattr(module, name))())
        on_switched_off()
    if library_model(model) is None or not every:  # a library's method calls torch.utils.checkpoint, too
        _switch_calls_off(on_switched_off)
    if every:
        checkpoint_blocks(model, every)


def _switch_calls_off(on_call: Callable[[], None]) -> None:
    """Have functions that the script checkpoints run without; scripts may have imported ``checkpoint`` by its name."""
    for name in (TORCH_CHECKPOINT, DEEPSPEED_CHECKPOINT):
        module: Any = sys.modules.get(name)
        if hasattr(module, "CheckpointFunction"):

            @patch(module.CheckpointFunction, "apply")
            def run(_: Any, function: Any, outputs: Any, *args: Any) -> Any:
                on_call()
                result = function(*args)
                if isinstance(outputs, list):  # DeepSpeed's function returns them by this list
                    outputs.extend(result if isinstance(result, (list, tuple)) else [result])
                return result

        if hasattr(module, "non_reentrant_checkpoint"):
            module.non_reentrant_checkpoint = module.checkpoint  # by the function above

        if hasattr(module, _GENERATOR):

            @patch(module, _GENERATOR)
            def without_reentrant(original: Any, function: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
                if isinstance(function, _Keywords):
                    yield from original(function, *args, **kwargs)
                else:
                    on_call()
                    yield


_GENERATOR = "_checkpoint_without_reentrant_generator"
"""Surrounds a checkpointed function in ``torch.utils.checkpoint`` since 2.1, unless ``use_reentrant`` is set."""


def _compile(engine: Any, is_on: bool) -> None:
    """Compile the module of an engine, by DeepCompile where its config has it, unless the script compiles it."""
    if is_on and not compiled_by_script(engine.module):
        engine.compile()


MODEL_KNOBS: Mapping[str, Callable[[Any, Any, Callable[[], None]], None]] = {
    BIND_CORES: lambda _model, is_on, _on_same: bind_cores() if is_on else None,
    CHECKPOINT_EVERY: _checkpoint,
}
"""Key of the section of settings that change the model -> function that applies its value before the engine is built,
and calls back if the script does the same.

Raises:
    CheckpointingError: If activations cannot be checkpointed right.
"""
ENGINE_KNOBS: Mapping[str, Callable[[Any, Any], None]] = {COMPILE: _compile}
"""Key of the same section -> function that applies its value to the engine."""


class _Keywords(functools.partial):  # type: ignore[type-arg]
    """A block's forward with its keywords, which are kept apart from the keywords of ``checkpoint``."""


class _CheckpointedForward:
    """``forward`` of a checkpointed block. A class, since a copy of the block must not call the original's."""

    checkpoints = True

    def __init__(self, block: Any) -> None:
        self._block = block
        self._forward = block.forward
        self._is_checked = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        import torch
        from torch.utils.checkpoint import checkpoint

        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        check = None if self._is_checked else ForwardCheck(self._block, args, kwargs)
        output = checkpoint(_Keywords(self._forward, **kwargs), *args, use_reentrant=False)
        if check is not None and (reason := check.reason_against(output)):
            raise CheckpointingError(f"Activations cannot be checkpointed: {reason}.")
        self._is_checked = True
        return output
