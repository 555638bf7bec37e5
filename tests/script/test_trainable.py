"""The exported config as the script's trainer accepts it."""

from __future__ import annotations

from typing import Any

import pytest

from optuna_dsat.script.trainer import ScriptTrainer

PARAMS = {"warmup_min_lr": 0, "warmup_num_steps": 5, "total_num_steps": 1536}


@pytest.mark.parametrize(
    ("micro_batch", "params"),
    [(4, PARAMS), (8, {"warmup_min_lr": 0, "warmup_num_steps": "auto", "total_num_steps": "auto"})],
)
def test_the_hugging_face_trainer_computes_the_schedule_of_another_batch(
    micro_batch: int, params: dict[str, Any]
) -> None:
    trainer = ScriptTrainer(framework="transformers", micro_batch=4, gradient_accumulation_steps=1, options={})
    config = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": 1,
        "scheduler": {"type": "WarmupDecayLR", "params": PARAMS},
    }
    assert trainer.trainable(config) == {**config, "scheduler": {"type": "WarmupDecayLR", "params": params}}
