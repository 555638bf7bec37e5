"""Train a small language model with the Hugging Face Trainer, on synthetic tokens: on GPUs, or on a CPU without any.

    torchrun --nproc_per_node 2 train.py --deepspeed ds_config.json --output_dir output --do_train --do_eval

In the shape of the library's own examples: what the Trainer takes stands on the command line, ``"auto"`` in the
DeepSpeed config. The model is built from a config object, so nothing is downloaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, GPT2Config, HfArgumentParser, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

VOCABULARY = 256
"""Different tokens."""


@dataclass
class ModelArguments:
    """The model's size."""

    layers: int = field(default=2, metadata={"help": "transformer blocks"})
    hidden: int = field(default=64, metadata={"help": "width; a multiple of 4, the number of heads"})


@dataclass
class DataArguments:
    """The data's size."""

    samples: int = field(default=2048, metadata={"help": "sequences to train on"})
    sequence: int = field(default=64, metadata={"help": "tokens in a sequence"})


class CountingTokens(Dataset[dict[str, torch.Tensor]]):
    """Sequences that count upwards in steps of 1 to 8 from anywhere."""

    def __init__(self, size: int, sequence: int) -> None:
        self.size = size
        self.sequence = sequence

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return the tokens of one sample, the same whenever asked; the model shifts the labels itself."""
        tokens = (index * 7919 + (index % 8 + 1) * torch.arange(self.sequence)) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=data_args.sequence,
        n_embd=model_args.hidden,
        n_layer=model_args.layers,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    trainer = Trainer(
        model=AutoModelForCausalLM.from_config(config),  # under ZeRO 3 it is built in partitions
        args=training_args,
        train_dataset=CountingTokens(data_args.samples, data_args.sequence),
        eval_dataset=CountingTokens(64, data_args.sequence),
    )
    if training_args.do_train:
        found = Path(training_args.output_dir).is_dir()
        checkpoint = get_last_checkpoint(training_args.output_dir) if found else None
        result = trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model()
        trainer.log_metrics("train", result.metrics)
        trainer.save_metrics("train", result.metrics)
    if training_args.do_eval:
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
