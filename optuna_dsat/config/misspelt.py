"""Misspelt keys of a DeepSpeed config, which DeepSpeed ignores without a word."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["misspelt_keys"]

_KEYS = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("optimizer", "scheduler", "fp16", "bf16", "zero_optimization", "activation_checkpointing", "steps_per_print"),
    *("communication_data_type", "prescale_gradients", "gradient_predivide_factor", "wall_clock_breakdown"),
)
"""Top-level keys that change the training: https://www.deepspeed.ai/docs/config-json/."""
_ALIKE = 0.9
"""Similarity from which on a key is taken for another one misspelt: keys of other tools differ more."""


def misspelt_keys(keys: Iterable[str]) -> dict[str, str]:
    """Return misspelt top-level key -> the key that it resembles.

    Args:
        keys: Keys of a config; of dotted keys the first part counts.
    """
    found = {}
    for key in dict.fromkeys(key.partition(".")[0] for key in keys):
        near = difflib.get_close_matches(key.strip().lower(), _KEYS, n=1, cutoff=_ALIKE)
        if near and key not in _KEYS:
            found[key] = near[0]
    return found
