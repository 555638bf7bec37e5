"""Activation checkpointing of a model whose script does not offer it.

The forward pass of a checkpointed block keeps its inputs alone; the backward pass computes the rest again. A Hugging
Face model does it by its own method. Of other models the ``forward`` of the repeated blocks is replaced: modules,
parameters and their names stay, unlike with torch's ``checkpoint_wrapper``, which renames modules in
``named_parameters()``. It must happen before the engine is built, since ZeRO 3 hooks the children of blocks and then
gathers their weights for the second forward pass too.

The second forward pass computes the same values only if the first one changed nothing that it reads. Buffers that are
updated, inputs that are changed and objects that may keep state, such as caches of keys and values, are therefore
refused: by their type at once, else after the first forward pass.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["CheckpointingError", "ForwardCheck", "checkpoint_blocks", "reason_against", "repeated_blocks"]

_SWITCHES = ("gradient_checkpointing", "activation_checkpointing", "grad_checkpointing", "use_checkpoint")
"""Attributes by which models switch their own checkpointing on."""


class CheckpointingError(ValueError):
    """The activations of a model cannot be checkpointed; the message has the reason."""


def checkpoint_blocks(model: Any, every: int = 1) -> Any:
    """Checkpoint the activations of a model's repeated blocks; call it before ``deepspeed.initialize``.

    Losses and gradients stay the same, with dropout too: the state of torch's random number generators is restored for
    the second forward pass. Blocks that draw from another generator train differently.

    Args:
        model: A ``torch.nn.Module``; it is changed in place. Names and types of modules and parameters stay.
        every: 1 for every block, 2 for every second block, and so on.

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
    library = _library_model(model)
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


def repeated_blocks(model: Any) -> list[Any]:
    """Return the blocks that a model repeats, in order: modules of a type in ``ModuleList`` or ``Sequential``.

    The type is the one with most parameters, among modules that have children and are in no other such block.
    """
    groups: dict[type, dict[int, Any]] = {}
    inside: set[int] = set()
    for module in model.modules():  # parents come before their children
        if id(module) in inside or type(module).__name__ not in ("ModuleList", "Sequential"):
            continue
        kinds: dict[type, dict[int, Any]] = {}
        for child in module.children():
            if any(True for _ in child.children()) and type(child).__name__ not in ("ModuleList", "Sequential"):
                kinds.setdefault(type(child), {})[id(child)] = child
        for kind, children in kinds.items():
            if len(children) > 1:
                groups.setdefault(kind, {}).update(children)
                inside.update(id(part) for child in children.values() for part in child.modules())
    return max(([*group.values()] for group in groups.values()), key=_parameters_of, default=[])


def _parameters_of(blocks: list[Any]) -> int:
    # ZeRO 3 keeps the size of a partitioned parameter in ds_numel.
    return sum(int(getattr(p, "ds_numel", None) or p.numel()) for block in blocks for p in block.parameters())


def reason_against(model: Any) -> str:
    """Return why a model's activations cannot be checkpointed; empty if nothing is known against it."""
    modules = list(model.modules())
    names = {cls.__name__ for module in modules for cls in type(module).__mro__}
    library = _library_model(model)
    blocks = repeated_blocks(model)
    if "PipelineModule" in names:
        return "it is a pipeline, which checkpoints by pipeline.activation_checkpoint_interval of its config"
    deepspeed: Any = sys.modules.get("deepspeed.runtime.activation_checkpointing.checkpointing")
    if deepspeed is not None and deepspeed.is_configured():
        return "the script checkpoints by deepspeed.checkpointing, which follows the config's section"
    if _is_on(library) or "CheckpointWrapper" in names or any(_is_checkpointed(block) for block in blocks):
        return "it is checkpointed already"
    for module in modules:
        if library is None and any(getattr(module, name, None) is True for name in _SWITCHES):
            return f"{type(module).__name__} checkpoints its activations already"
    if library is not None:
        supported = getattr(library, "supports_gradient_checkpointing", True)
        return "" if supported else f"{type(library).__name__} does not support it"
    if len(blocks) < 2:
        return "it has fewer than two repeated blocks"
    if "OptimizedModule" in names or any(getattr(m, "_compiled_call_impl", None) is not None for m in modules):
        return "it is compiled before deepspeed.initialize"
    for part in (part for block in blocks for part in block.modules()):
        kinds = [cls.__name__ for cls in type(part).__mro__]
        if "_BatchNorm" in kinds and part.training and part.track_running_stats:
            return f"its blocks contain {kinds[0]}, whose statistics would be updated twice"
        if type(part).__module__.startswith("deepspeed.moe"):
            return "its blocks contain a mixture of experts, whose ranks exchange tokens in the forward pass"
    return ""


