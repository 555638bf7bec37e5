"""Lightning Fabric with its DeepSpeed strategy: python fabric.py CONFIG."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from lightning.fabric import Fabric
from lightning.fabric.accelerators import CUDAAccelerator
from lightning.fabric.strategies import DeepSpeedStrategy
from torch import nn


class CPURanks(CUDAAccelerator):  # type: ignore[misc]
    """CPU ranks in the place of GPUs, the only accelerator that the strategy accepts."""

    def setup_device(self, device: torch.device) -> None:
        pass

    def teardown(self) -> None:
        pass

    @staticmethod
    def parse_devices(devices: int) -> list[int]:
        return list(range(devices))

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device("cpu", index) for index in devices]

    @staticmethod
    def is_available() -> bool:
        return True


def main() -> None:
    config = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    strategy = DeepSpeedStrategy(config={**config, "zero_allow_untested_optimizer": True})
    fabric = Fabric(accelerator=CPURanks(), devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy=strategy)
    fabric.launch()
    with fabric.init_module():
        layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    if fabric.global_rank == 0:
        print(json.dumps({"partitioned": all(hasattr(p, "ds_numel") for p in layers.parameters())}), flush=True)
    model, optimizer = fabric.setup(layers, torch.optim.AdamW(layers.parameters(), lr=1e-3))
    for _ in range(100):
        loss = model(torch.randn(config["train_micro_batch_size_per_gpu"], 8)).square().mean()
        fabric.backward(loss)
        optimizer.step()


if __name__ == "__main__":
    main()
