"""A tiny DeepSpeed training with data that follow a batch size, or not, and mistakes at a size of one's choice."""

from __future__ import annotations

import argparse
import os
import subprocess
import time
from pathlib import Path

import deepspeed
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset


class Stream(IterableDataset[torch.Tensor]):
    """Samples without an end."""

    def __iter__(self):  # type: ignore[no-untyped-def]
        while True:
            yield torch.ones(16)


class Batches(IterableDataset[dict[str, torch.Tensor]]):
    """Batches without an end."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self):  # type: ignore[no-untyped-def]
        while True:
            yield {"inputs": torch.ones(self.size, 16), "names": ["a name"] * self.size}


def train_with_accelerate(model: torch.nn.Module, config: str, passes: int) -> None:
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    accelerator = Accelerator(gradient_accumulation_steps=passes, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(TensorDataset(torch.randn(64, 16)), batch_size=4)
    engine, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(100):
        for (inputs,) in loader:
            with accelerator.accumulate(engine):
                accelerator.backward(engine(inputs).square().mean())
                optimizer.step()


def train_in_turns(actor: deepspeed.DeepSpeedEngine, config: str, size: int) -> None:
    """Print the passes of each step of the other engine; inputs of a loader's workers follow another size late."""
    model = torch.nn.Linear(16, 1)
    critic, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    reference, *_ = deepspeed.initialize(model=torch.nn.Linear(16, 1), config={"train_micro_batch_size_per_gpu": 1})
    loader, passes = DataLoader(TensorDataset(torch.randn(64, 16)), batch_size=size, num_workers=2), 0
    for _ in range(100):
        for (inputs,) in loader:
            for engine in (actor, critic):
                with torch.no_grad():
                    reference(inputs)
                engine.backward(engine(inputs).square().mean())
                engine.step()
            actor(inputs)  # scores samples for the other, as a discriminator
            passes += 1
            if critic.micro_steps % critic.gradient_accumulation_steps() == 0:
                print(f"passes of the critic: {passes}", flush=True)
                passes = 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("--data", default="loader", choices=("loader", "stream", "batches", "fixed", "once"))
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--wait-for", default="", help="after a step of another size, wait until this file exists")
    parser.add_argument("--out-of-memory-size", type=int, default=0)
    parser.add_argument("--touch", default="", help="have a subprocess make this file")
    parser.add_argument("--accelerate", type=int, default=0, help="train with accelerate, with these passes in a step")
    parser.add_argument("--critic", action="store_true", help="train another model in turns, and have a frozen one")
    args = parser.parse_args()
    if args.touch:
        subprocess.run(["touch", args.touch], check=True)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 1))
    if args.accelerate:
        train_with_accelerate(model, args.config, args.accelerate)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=args.config)
    size = engine.train_micro_batch_size_per_gpu()
    if args.critic:
        train_in_turns(engine, args.config, size)
    samples = Stream() if args.data == "stream" else TensorDataset(torch.randn(64, 16))
    loader = DataLoader(samples, batch_size=size, num_workers=args.workers)
    if args.data == "batches":
        loader = DataLoader(Batches(size), batch_size=None, num_workers=args.workers)
    once = torch.randn(size, 16)
    for _ in range(args.epochs):
        if args.data == "once":
            engine.backward(engine(once).square().mean())
            engine.step()
            continue
        for batch in loader if args.data != "fixed" else [torch.randn(size, 16)]:
            inputs = batch
            if not isinstance(batch, torch.Tensor):
                inputs = batch["inputs"] if isinstance(batch, dict) else batch[0]
            if len(inputs) == args.out_of_memory_size and int(os.environ["RANK"]) == 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            engine.backward(engine(inputs).square().mean())
            engine.step()
            while args.wait_for and len(inputs) != size and not Path(args.wait_for).exists():
                time.sleep(0.02)


if __name__ == "__main__":
    main()
