"""Finds the repeated blocks of a model, and measures how much checkpointing their activations would save.

The backward pass of a checkpointed block repeats its forward pass. It computes the same values only if the first pass
left its inputs as they were. Reasons against it are updated buffers, changed inputs, and objects that may keep state,
such as caches of keys and values. Some show by their type, others after a forward pass.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from optuna_dsat.runtime.measure.inputs import tensors_of
from optuna_dsat.runtime.overlay import LEAF_MODULE, ZERO

_SWITCHES = ("gradient_checkpointing", "activation_checkpointing", "grad_checkpointing", "use_checkpoint")
"""Attributes by which models switch their own checkpointing on."""
_ON = ("true", "1", "yes", "on")
"""Values of these, as text: flags of scripts may be numbers or words."""
_INTERVAL = "activation_checkpoint_interval"
"""The same of a pipeline module: layers per checkpoint, 0 for none."""
TORCH_CHECKPOINT = "torch.utils.checkpoint"
DEEPSPEED_CHECKPOINT = "deepspeed.runtime.activation_checkpointing.checkpointing"
_LISTS = ("ModuleList", "Sequential")
_TOO_FEW = "it has fewer than two repeated blocks"


def repeated_blocks(model: Any) -> list[Any]:
    """Return the blocks that a model repeats, in order: modules of a type in a list of modules, or in a pipeline.

    The type is the one with most parameters, among modules that have children and are in no other such block. A stage
    of a pipeline may hold none or one of the blocks that the whole pipeline repeats.
    """
    groups: dict[type, dict[int, Any]] = {}
    inside: set[int] = set()
    for module in model.modules():  # parents come before their children
        if id(module) in inside or not (type(module).__name__ in _LISTS or is_pipeline_module(module)):
            continue
        kinds: dict[type, dict[int, Any]] = {}
        for child in module.children():
            if any(True for _ in child.children()) and type(child).__name__ not in _LISTS:
                kinds.setdefault(type(child), {})[id(child)] = child
        layers = [getattr(layer, "typename", type(layer)) for layer in getattr(module, "_layer_specs", ())]
        for kind, children in kinds.items():
            if max(len(children), layers.count(kind)) > 1:
                groups.setdefault(kind, {}).update(children)
                inside.update(id(part) for child in children.values() for part in child.modules())
    return max(([*group.values()] for group in groups.values()), key=_parameters_of, default=[])


def is_pipeline_module(module: Any) -> bool:
    """Return whether a module is a stage of a pipeline of DeepSpeed, whose layers are its children."""
    return any(cls.__name__ == "PipelineModule" for cls in type(module).__mro__)


def numel(parameter: Any) -> int:
    """Return the number of elements of a parameter. ZeRO 3 partitions it and keeps its size in ``ds_numel``."""
    return int(getattr(parameter, "ds_numel", None) or parameter.numel())


def _parameters_of(blocks: list[Any]) -> int:
    return sum(numel(parameter) for block in blocks for parameter in block.parameters())


def reason_against(model: Any) -> str:
    """Return why a model's activations cannot be checkpointed; empty if nothing is known against it."""
    modules = list(model.modules())
    names = {cls.__name__ for module in modules for cls in type(module).__mro__}
    library = library_model(model)
    blocks = repeated_blocks(model)
    deepspeed: Any = sys.modules.get(DEEPSPEED_CHECKPOINT)
    calls = "apply" not in vars(sys.modules[TORCH_CHECKPOINT].CheckpointFunction)  # else they are switched off
    if calls and deepspeed is not None and deepspeed.is_configured():
        return "the script checkpoints by deepspeed.checkpointing, which follows the config's section"
    if _is_on(library) or (calls and "CheckpointWrapper" in names) or any(_is_checkpointed(block) for block in blocks):
        return "it is checkpointed already"
    for module, name in own_switches(model):
        if library is None or name == _INTERVAL:
            return f"{type(module).__name__} checkpoints its activations already, by its {name}"
    if library is not None:
        supported = getattr(library, "supports_gradient_checkpointing", True)
        return "" if supported else f"{type(library).__name__} does not support it"
    if len(blocks) < 2 and not is_pipeline_module(model):
        return _TOO_FEW
    if compiled_by_script(model):
        return "it is compiled before deepspeed.initialize"
    for part in (part for block in blocks for part in block.modules()):
        kinds = [cls.__name__ for cls in type(part).__mro__]
        if "_BatchNorm" in kinds and part.training and part.track_running_stats:
            return f"its blocks contain {kinds[0]}, whose statistics would be updated twice"
        if type(part).__module__.startswith("deepspeed.moe"):
            return "its blocks contain a mixture of experts, whose ranks exchange tokens in the forward pass"
    return ""


