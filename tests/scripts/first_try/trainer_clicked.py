"""A Hugging Face Trainer whose batch sizes are options of a click command, under names of its own."""

from __future__ import annotations

import click
import torch
from transformers import AutoModelForCausalLM, GPT2Config, Trainer, TrainingArguments


@click.command()
@click.option("--train-batch-size", type=int, default=8)
@click.option("--eval-batch-size", type=int, default=8)
@click.option("--accumulate", type=int, default=1)
@click.option("--deepspeed", type=str, default=None)
def main(train_batch_size: int, eval_batch_size: int, accumulate: int, deepspeed: str | None) -> None:
    """Train a tiny model."""
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    tokens = torch.arange(16)
    arguments = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=train_batch_size,
        per_device_eval_batch_size=eval_batch_size,
        gradient_accumulation_steps=accumulate,
        deepspeed=deepspeed,
        max_steps=2,
        learning_rate=1e-3,
        report_to="none",
    )
    trainer = Trainer(
        model=AutoModelForCausalLM.from_config(config),
        args=arguments,
        train_dataset=[{"input_ids": tokens, "labels": tokens}] * 32,
    )
    trainer.train()
    print(f"trained with {trainer.args.per_device_train_batch_size} x {trainer.args.gradient_accumulation_steps}")


if __name__ == "__main__":
    main()
