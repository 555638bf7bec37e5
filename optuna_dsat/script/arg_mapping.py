"""Script options that follow the trial's config: for scripts whose batch size or ZeRO stage is an option."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from optuna_dsat.config.ds_config import GRADIENT_ACCUMULATION, MICRO_BATCH, TRAIN_BATCH, zero_section
from optuna_dsat.errors import UsageError
from optuna_dsat.runtime.adapt.config import with_option
from optuna_dsat.runtime.adapt.trainers import BF16_ENABLED, TRAINER_PRECISION
from optuna_dsat.runtime.overlay import is_bf16

STAGE = "zero_optimization.stage"
RANK_BATCH = "train_batch_size_per_gpu"
"""Samples of a rank in a global step, for options that a script divides by its accumulation steps."""
PASS_BATCH = "train_micro_batch_size"
"""Samples of a forward pass on all ranks, for options that a script divides by its ranks."""
MAPPABLE = (MICRO_BATCH, GRADIENT_ACCUMULATION, TRAIN_BATCH, RANK_BATCH, PASS_BATCH, STAGE)
"""Keys of a DeepSpeed config that an option of the script may follow, and two that follow from them."""


def parse_mappings(pairs: Mapping[str, str]) -> dict[str, str]:
    """Return the mappings with options in command-line form.

    DeepSpeed's ``autotuning.arg_mappings`` names options without dashes; two are prepended.

    Raises:
        UsageError: If a key cannot be mapped or an option is empty.
    """
    mappings = {}
    for written, name in pairs.items():
        key, option = written.strip(), name.strip()  # DeepSpeed's tutorial has a space after a key
        if key not in MAPPABLE:
            raise UsageError(f"An argument cannot be mapped to {key!r}; {', '.join(MAPPABLE)} can.")
        if not option.strip("-"):
            raise UsageError(f"The mapping of {key} names no option: write {key}=--OPTION.")
        mappings[key] = option if option.startswith("-") else f"--{option}"
    return mappings


def map_arguments(
    args: Sequence[str], mappings: Mapping[str, str], config: Mapping[str, Any], *, world_size: int
) -> tuple[str, ...]:
    """Return a script's arguments with the mapped options set to the values of ``config``.

    A present option (``--flag value`` or ``--flag=value``) is replaced, a missing option appended, except an unset
    stage. Options of the Hugging Face Trainer switch bf16 on.
    """
    if not mappings:
        return tuple(args)
    micro_batch = int(config[MICRO_BATCH])
    accumulation = int(config.get(GRADIENT_ACCUMULATION) or 1)
    values = {
        MICRO_BATCH: micro_batch,
        GRADIENT_ACCUMULATION: accumulation,
        TRAIN_BATCH: config.get(TRAIN_BATCH) or micro_batch * accumulation * world_size,
        RANK_BATCH: micro_batch * accumulation,
        PASS_BATCH: micro_batch * world_size,
        STAGE: zero_section(config).get("stage"),
    }
    result = list(args)
    for key, option in mappings.items():
        for name in option.split() if isinstance(values.get(key), int) else ():
            result = with_option(result, name, str(values[key]))
    if BF16_ENABLED in mappings and is_bf16(config):  # the last of several options counts
        result += [word for name, is_on in TRAINER_PRECISION.items() for word in (f"--{name}", str(is_on))]
    return tuple(result)
