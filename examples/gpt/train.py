"""Train a small GPT with DeepSpeed on synthetic tokens: on GPUs, or on a CPU without any.

    torchrun --nproc_per_node 2 train.py

The batch size comes from the DeepSpeed config, as in most DeepSpeed scripts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import deepspeed
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, DistributedSampler

VOCABULARY = 512
"""Different tokens."""


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, sequence, hidden) to the same shape."""
        batch, length, hidden = x.shape
        split = self.qkv(x).view(batch, length, 3, self.heads, hidden // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return out


class Block(nn.Module):
    """Attention and MLP, each behind a layer norm, with residuals."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads)
        self.norm2 = nn.LayerNorm(hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, sequence, hidden) to the same shape."""
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class GPT(nn.Module):
    """Decoder-only transformer (pre-norm, learned positions)."""

    def __init__(self, *, layers: int, hidden: int, heads: int, sequence: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, hidden)
        self.position = nn.Embedding(sequence, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of predicting ``targets`` from ``tokens``, both (batch, sequence)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return functional.cross_entropy(logits.float(), targets.flatten())


class CountingTokens(Dataset[Tensor]):
    """Sequences that count upwards in steps of 1 to 8 from anywhere: learned in some dozen steps."""

    def __init__(self, size: int, sequence: int) -> None:
        self.size = size
        self.sequence = sequence

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        """Return the tokens (sequence + 1,) of one sample, the same whenever asked."""
        start, stride = index * 7919 % VOCABULARY, index % 8 + 1
        return (start + stride * torch.arange(self.sequence + 1)) % VOCABULARY


def batches(loader: DataLoader[Tensor], sampler: DistributedSampler[Tensor]) -> Iterator[Tensor]:
    """Yield batches (micro-batch, sequence + 1) epoch after epoch."""
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT on synthetic tokens.")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=160)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seq", type=int, default=128, help="tokens in a sample")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--samples", type=int, default=65536, help="size of the data set")
    parser.add_argument("--log-every", type=int, default=10, help="steps between two loss lines")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by DeepSpeed's launcher")
    deepspeed.add_config_arguments(parser)
    parser.set_defaults(deepspeed_config=str(Path(__file__).with_name("ds_config.json")))
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    config = json.loads(Path(args.deepspeed_config).read_text(encoding="utf-8"))
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = GPT(layers=args.layers, hidden=args.hidden, heads=args.heads, sequence=args.seq)
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    data = CountingTokens(args.samples, args.seq)
    sampler: DistributedSampler[Tensor] = DistributedSampler(data, seed=0)
    loader = DataLoader(data, batch_size=config["train_micro_batch_size_per_gpu"], sampler=sampler, drop_last=True)
    if not len(loader):
        print(f"{args.samples} samples make up no whole batch", flush=True)
        return
    feed = batches(loader, sampler)
    for step in range(1, args.steps + 1):
        for _ in range(engine.gradient_accumulation_steps()):
            sample = next(feed).to(engine.device)
            loss = engine(sample[:, :-1], sample[:, 1:])
            engine.backward(loss)
            engine.step()
        if engine.global_rank == 0 and (step % args.log_every == 0 or step == args.steps):
            print(f"step {step} loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
