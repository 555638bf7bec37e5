"""Takes its batch size from an option, whatever the config says, and feeds a dictionary in a list by keyword."""

import argparse

import deepspeed
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=6)
args = parser.parse_args()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def forward(self, *, batch: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch[0]["inputs"]).square().mean()
        return loss


config = {
    "train_micro_batch_size_per_gpu": args.batch_size,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001, "torch_adam": True}},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 10000, "allgather_bucket_size": 10000},
}
model = Model()
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for _ in range(100):
    loss = engine(batch=[{"inputs": torch.randn(args.batch_size, 8)}])
    engine.backward(loss)
    engine.step()
