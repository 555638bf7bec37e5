"""Rank of ``test_live.py``: engines whose settings change while they run, beside engines built with the settings.

Prints, as JSON, a list per change: its name, whether the updated parameters are equal bit for bit, and the collectives
of a step (name -> [calls, elements]) of the changed and of the fresh engine.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from deepspeed.comm.torch import TorchBackend

from optuna_dsat.config.differences import live_changes
from optuna_dsat.runtime.measure.live import change_settings

WIDTH, BATCH = 64, 8
_COLLECTIVES = (
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
)


@contextmanager
def counted() -> Iterator[dict[str, list[int]]]:
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    originals = {name: getattr(TorchBackend, name) for name in _COLLECTIVES if hasattr(TorchBackend, name)}

    def wrap(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name][0] += 1
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            counts[name][1] += sum(tensor.numel() for tensor in tensors)
            return originals[name](*args, **kwargs)

        return call

    for name in originals:
        setattr(TorchBackend, name, wrap(name))
    try:
        yield counts
    finally:
        for name, function in originals.items():
            setattr(TorchBackend, name, function)


class Training:
    """A small engine that trains on batches that depend on the step only."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(6)]
        model = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.Tanh())))
        self.engine, *_ = deepspeed.initialize(model=model, config=dict(config))

    def step(self, rate: float, micro_batch: int) -> None:
        engine = self.engine
        for group in engine.optimizer.param_groups:
            group["lr"] = rate
        generator = torch.Generator().manual_seed(engine.global_rank)
        for _ in range(engine.gradient_accumulation_steps()):
            data = torch.randn(micro_batch, WIDTH, generator=generator).to(engine.device)
            engine.backward(engine(data).square().mean())
            engine.step()

    def updated(self) -> tuple[torch.Tensor, dict[str, list[int]]]:
        """Return the parameters after an update, and the collectives of a step before it."""
        self.step(0.0, BATCH)
        self.step(0.0, BATCH)
        with counted() as counts:
            self.step(0.0, BATCH)
        self.step(0.1, BATCH)
        with deepspeed.zero.GatheredParameters(list(self.engine.module.parameters())):
            result = torch.cat([parameter.detach().flatten() for parameter in self.engine.module.parameters()])
        return result, dict(counts)


def main() -> None:
    """Compare the changes of the first argument, a list of (name, config before, config after)."""
    compared = []
    for name, before, after in json.loads(sys.argv[1]):
        changed = Training(before)
        for size in (1, 4):
            changed.step(0.0, size)
        changes = live_changes(before, after)
        assert changes is not None, name
        change_settings(changed.engine, changes)
        parameters, collectives = changed.updated()
        fresh_parameters, fresh_collectives = Training(after).updated()
        compared.append([name, torch.equal(parameters, fresh_parameters), collectives, fresh_collectives])
    if torch.distributed.get_rank() == 0:
        print(json.dumps(compared), flush=True)
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads may abort Python's own exit


if __name__ == "__main__":
    main()
