"""Rank of ``test_checkpointing.py``: engines with and without checkpointed blocks, at several ZeRO stages.

Prints, as JSON, for each model the losses of the steps, the norm of the last gradients and the bytes that autograd
keeps, for each ``every``; 0 is none.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

from optuna_dsat.runtime.adapt.checkpointing import checkpoint_blocks

HIDDEN, BLOCKS, STEPS = 32, 4, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        result: torch.Tensor = x + scale * self.dropout(self.mlp(self.norm(x)))
        return result


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return x.square().mean()


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=BLOCKS, n_embd=HIDDEN, n_head=2, vocab_size=64, n_positions=16))


def pipeline() -> Any:
    layers = [nn.Embedding(64, HIDDEN), *(LayerSpec(Block) for _ in range(BLOCKS)), nn.Linear(HIDDEN, 64)]
    return PipelineModule(layers=layers, num_stages=2, loss_fn=lambda logits, _labels: logits.square().mean())


MODELS = {"plain": Model, "library": gpt2, "pipeline": pipeline}


def trained(config: dict[str, Any], every: int, *, kind: str) -> list[Any]:
    torch.manual_seed(7)
    model: Any = MODELS[kind]()
    if every:
        checkpoint_blocks(model, every)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    rank, losses, kept = int(os.environ["RANK"]), [], 0
    torch.manual_seed(rank)
    for step in range(STEPS):
        kept = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal kept
            kept += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            if kind == "pipeline":
                ids = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(step))
                losses.append(engine.train_batch(itertools.repeat((ids, ids))).item())
                continue
            if kind == "library":
                ids = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(step * 2 + rank))
                loss = engine(input_ids=ids, labels=ids).loss
            else:
                batch = torch.randn(4, 16, HIDDEN, generator=torch.Generator().manual_seed(step * 2 + rank))
                loss = engine(batch.to(next(engine.module.parameters()).dtype))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    norm = engine.get_global_grad_norm()  # ZeRO 0 in fp32 has none
    return [losses, None if norm is None else float(norm), kept]


if __name__ == "__main__":
    deepspeed.init_distributed()
    results = [
        {every: trained(asked["config"], every, kind=asked["kind"]) for every in (0, 1, 2)}
        for asked in json.loads(sys.argv[1])
    ]
    torch.distributed.barrier()
    if os.environ["RANK"] == "0":
        print(json.dumps(results))
