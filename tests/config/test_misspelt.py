"""Misspelt keys of a config."""

from __future__ import annotations

from optuna_dsat.config.misspelt import misspelt_keys


def test_misspelt_keys_are_found_with_the_key_that_they_resemble() -> None:
    keys = ["train_micro_batch_size_per_gpu ", "zero_optimisation.stage", "gradient_acumulation_steps", "BF16.enabled"]
    assert misspelt_keys(keys) == {
        "train_micro_batch_size_per_gpu ": "train_micro_batch_size_per_gpu",
        "zero_optimisation": "zero_optimization",
        "gradient_acumulation_steps": "gradient_accumulation_steps",
        "BF16": "bf16",
    }


def test_keys_that_are_right_or_of_others_are_not_misspelt() -> None:
    assert misspelt_keys(["zero_optimization.stage", "fp16", "tensorboard", "autotuning.enabled", "optimizer"]) == {}
