"""Learns values near 1,000 that differ by less than bf16 can hold: ``close_values.py CONFIG``."""

import sys

import deepspeed
import torch


class Model(torch.nn.Module):
    """A value of each token, near 1,000."""

    def __init__(self) -> None:
        super().__init__()
        self.values = torch.nn.Embedding(32, 8)
        self.head = torch.nn.Linear(8, 1)
        torch.nn.init.constant_(self.head.bias, 1000.0)

    def forward(self, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.values(tokens)).flatten()
        return (result.float() - target).square().mean()


deepspeed.init_distributed()
torch.manual_seed(0)
model = Model()
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=sys.argv[1])
generator = torch.Generator().manual_seed(engine.global_rank)
for _ in range(200):
    tokens = torch.randint(32, (engine.train_micro_batch_size_per_gpu(),), generator=generator)
    engine.backward(engine(tokens, 1000 + (tokens % 3) / 3))
    engine.step()
