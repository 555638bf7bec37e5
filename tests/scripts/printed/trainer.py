"""A Hugging Face Trainer whose schedule's length stands in its config: trainer.py [OPTIONS of TrainingArguments]."""

import torch
from transformers import AutoModelForCausalLM, GPT2Config, HfArgumentParser, Trainer, TrainingArguments

[training_args] = HfArgumentParser((TrainingArguments,)).parse_args_into_dataclasses()
config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
tokens = torch.arange(16)
Trainer(
    model=AutoModelForCausalLM.from_config(config),
    args=training_args,
    train_dataset=[{"input_ids": tokens, "labels": tokens}] * 64,
).train()
