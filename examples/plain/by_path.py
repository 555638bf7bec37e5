"""Train with ``--deepspeed F``; the model is built partitioned where the config says ZeRO 3.

torchrun --nproc_per_node 2 by_path.py --deepspeed ds_config.json
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

import deepspeed
import torch
from parts import Network, Sums
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler


class WithLoss(nn.Module):
    """Takes its batch by keywords and returns the loss, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Network()

    def forward(self, *, scale: Tensor, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the mean squared error of (batch, 1) sums."""
        predicted = self.network(inputs["numbers"] * scale)
        return {"loss": functional.mse_loss(predicted, inputs["sums"])}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed", required=True, help="the DeepSpeed config")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    config = json.loads(Path(args.deepspeed).read_text(encoding="utf-8"))
    partitioned = config["zero_optimization"]["stage"] == 3
    with deepspeed.zero.Init(config_dict_or_path=args.deepspeed, enabled=partitioned):
        model = WithLoss()
    print(f"built {'partitioned' if hasattr(next(model.parameters()), 'ds_id') else 'whole'}", flush=True)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=args.deepspeed)
    data = Sums()
    loader = DataLoader(
        data, config["train_micro_batch_size_per_gpu"], sampler=DistributedSampler(data), drop_last=True
    )
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    scale = torch.ones((), device=engine.device)
    for _ in range(args.steps):
        numbers, sums = (tensor.to(engine.device) for tensor in next(batches))
        loss = engine(scale=scale, inputs={"numbers": numbers, "sums": sums})["loss"]
        engine.backward(loss)
        engine.step()


if __name__ == "__main__":
    main()
