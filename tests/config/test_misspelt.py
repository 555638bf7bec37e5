"""Misspelt keys of a config."""

from __future__ import annotations

from optuna_dsat.config.user_file import correction, misspelt_in_words, misspelt_keys


def test_misspelt_keys_are_found_with_the_key_that_they_resemble() -> None:
    keys = ["train_micro_batch_size_per_gpu ", "zero_optimisation.stage", "gradient_acumulation_steps", "BF16.enabled"]
    keys += ["optimizer.typ", "scheduler.parms.warmup_num_steps"]
    assert misspelt_keys(keys) == {
        "train_micro_batch_size_per_gpu ": "train_micro_batch_size_per_gpu",
        "zero_optimisation": "zero_optimization",
        "gradient_acumulation_steps": "gradient_accumulation_steps",
        "BF16": "bf16",
        "optimizer.typ": "optimizer.type",
        "scheduler.parms": "scheduler.params",
    }


def test_keys_that_are_right_or_of_others_are_not_misspelt() -> None:
    assert (
        misspelt_keys(["zero_optimization.stage", "fp16", "tensorboard", "autotuning.enabled", "optimizer.type"]) == {}
    )


def test_misspelt_keys_in_words_name_the_key_as_it_is_written() -> None:
    (text,) = misspelt_in_words(["bf16", "zero_optimisation"])
    assert text == "DeepSpeed ignores the key 'zero_optimisation' of the config; 'zero_optimization' is probably meant."


def test_a_wrong_key_is_corrected_by_a_known_name_that_it_resembles() -> None:
    known = ["stage", "offload_param"]
    assert correction("zero_optimization.stge", known) == (
        "Remove zero_optimization.stge, or write zero_optimization.stage"
    )
    assert correction("zero_optimization.unlike", known) == "Remove zero_optimization.unlike"
    assert correction("stag", known) == "Remove stag, or write stage"
    assert correction("fp16.enable", known) == "Remove fp16.enable, or write fp16.enabled"
