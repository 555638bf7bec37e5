"""Train with a config that is built in code; DeepSpeed makes the data loader and accumulates gradients.

torchrun --nproc_per_node 2 in_code.py --accumulate 2
"""

from __future__ import annotations

import argparse
import itertools

import deepspeed
from parts import Network, Sums
from torch.nn import functional


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--optimizer", default="AdamW")
    args = parser.parse_args()
    config = {
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "gradient_accumulation_steps": args.accumulate,
        "optimizer": {"type": args.optimizer, "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 10000, "allgather_bucket_size": 10000},
        "csv_monitor": {"enabled": True, "output_path": "metrics", "job_name": "sums"},
        "steps_per_print": 1_000_000,
    }
    model = Network()
    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), training_data=Sums(), config=config
    )
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    while engine.global_steps < args.steps:
        numbers, sums = (tensor.to(engine.device) for tensor in next(batches))
        loss = functional.mse_loss(engine(numbers), sums)
        engine.backward(loss)
        engine.step()


if __name__ == "__main__":
    main()
