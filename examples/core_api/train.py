"""Train through a wrapper of one's own around DeepSpeed's engine: optuna-dsat is told of the loop.

    torchrun --nproc_per_node 2 train.py

Outside a trial the two calls of optuna_dsat change nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn
from torch.nn import functional

import optuna_dsat

HPARAMS = {
    "deepspeed_config": "ds_config.json",
    "overwrite_deepspeed_args": {"gradient_clipping": 1.0},
    "steps": 100,
}


class Runner:
    """Builds an engine without ``deepspeed.initialize`` and drives it without its public methods' names."""

    def __init__(self, model: nn.Module, config: dict[str, Any]) -> None:
        deepspeed.init_distributed()
        self.engine = DeepSpeedEngine(
            args=None,
            model=model,
            model_parameters=model.parameters(),
            config=config,
            config_class=DeepSpeedConfig(config),
        )

    def learn(self, numbers: Tensor, sums: Tensor) -> None:
        """Do forward, backward and, at the end of an accumulation, a step."""
        kind = type(self.engine)
        loss = functional.mse_loss(kind.forward(self.engine, numbers), sums)
        kind.backward(self.engine, loss)
        kind.step(self.engine)


def main() -> None:
    config = optuna_dsat.get_ds_config_from_hparams(HPARAMS, base_dir=Path(__file__).parent)
    runner = Runner(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)), config)
    engine = runner.engine
    generator = torch.Generator().manual_seed(engine.global_rank)
    while engine.global_steps < HPARAMS["steps"]:
        numbers = torch.randn(engine.train_micro_batch_size_per_gpu(), 16, generator=generator).to(engine.device)
        with optuna_dsat.dsat_reporting_context(engine):
            runner.learn(numbers, numbers.sum(1, keepdim=True))


if __name__ == "__main__":
    main()
