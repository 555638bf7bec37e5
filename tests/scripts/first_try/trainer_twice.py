"""A Trainer whose arguments are built from a file, then again with the options: trainer_twice.py OUTPUT CONFIG."""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM, GPT2Config, Trainer, TrainingArguments

config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
tokens = torch.arange(16)
of_file = {"output_dir": sys.argv[1], "per_device_train_batch_size": 2, "max_steps": 4, "report_to": "none"}
TrainingArguments(**of_file)
Trainer(
    model=AutoModelForCausalLM.from_config(config),
    args=TrainingArguments(**of_file, deepspeed=sys.argv[2]),
    train_dataset=[{"input_ids": tokens, "labels": tokens}] * 16,
).train()