def _library_model(model: Any) -> Any | None:
    """Return the outermost model of transformers or diffusers, which have a method of their own; None without any."""
    return (
        next((m for m in model.modules() if hasattr(m, "gradient_checkpointing_enable")), None)
        if ("transformers" in sys.modules)
        else None
    )


def _is_on(library: Any | None) -> bool:
    """Return whether a library's model checkpoints; the name of the property was changed in transformers 5."""
    names = [f"is_{kind}_checkpointing" for kind in ("activation", "gradient")]
    name = next((name for name in names if hasattr(type(library), name)), None)
    return name is not None and bool(getattr(library, name))


def _is_checkpointed(block: Any) -> bool:
    return isinstance(vars(block).get("forward"), _CheckpointedForward)


class _CheckpointedForward:
    """``forward`` of a checkpointed block. A class, since a copy of the block must not call the original's."""

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
        # The partial keeps keywords of the block apart from ``checkpoint``'s.
        output = checkpoint(functools.partial(self._forward, **kwargs), *args, use_reentrant=False)
        if check is not None and (reason := check.reason_against(output)):
            raise CheckpointingError(f"Activations cannot be checkpointed: {reason}.")
        self._is_checked = True
        return output


class ForwardCheck:
    """Compares the inputs and buffers of a block before and after its forward pass.

    Args:
        block: The module.
        args: Arguments of ``forward``.
        kwargs: Its keywords.
    """

    def __init__(self, block: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        self._block = block
        self._inputs = (args, dict(kwargs))
        self._versions = self._versions_now()
        self._buffers = dict(block.named_buffers())
        self._buffer_versions = {name: _version(buffer) for name, buffer in self._buffers.items()}

    def _versions_now(self) -> list[Any]:
        return [_version(leaf) if _is_tensor(leaf) else type(leaf).__name__ for leaf in _leaves(self._inputs)]

    def reason_against(self, output: Any) -> str:
        """Return why the forward pass that returned ``output`` cannot be repeated; empty if nothing shows."""
        name = type(self._block).__name__
        for buffer_name, buffer in self._block.named_buffers():
            before = self._buffers.get(buffer_name)
            is_replaced = before is not None and buffer is not before and buffer.shape == before.shape
            if is_replaced or (buffer is before and _version(buffer) != self._buffer_versions[buffer_name]):
                return f"the forward pass of {name} updates its buffer {buffer_name}, which would happen twice"
        if self._versions_now() != self._versions:
            return f"the forward pass of {name} changes its inputs"
        for verb, data in (("takes", self._inputs), ("returns", output)):
            for leaf in _leaves(data):
                if not (_is_tensor(leaf) or _is_plain(leaf)):
                    return f"{name} {verb} a {type(leaf).__name__}, which may keep state between the two forward passes"
        return ""


def _leaves(data: Any) -> Iterator[Any]:
    """Yield the values of nested containers, and the size of each, which a forward pass may change."""
    if isinstance(data, (list, tuple, Mapping)):
        yield len(data)
        for item in data.values() if isinstance(data, Mapping) else data:
            yield from _leaves(item)
    else:
        yield data


def _is_plain(value: Any) -> bool:
    return (
        value is None
        or isinstance(value, (bool, int, float, complex, str, bytes))
        or (
            type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device", "layout", "memory_format")
        )
    )


def _is_tensor(value: Any) -> bool:
    torch: Any = sys.modules["torch"]
    return isinstance(value, torch.Tensor)


def _version(tensor: Any) -> int:
    """Return how often a tensor was changed in place; 0 for tensors of inference mode, which do not count it."""
    return 0 if tensor.is_inference() else int(tensor._version)