def own_switches(model: Any) -> list[tuple[Any, str]]:
    """Return the modules whose attribute of this name switches a model's own checkpointing on."""
    pipelines = [(model, _INTERVAL)] if getattr(model, _INTERVAL, 0) else []
    values = ((part, name, vars(part).get(name)) for part in model.modules() for name in _SWITCHES)
    return pipelines + [(part, name) for part, name, value in values if str(value).lower() in _ON]


def compiled_by_script(model: Any) -> bool:
    """Return whether a model, or a part of it, is compiled by torch."""
    return any(
        type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


def library_model(model: Any) -> Any | None:
    """Return the outermost model of transformers or diffusers, which have a method of their own; None without any."""
    return (
        next((m for m in model.modules() if hasattr(m, "gradient_checkpointing_enable")), None)
        if ("transformers" in sys.modules)
        else None
    )


def _is_on(library: Any | None) -> bool:
    """Return whether a library's model checkpoints; the name of the property was changed in transformers 5."""
    names = [f"is_{kind}_checkpointing" for kind in ("activation", "gradient")]
    name = next((name for name in names if hasattr(library, name)), None)
    return name is not None and bool(getattr(library, name))


def _is_checkpointed(block: Any) -> bool:
    return getattr(vars(block).get("forward"), "checkpoints", False) is True


class ForwardCheck:
    """Compares inputs and buffers of a block before and after its forward pass."""

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


class BlockWatch:
    """Observes the blocks of a model during a step, by hooks that are removed afterwards."""

    def __init__(self, model: Any) -> None:
        self.reason = ""
        """Why activations cannot be checkpointed; empty if nothing shows."""
        self.blocks: list[Any] = []
        self._checks = True
        with self._guarded():
            self.reason = reason_against(model)
            self.blocks = [] if self.reason else repeated_blocks(model)
            self._checks = library_model(model) is None  # a library's method knows its own caches and buffers
        if not self.reason and len(self.blocks) < (1 if is_pipeline_module(model) else 2):
            self.reason = _TOO_FEW
        self.saved_bytes = self.input_bytes = self.flops = 0

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Turn an error in the block into a reason: a model that cannot be examined trains as it did."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - modules of scripts may raise anything when they are looked at
            self.reason = f"its blocks cannot be examined ({type(error).__name__})"

    def discard(self) -> None:
        """Discard the measurements of a step; a reason against checkpointing stays."""
        self.saved_bytes = self.input_bytes = self.flops = 0

    @contextmanager
    def forward(self, *, saved_bytes: Callable[[], int], flops: Callable[[], int]) -> Iterator[None]:
        """Observe a forward pass."""
        started: dict[int, tuple[int, int, ForwardCheck | None]] = {}

        def before(block: Any, args: Any, kwargs: Any) -> None:
            with self._guarded():
                check = ForwardCheck(block, args, kwargs) if self._checks else None
                tensors = [item for item in (*args, *kwargs.values()) if getattr(item, "requires_grad", False)]
                self.input_bytes += sum(int(tensor.nbytes) for tensor in tensors)
                started[id(block)] = (saved_bytes(), flops(), check)

        def after(block: Any, _args: Any, _kwargs: Any, output: Any) -> None:
            begun = started.pop(id(block), None)
            if begun is None:
                return
            saved, counted, check = begun
            with self._guarded():
                self.saved_bytes += max(0, saved_bytes() - saved)
                self.flops += flops() - counted
                self.reason = self.reason or ("" if check is None else check.reason_against(output))

        with ExitStack() as stack:
            with self._guarded():
                for block in self.blocks:
                    stack.callback(block.register_forward_pre_hook(before, with_kwargs=True).remove)
                    stack.callback(block.register_forward_hook(after, with_kwargs=True).remove)
            yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Observe a backward pass, in which blocks run again if the script checkpoints them itself."""

        def again(_block: Any, _args: Any) -> None:
            self.reason = "the script checkpoints its blocks already"

        with ExitStack() as stack:
            with self._guarded():
                for block in self.blocks:
                    stack.callback(block.register_forward_pre_hook(again).remove)
            yield


def has_leaf_modules() -> bool:
    """Return whether DeepSpeed's config has ``leaf_module``, as since 0.18."""
    module = sys.modules.get("deepspeed.runtime.zero.config")
    return LEAF_MODULE in getattr(getattr(module, "DeepSpeedZeroConfig", None), "model_fields", ())


def gather_experts(model: Any, config: dict[str, Any]) -> None:
    """Name the modules with experts as leaves in a config of ZeRO 3, in place, unless it names some.

    The first launch has to end before ``RoutingWatch`` can report them.
    """
    zero = config.get(ZERO)
    classes = sorted({type(module).__name__ for module in expert_modules(model)})
    if classes and isinstance(zero, dict) and zero.get("stage") == 3 and LEAF_MODULE not in zero and has_leaf_modules():
        zero[LEAF_MODULE] = {"classes": classes}


def expert_modules(model: Any) -> list[Any]:
    """Return the outermost modules with a list of like parts that it, or their class, calls experts."""
    result: dict[int, Any] = {}
    inside = {id(model)}  # as a leaf, the model would be gathered as a whole
    for module in model.modules() if hasattr(model, "modules") else ():  # parents come before their children
        for name, container in () if id(module) in inside else module.named_children():
            if _EXPERTS.search(f"{name} {type(module).__name__}") and _like_parts(container):
                result[id(module)] = module
                inside.update(id(part) for part in module.modules())
    return list(result.values())


_EXPERTS = re.compile("expert|mixture|moe", re.IGNORECASE)


def _like_parts(container: Any) -> list[Any]:
    """Return the parts of a list or dictionary of modules; empty unless there are several, of one type."""
    parts = list(container.children())
    is_list = type(container).__name__ in ("ModuleList", "ModuleDict")
    return parts if is_list and len({*map(type, parts)}) == 1 < len(parts) else []


class RoutingWatch:
    """Finds modules that route samples among like parts, as mixtures of experts do, by hooks during a forward pass.

    A part may be idle on a rank. ZeRO 3 gathers the parameters of a module as it runs, by all ranks together. Ranks
    that run different parts then hang or train on wrong parameters, unless the routing module is a leaf
    (``zero_optimization.leaf_module``).
    """

    def __init__(self, model: Any) -> None:
        self._parts: list[tuple[Any, list[Any]]] = []
        self._experts = expert_modules(model)
        self._shapes: dict[int, list[tuple[int, ...]]] = {}
        leaves: set[int] = set()
        for module in model.modules():  # parents come before their children
            if getattr(module, "_z3_leaf", False) or type(module).__module__.startswith("deepspeed."):
                leaves.update(id(part) for part in module.modules())
            for container in () if id(module) in leaves else module.children():
                if parts := _like_parts(container):
                    self._parts.append((module, parts))

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Observe a forward pass."""

        def before(part: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
            tensors = [*tensors_of((*args, *kwargs.values()), depth=1)]
            self._shapes.setdefault(id(part), []).append(tuple(tensors[0].shape) if tensors else ())

        with ExitStack() as stack:
            for part in {id(part): part for _, parts in self._parts for part in parts}.values():
                stack.callback(part.register_forward_pre_hook(before, with_kwargs=True).remove)
            yield

    def routing_modules(self) -> list[Any]:
        """Return the modules with experts, and those seen to route samples of which the model has several."""
        routing = [module for module, parts in self._parts if self._routes(parts)]
        kinds = [type(module) for module, _ in self._parts]
        seen = [module for module in routing if kinds.count(type(module)) > 1]
        return list({id(module): module for module in (*self._experts, *seen)}.values())

    def _routes(self, parts: list[Any]) -> bool:
        """Return whether parts got different shares of the samples, which agree in all dimensions but the first."""
        inputs = [self._shapes.get(id(part), []) for part in parts]
        rest = {shape[1:] for shapes in inputs for shape in shapes}
        return len(rest) == 1 and any(shapes != inputs[0] for shapes in inputs)
