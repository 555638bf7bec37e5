"""A Hugging Face Trainer whose arguments stand in a YAML file that the command names, parsed from its text."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import yaml
from transformers import AutoModelForCausalLM, GPT2Config, HfArgumentParser, Trainer, TrainingArguments

settings = yaml.safe_load(Path(sys.argv[1]).read_text())
(arguments,) = HfArgumentParser(TrainingArguments).parse_dict({**settings, "deepspeed": sys.argv[2]})
config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
tokens = torch.arange(16)
trainer = Trainer(
    model=AutoModelForCausalLM.from_config(config),
    args=arguments,
    train_dataset=[{"input_ids": tokens, "labels": tokens}] * 32,
)
trainer.train()
print(f"trained with {trainer.args.per_device_train_batch_size}")
