"""Trains on tokens of varying lengths in half precision: ``half.py --deepspeed_config CONFIG``.

Rank 0 prints, at each step, how many steps DeepSpeed says it has skipped.
"""

import argparse

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
deepspeed.add_config_arguments(parser)
args = parser.parse_args()

# Some CPUs have no fast kernels for it, and DeepSpeed asks for them; torch computes all the same.
type(get_accelerator()).is_fp16_supported = lambda _: True


class Model(torch.nn.Module):
    """Means of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(100, 8)
        self.head = torch.nn.Linear(8, 1)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.embedding(tokens) * mask[..., None])
        return result.float().square().mean()


torch.manual_seed(0)
model = Model()
engine, *_ = deepspeed.initialize(args, model=model, model_parameters=model.parameters())
size = engine.train_micro_batch_size_per_gpu()
for step in range(200):
    length = 10 + 5 * (step % 3)
    tokens = torch.randint(100, (size, length))
    engine.backward(engine(tokens, mask=torch.ones(size, length).half()))
    engine.step()
    if engine.global_rank == 0:
        print(engine.skipped_steps, flush=True)
