"""Optional helpers for scripts that train with the Hugging Face Trainer, with the names of Determined's ``dsat``.

In a launch of optuna-dsat the runtime itself sets the batch sizes of ``TrainingArguments`` and keeps the Trainer from
evaluating and saving.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from optuna_dsat.runtime.adapt.config import with_option
from optuna_dsat.runtime.adapt.trainers import TRAINER_FIELDS
from optuna_dsat.runtime.overlay import effective_config, nest, read_config
from optuna_dsat.runtime.rank import current_plan

_CONFIG_OPTION = "--deepspeed"
_OVERWRITES = "overwrite_deepspeed_args"
_CONFIG = "deepspeed_config"


def get_hf_args_with_overwrites(args: Sequence[str], hparams: Mapping[str, Any] | None = None) -> list[str]:
    """Return a script's arguments with options set to the values of the DeepSpeed config.

    ``--per_device_train_batch_size``, ``--gradient_accumulation_steps`` and ``--deepspeed`` (which gets the whole
    config) are overridden if given, else appended. In a launch, batch sizes stay as in ``args``: they are the study's
    baseline, and the runtime sets the launch's.

    Args:
        args: The script's arguments, without its name.
        hparams: ``deepspeed_config`` (a path, or the config itself) and ``overwrite_deepspeed_args`` to merge into it,
            as in Determined's ``dsat``. None for the configuration of the current launch; outside of a launch the
            arguments are then returned unchanged.

    Raises:
        ValueError: If ``hparams`` has no config, or the config cannot be read.
    """
    plan = current_plan()
    if hparams is None:
        if plan is None:
            return list(args)
        hparams = {_CONFIG: plan.config_path, _OVERWRITES: plan.overlay}
    if hparams.get(_CONFIG) is None:
        raise ValueError(f"hparams must name the DeepSpeed config as {_CONFIG!r}; it has {sorted(hparams)}.")
    overwrites = nest(hparams.get(_OVERWRITES) or {})
    config = effective_config(read_config(hparams[_CONFIG]), overwrites)
    result = list(args)
    for key, field in TRAINER_FIELDS.items():
        if plan is None and isinstance(config.get(key), int):
            result = with_option(result, f"--{field}", str(config[key]))
    named = hparams[_CONFIG]
    if overwrites or isinstance(named, Mapping):
        # Every version of transformers accepts Base64 instead of a path.
        value = base64.urlsafe_b64encode(json.dumps(config).encode()).decode()
    else:
        value = str(Path(named))
    return with_option(result, _CONFIG_OPTION, value)


class DsatCallback(TrainerCallback):  # type: ignore[misc]  # the library's types are not checked here
    """Does nothing: for scripts written for Determined's ``dsat``, whose callback reports steps."""
