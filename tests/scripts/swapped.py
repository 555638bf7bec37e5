"""A training whose tensors are large enough for NVMe; rank 0 prints its files there after each step."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import deepspeed
import torch

WIDTH = 1024
"""Parameters of WIDTH x WIDTH elements: half of them in bf16 is the least that DeepSpeed swaps, 1 MiB."""
LAYERS = 8
"""More than DeepSpeed has swap buffers."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("--step-s", type=float, default=0.0)
    args = parser.parse_args()
    torch.manual_seed(5)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=args.config)
    zero, dtype = engine._config.zero_config, next(engine.module.parameters()).dtype
    folders = [section.nvme_path for section in (zero.offload_optimizer, zero.offload_param) if section]
    for step in range(1, 100):
        time.sleep(args.step_s)
        batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(2 * step + engine.global_rank))
        loss = engine(batch.to(dtype)).float().square().mean()
        engine.backward(loss)
        engine.step()
        files = sorted({path.name for folder in filter(None, folders) for path in Path(folder).rglob("*.swp")})
        print("folders", sorted(set(map(str, filter(None, folders)))), "files", files, flush=True)


if __name__ == "__main__":
    main()
