"""A Trainer by Determined's guide: python trainer_guide.py CONFIG --output_dir DIR [OPTIONS of TrainingArguments]."""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM, GPT2Config, HfArgumentParser, Trainer, TrainingArguments

import optuna_dsat

hparams = {"deepspeed_config": sys.argv[1]}
arguments = optuna_dsat.get_hf_args_with_overwrites(sys.argv[2:], hparams)
[training_args] = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(arguments, look_for_args_file=False)
config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
tokens = torch.arange(16)
trainer = Trainer(
    model=AutoModelForCausalLM.from_config(config),
    args=training_args,
    train_dataset=[{"input_ids": tokens, "labels": tokens}] * 64,
)
with optuna_dsat.dsat_reporting_context(None, op=None):
    trainer.train()
