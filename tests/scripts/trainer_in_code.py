"""A Hugging Face Trainer whose arguments are all set in code: python trainer_in_code.py CONFIG OUTPUT_DIR.

Prints what the libraries believe before the training starts.
"""

from __future__ import annotations

import json
import os
import sys

import torch
from transformers import (
    AutoModelForCausalLM,
    EarlyStoppingCallback,
    GPT2Config,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.integrations import is_deepspeed_zero3_enabled

from optuna_dsat.integrations.huggingface import DsatCallback

LENGTH = 16


class Telltale(TrainerCallback):  # type: ignore[misc]
    def on_evaluate(self, *_: object, **__: object) -> None:
        raise RuntimeError("an evaluation ran")

    def on_save(self, *_: object, **__: object) -> None:
        raise RuntimeError("a checkpoint was saved")


def main() -> None:
    arguments = TrainingArguments(
        output_dir=sys.argv[2],
        deepspeed=sys.argv[1],
        per_device_train_batch_size=16,
        gradient_accumulation_steps=4,
        auto_find_batch_size=True,
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=1,
        save_steps=1,
        load_best_model_at_end=True,
        push_to_hub=True,
        report_to="all",
        max_steps=2,
    )
    arguments.gradient_accumulation_steps = 8  # as scripts do that work it out from a total batch size
    zero_3 = is_deepspeed_zero3_enabled()
    config = GPT2Config(
        vocab_size=32, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = AutoModelForCausalLM.from_config(config)
    tokens = torch.arange(LENGTH) % 32
    data = [{"input_ids": tokens, "labels": tokens}] * 8
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=data,
        eval_dataset=data,
        callbacks=[EarlyStoppingCallback(), Telltale(), DsatCallback()],
    )
    before = trainer.evaluate()
    trainer.save_model()
    seen = {
        "zero_3": zero_3,
        "partitioned": all(hasattr(parameter, "ds_numel") for parameter in model.parameters()),
        "stage": arguments.hf_deepspeed_config.get_value("zero_optimization.stage"),
        "bucket": arguments.hf_deepspeed_config.get_value("zero_optimization.reduce_bucket_size"),
        "batch": [arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps],
        "report_to": arguments.report_to,
        "evaluated": sorted(before),
    }
    if os.environ["RANK"] == "0":
        print(json.dumps(seen), flush=True)
    trainer.train(resume_from_checkpoint="no-such-checkpoint")


if __name__ == "__main__":
    main()
