"""Train a small classifier with accelerate's DeepSpeed plugin, on synthetic data: on GPUs, or on a CPU without any.

    torchrun --nproc_per_node 2 train.py --config ds_config.json
    torchrun --nproc_per_node 2 train.py --zero-stage 2 --batch-size 8

With ``--config`` the plugin reads a DeepSpeed config, without it is built in code. The batch size is the script's own,
as in most scripts for accelerate: it belongs to the DataLoader.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

FEATURES = 32
CLASSES = 8


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small classifier on synthetic data.")
    parser.add_argument("--config", help="DeepSpeed config; without one the plugin is built in code")
    parser.add_argument("--zero-stage", type=int, default=2, help="without --config")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches in a step, without --config")
    parser.add_argument("--batch-size", type=int, default=8, help="samples in a micro-batch, on each rank")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--epochs", type=int, default=1)
    return parser.parse_args()


def make_plugin(args: argparse.Namespace) -> DeepSpeedPlugin:
    if args.config:
        return DeepSpeedPlugin(hf_ds_config=args.config)
    return DeepSpeedPlugin(zero_stage=args.zero_stage, gradient_accumulation_steps=args.accumulate)


def main() -> None:
    args = parse_arguments()
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    accelerator = Accelerator(
        deepspeed_plugin=make_plugin(args), kwargs_handlers=[InitProcessGroupKwargs(backend=backend)]
    )
    set_seed(0)
    inputs = torch.randn(args.samples, FEATURES)
    data = TensorDataset(inputs, inputs[:, :CLASSES].argmax(dim=1))
    model = nn.Sequential(nn.Linear(FEATURES, args.hidden), nn.GELU(), nn.Linear(args.hidden, CLASSES))
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        DataLoader(data, batch_size=args.batch_size, shuffle=True, drop_last=True),
    )
    for epoch in range(args.epochs):
        for batch, target in loader:
            with accelerator.accumulate(model):
                loss = functional.cross_entropy(model(batch), target)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch} loss {loss.item():.4f}")
    accelerator.save_state("checkpoint")


if __name__ == "__main__":
    main()
