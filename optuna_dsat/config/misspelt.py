"""Misspelt keys of a DeepSpeed config, which DeepSpeed silently ignores or rejects."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_KEYS = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("optimizer", "scheduler", "fp16", "bf16", "zero_optimization", "activation_checkpointing", "steps_per_print"),
    *("communication_data_type", "prescale_gradients", "gradient_predivide_factor", "wall_clock_breakdown"),
)
"""Top-level keys that change the training: https://www.deepspeed.ai/docs/config-json/."""
_ALIKE = 0.9
"""Minimum similarity of a misspelt key to the correct key; keys of other tools differ more."""
_ALIKE_IF_WRONG = 0.8
"""Minimum similarity for a key that is known to be wrong."""


def misspelt_keys(keys: Iterable[str]) -> dict[str, str]:
    """Return misspelt top-level key -> the key that it resembles.

    Args:
        keys: Keys of a config; of dotted keys the first part counts.
    """
    result = {}
    for key in dict.fromkeys(key.partition(".")[0] for key in keys):
        near = near_key(key, _KEYS, alike=_ALIKE)
        if near and key not in _KEYS:
            result[key] = near
    return result


def near_key(key: str, known: Iterable[str], *, alike: float = _ALIKE_IF_WRONG) -> str:
    """Return the known key that a key resembles, else an empty string."""
    return next(iter(difflib.get_close_matches(key.strip().lower(), list(known), n=1, cutoff=alike)), "")


def misspelt_in_words(keys: Iterable[str]) -> list[str]:
    """Return a sentence for each of ``misspelt_keys``."""
    result = misspelt_keys(keys).items()
    return [f"DeepSpeed ignores the key {key!r} of the config; {meant!r} is probably meant." for key, meant in result]


def correction(key: str, known: Iterable[str]) -> str:
    """Return the remedy for a key that is invalid in its section: remove it, or use the known key it resembles."""
    section, _, name = key.rpartition(".")
    near = near_key(name, known)
    corrected = f"{section}.{near}" if section else near
    return f"Remove {key}, or write {corrected}" if near else f"Remove {key}"
