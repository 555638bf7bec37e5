"""Measures parameters, activations and FLOPs of the profile launch's last step.

Earlier steps allocate optimizer states and persistent workspaces (cuBLAS: 32 MiB per thread on an H100). FLOPs are
counted by torch's ``FlopCounterMode``: 2 per multiply-add, recomputation included; custom kernels unknown to torch
count as 0. If counting fails, the result is 0 (unknown).

Activations are the tensors that autograd saves (CPU), or the growth of allocated memory during forward (CUDA) without
the parameters that ZeRO 3 has gathered by its end: from the second step on ZeRO 3 keeps up to
``stage3_max_live_parameters`` of them until backward. Copies of parameters that autocast saves for backward are
included although they do not grow with the batch; the memory model corrects for them after the first trials.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any

from optuna_dsat.runtime.events import Event, ProfileMeasured
from optuna_dsat.runtime.measure.blocks import BlockWatch, RoutingWatch, compiled_by_script, has_leaf_modules, numel
from optuna_dsat.runtime.measure.engine import is_pipeline, micro_batches_in_flight, sequence_shards
from optuna_dsat.runtime.measure.memory import CpuMemory, CudaMemory, cpu_name, host_memory_bytes, numa_nodes
from optuna_dsat.runtime.rank import LaunchPlan, Rank

_BLOCK_BYTES = 512
"""Block size to which torch's CUDA allocator rounds up (``kMinBlockSize``, c10/cuda/CUDACachingAllocator.cpp)."""


class Profiler:
    """Profiles a single step of an engine and records ``ProfileMeasured``."""

    def __init__(
        self,
        engine: Any,
        *,
        accelerator: Any,
        plan: LaunchPlan,
        rank: Rank,
        memory: CpuMemory | CudaMemory,
        write: Callable[[Event], None],
    ) -> None:
        self._engine = engine
        self._accelerator = accelerator
        self._on_cpu = accelerator.device_name() == "cpu"
        self._plan = plan
        self._rank = rank
        self._memory = memory
        self._write = write
        self._step = plan.end_profile_step
        self._flops = 0
        self._flops_known = True
        self._forward_flops = 0.0
        self._has_backward = False
        self._activations = 0
        self._blocks, self._routing = BlockWatch(engine.module), RoutingWatch(engine.module)

    @contextmanager
    def observe(self, phase: str, step: int) -> Iterator[None]:
        """Count the FLOPs of forward and backward, and the activations saved by forward."""
        if step != self._step or phase == "step":
            yield
            return
        # A pipeline's batch has forward and backward passes, of which the backward passes take two thirds.
        forward_share = 1 if phase == "forward" else 1 / 3 if phase == "batch" and is_pipeline(self._engine) else 0
        self._has_backward |= phase != "forward"
        with ExitStack() as stack:
            counter = stack.enter_context(_flop_counter())
            saved: dict[int, int] = {}
            before = 0
            if phase != "backward":
                if self._on_cpu:
                    stack.enter_context(_saved_tensors(self._engine.module, saved))
                else:
                    before = self._held_on_device()
            if forward_share:
                held = (lambda: sum(saved.values())) if self._on_cpu else self._held_on_device
                stack.enter_context(self._routing.forward())
                stack.enter_context(self._blocks.forward(saved_bytes=held, flops=counter.get_total_flops))
            elif phase == "backward":
                stack.enter_context(self._blocks.backward())
            yield
            if phase == "forward" and not self._on_cpu:
                self._activations += max(0, self._held_on_device() - before)
        self._activations += sum(saved.values())
        self._forward_flops += forward_share * counter.get_total_flops()
        self._flops += counter.get_total_flops()
        self._flops_known &= not counter.failed

    def _held_on_device(self) -> int:
        return int(self._accelerator.memory_allocated()) - _parameter_bytes(self._engine.module)

    def boundary(self, step: int, samples: int) -> None:
        """Record the profile after the profiled step."""
        if step != self._step:
            return
        module, optimizer = self._engine.module, getattr(self._engine, "basic_optimizer", None)
        zero = sys.modules.get("deepspeed.runtime.zero.utils")
        sizes = [(numel(parameter), parameter.requires_grad) for parameter in module.parameters()]
        samples, watch = max(1, samples), self._blocks
        divisor = samples / micro_batches_in_flight(self._engine)
        host = host_memory_bytes()
        # A backward pass that the script calls itself takes twice the forward's (Kaplan et al., arXiv:2001.08361, 2.1).
        flops = self._flops if self._has_backward else round(3 * self._forward_flops)
        leaves = self._routing.routing_modules() if has_leaf_modules() else []
        self._write(
            ProfileMeasured(
                rank=self._rank.rank,
                time=time.time(),
                params=sum(size for size, _ in sizes),
                trainable_params=sum(size for size, trainable in sizes if trainable),
                largest_layer_params=max(
                    (sum(map(numel, layer.parameters(recurse=False))) for layer in module.modules()), default=0
                ),
                param_bytes=next((int(parameter.element_size()) for parameter in module.parameters()), 4),
                activation_bytes_per_sample=round(max(self._activations, watch.saved_bytes) / divisor),
                flops_per_sample=flops * sequence_shards(self._engine) // samples if self._flops_known else 0,
                device_memory_bytes=self._device_memory(host),
                host_memory_bytes=host,
                peak_bytes=self._memory.peaks().allocated,
                device_name=self._device_name(),
                optimizer="" if optimizer is None else type(optimizer).__name__,
                optimizer_tested=optimizer is None or zero is None or bool(zero.is_zero_supported_optimizer(optimizer)),
                needs_zero=not self._has_backward and getattr(self._engine, "_support_torch_style_backward", False),
                blocks=0 if watch.reason else len(watch.blocks),
                block_bytes_per_sample=round(watch.saved_bytes / divisor),
                block_input_bytes_per_sample=round(watch.input_bytes / divisor),
                block_share=min(1.0, watch.flops / self._forward_flops) if self._forward_flops else 1.0,
                no_checkpointing=watch.reason,
                no_compiling="the script compiles its model itself" if compiled_by_script(module) else "",
                leaf_classes=tuple(sorted({type(leaf).__name__ for leaf in leaves})),
                leaf_params=max((sum(map(numel, leaf.parameters())) for leaf in leaves), default=0),
                numa_nodes=numa_nodes(),
            )
        )
        if (dynamo := sys.modules.get("torch._dynamo")) is not None:
            dynamo.reset()  # torch.compile skips what has run under a dispatch mode, such as the counter of FLOPs

    def discard(self) -> None:
        """Discard the observations of a skipped step; the next step is profiled instead."""
        self._flops = self._forward_flops = self._activations = 0
        self._blocks.discard()
        self._flops_known = True

    def _device_memory(self, host: int) -> int:
        total = host // self._rank.local_world_size
        if not self._on_cpu:
            total = int(self._accelerator.total_memory())
        limit = self._plan.device_memory_bytes
        return total if limit is None else min(limit, total)

    def _device_name(self) -> str:
        if self._on_cpu:
            return cpu_name()
        import torch

        if torch.cuda.is_available():
            return torch.cuda.get_device_name()
        return str(self._accelerator.device_name())


