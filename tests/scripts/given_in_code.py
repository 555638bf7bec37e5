"""Configs that a script gives to libraries in code alone; prints what each differs in from the user's file.

The last one trains: an ``Accelerator`` that has the accumulation steps itself.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from torch.utils.data import DataLoader, TensorDataset
from transformers import TrainingArguments

from optuna_dsat.runtime.rank import LAUNCH_ENV, LaunchPlan
from optuna_dsat.runtime.trial_config import TrialConfig

GIVEN: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
}
LEFT = {
    **GIVEN,
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": "auto"},
}


def plugin(**given: Any) -> Any:
    return DeepSpeedPlugin(**given).deepspeed_config


def by_environment(stage: int) -> Any:
    os.environ["ACCELERATE_DEEPSPEED_ZERO_STAGE"] = str(stage)
    try:
        return plugin(hf_ds_config=LEFT)
    finally:
        del os.environ["ACCELERATE_DEEPSPEED_ZERO_STAGE"]


def arguments(config: dict[str, Any]) -> Any:
    given = TrainingArguments(
        output_dir="output",
        deepspeed=config,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        use_cpu=True,
    )
    return given.deepspeed_plugin.deepspeed_config


def main() -> None:
    ways = {
        "plugin's arguments": plugin(
            gradient_accumulation_steps=2, gradient_clipping=0.5, zero_stage=1, offload_optimizer_device="cpu"
        ),
        "plugin's dict": plugin(hf_ds_config=GIVEN),
        "plugin's arguments beside a dict": plugin(
            hf_ds_config=LEFT, gradient_accumulation_steps=2, gradient_clipping=0.5, zero_stage=1
        ),
        "environment beside a dict": by_environment(1),
        "TrainingArguments": arguments(GIVEN),
        "dict": GIVEN,
    }
    config = TrialConfig(LaunchPlan.load(os.environ[LAUNCH_ENV]), world_size=1)
    print(json.dumps({way: config.differences(given) for way, given in ways.items()}), flush=True)

    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=1), gradient_accumulation_steps=2)
    model = torch.nn.Linear(4, 1)
    loader = DataLoader(TensorDataset(torch.randn(256, 4)), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for (batch,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            optimizer.step()


if __name__ == "__main__":
    main()
