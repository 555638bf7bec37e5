"""Rank of ``test_exact_knobs.py``: engines that differ in knobs, and what shows that DeepSpeed read each.

Prints, as JSON, for each config of the first argument: losses, collectives of a step, and the engine's attributes. The
compiled operator behind ``DeepSpeedCPUAdam`` takes minutes to build; torch computes the same update here.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections import Counter
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
from deepspeed.ops.op_builder import CPUAdamBuilder
from torch import nn

from optuna_dsat.runtime.measure.blocks import RoutingWatch, gather_experts
from tests.runtime.live_engines import counted

HIDDEN, STEPS = 16, 3


class Update:
    """AdamW as ``csrc/adam/cpu_adam.cpp`` computes it."""

    def create_adam(self, *_: Any) -> None:
        pass

    def destroy_adam(self, *_: Any) -> None:
        pass

    def adam_update(
        self, _: int, step: int, lr: float, beta1: float, beta2: float, eps: float, decay: float, *rest: Any
    ) -> None:
        _, value, gradient, mean, square = rest
        value.mul_(1 - lr * decay)
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (square / (1 - beta2**step)).sqrt_().add_(eps)
        value.addcdiv_(mean, root, value=-lr / (1 - beta1**step))


class Mixture(nn.Module):
    """Routes each sample to one of its experts, so that some may be idle on a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        best = weights.argmax(-1)
        result = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (best == index).nonzero().flatten()
            if len(rows):
                result = result.index_add(0, rows, expert(x[rows]) * weights[rows, index, None])
        return x + result


class Model(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.layers = nn.ModuleList(Mixture() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def trained(config: Mapping[str, Any], *, mixture: bool = False, profiled: bool = False) -> dict[str, Any]:
    torch.manual_seed(3)
    model: Any = Model() if mixture else nn.Sequential(*(nn.Linear(HIDDEN, HIDDEN) for _ in range(6)))
    settings = copy.deepcopy(dict(config))
    if profiled:
        gather_experts(model, settings)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=settings)
    watch = RoutingWatch(engine.module)
    losses, dtype = [], next(engine.module.parameters()).dtype
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(2 * step + engine.global_rank)
        # Samples of one step are alike, so that all but a few experts are idle, and others on each rank.
        data = torch.randn(1, HIDDEN, generator=generator) + 0.01 * torch.randn(4, HIDDEN, generator=generator)
        with counted() as counts:
            with watch.forward():
                loss = engine(data.to(dtype))
            loss = loss if mixture else loss.square().mean()
            engine.backward(loss)
            engine.step()
        losses.append(loss.item())
    optimizer = engine.optimizer
    return {
        "losses": losses,
        "accumulation": engine.gradient_accumulation_steps(),
        "collectives": dict(counts),
        "devices": Counter(getattr(optimizer, "subgroup_to_device", {}).values()),
        "groups": len(getattr(optimizer, "fp16_partitioned_groups_flat", ())),
        "order": _order(optimizer),
        "pinned": getattr(optimizer, "cpu_offload_pin_memory", getattr(optimizer, "pin_memory", None)),
        "leaves": sorted({type(m).__name__ for m in engine.module.modules() if getattr(m, "_z3_leaf", False)}),
        "routing": sorted({type(module).__name__ for module in watch.routing_modules()}),
        "updated_by_torch": hasattr(optimizer, "backup_optimizer"),
    }


def _order(optimizer: Any) -> list[int]:
    """Return the place of each parameter in the partitions of ZeRO 1 and 2."""
    indices = getattr(optimizer, "round_robin_bit16_indices", [[]])[0]
    return [indices[place] for place in sorted(indices)] if isinstance(indices, dict) else list(indices)


def main() -> None:
    CPUAdamBuilder.load = lambda *_: Update()
    named: Any = SimpleNamespace(get_cpu_info=dict)  # else each of these optimizers starts a process for it
    sys.modules["cpuinfo"] = named
    results = [trained(**item) for item in json.loads(sys.argv[1])]
    if torch.distributed.get_rank() == 0:
        print(json.dumps(results), flush=True)
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads may abort Python's own exit


if __name__ == "__main__":
    main()