def _flop_counter() -> Any:
    """Return a variant of torch's FLOP counter that is safe for DeepSpeed engines.

    It does not track modules, whose hooks would conflict with DeepSpeed's, and sets ``failed`` instead of raising if
    an operation's formula fails.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

    def forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]

    def backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return int(sdpa_backward_flop_count(grad, query, key, value))  # type: ignore[no-untyped-call]

    def recurrent(inputs: Sequence[int], *weights: Any, **_: Any) -> int:
        # cuDNN's kernels get a list of weights, oneDNN's two weights; each multiplies every element of the sequence
        matrices = weights[0] if isinstance(weights[0], list) else weights[:2]
        per_position = sum(math.prod(shape) for shape in matrices if len(shape) > 1)
        return int(2 * math.prod(inputs[:-1]) * per_position)

    def recurrent_backward(*shapes: Any, **_: Any) -> int:
        return 2 * recurrent(*shapes)

    cpu_attention = "_scaled_dot_product_flash_attention_for_cpu"  # torch has formulas for the CUDA kernels only
    formulas = {cpu_attention: forward, f"{cpu_attention}_backward": backward}
    for name in ("mkldnn_rnn_layer", "_cudnn_rnn"):  # torch has no formulas for these
        formulas |= {name: recurrent, f"{name}_backward": recurrent_backward}
    aten = torch.ops.aten
    mapping = {getattr(aten, name): formula for name, formula in formulas.items() if hasattr(aten, name)}

    class SafeFlopCounter(FlopCounterMode):
        failed = False

        def __init__(self) -> None:
            super().__init__(display=False, custom_mapping=mapping)
            self.mod_tracker: Any = nullcontext()
            vars(self.mod_tracker)["parents"] = frozenset({"Global"})
            self.flop_registry = {kernel: self._safe(formula) for kernel, formula in self.flop_registry.items()}

        def _safe(self, formula: Callable[..., int]) -> Callable[..., int]:
            def counted(*args: Any, **kwargs: Any) -> int:
                try:
                    return formula(*args, **kwargs)
                except Exception:  # noqa: BLE001 - formulas assert shapes, which must not end the script
                    self.failed = True
                    return 0

            return counted

    return SafeFlopCounter()


def _saved_tensors(module: Any, saved: dict[int, int]) -> Any:
    """Fill ``saved``, within a context, with storage address -> bytes of what autograd saves, without parameters.

    A view of a tensor without history, such as a batch cut from the training data, counts without the rest of it.
    """
    import torch

    parameters = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}

    def pack(tensor: Any) -> Any:
        owner = tensor if tensor._base is None else tensor._base
        if isinstance(owner, torch.nn.Parameter):
            return tensor  # ZeRO 3 swaps its data between forward and backward, so the object must stay the same
        storage = tensor.untyped_storage()
        if (address := storage.data_ptr()) not in parameters:
            is_part = owner is not tensor and owner.is_leaf
            size = min(tensor.nbytes, storage.nbytes()) if is_part else storage.nbytes()  # expanded views exceed it
            saved[address] = max(saved.get(address, 0), size)
        return tensor.detach()  # a saved output that references its own graph would never be freed

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


def _parameter_bytes(module: Any) -> int:
    """Return the bytes currently held by a module's parameters; with ZeRO 3, partitions and gathered parameters."""
    held: dict[int, int] = {}
    for parameter in module.parameters():
        # With a single rank nothing is gathered: the parameter becomes a view of its partition (ds_tensor), which must
        # not count as growth.
        for tensor in (parameter, getattr(parameter, "ds_tensor", parameter)):
            with suppress(RuntimeError, NotImplementedError):  # a tensor without storage
                storage = tensor.untyped_storage()
                held[storage.data_ptr()] = -(-storage.nbytes() // _BLOCK_BYTES) * _BLOCK_BYTES
    return sum(held.values())
