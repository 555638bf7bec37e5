"""Optional helpers for scripts that train with the Hugging Face Trainer.

In a launch of optuna-dsat the runtime already sets the batch sizes of ``TrainingArguments`` and keeps the Trainer from
evaluating and saving. These helpers are for scripts that merge another configuration into their arguments outside of a
launch, and for scripts written for Determined's ``dsat``.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from optuna_dsat.runtime.adapt.config import with_option
from optuna_dsat.runtime.adapt.hugging_face import TRAINER_FIELDS, note_own_options
from optuna_dsat.runtime.overlay import effective_config, nest, read_config
from optuna_dsat.runtime.rank import LaunchPlan, current_plan

__all__ = ["DsatCallback", "get_hf_args_with_overwrites"]

_CONFIG_OPTION = "--deepspeed"
_OVERWRITES = "overwrite_deepspeed_args"
_CONFIG = "deepspeed_config"


def get_hf_args_with_overwrites(args: Sequence[str], hparams: Mapping[str, Any] | None = None) -> list[str]:
    """Return a script's arguments with options set to the values of the DeepSpeed config.

    ``--per_device_train_batch_size``, ``--gradient_accumulation_steps`` and ``--deepspeed`` (which gets the whole
    config) are overridden if given, else appended. A study's baseline keeps the batch sizes in ``args``.

    Args:
        args: The script's arguments, without its name.
        hparams: ``deepspeed_config`` (a path, or the config itself) and ``overwrite_deepspeed_args`` to merge into it,
            as in Determined's ``dsat``. None for the configuration of the current launch; outside of a launch the
            arguments are then returned unchanged.

    Raises:
        ValueError: If ``hparams`` has no config, or the config cannot be read.
    """
    if hparams is None:
        plan = current_plan()
        if plan is None:
            return list(args)
        hparams = {_CONFIG: plan.config_path, _OVERWRITES: plan.overlay}
    if hparams.get(_CONFIG) is None:
        raise ValueError(f"hparams must name the DeepSpeed config as {_CONFIG!r}; it has {sorted(hparams)}.")
    overwrites = nest(hparams.get(_OVERWRITES) or {})
    config = effective_config(read_config(hparams[_CONFIG]), overwrites)
    note_own_options({field: _number_of(args, f"--{field}") for field in TRAINER_FIELDS.values()})
    result = list(args)
    for key, field in TRAINER_FIELDS.items():
        if isinstance(config.get(key), int):
            result = with_option(result, f"--{field}", str(config[key]))
    named = hparams[_CONFIG]
    if overwrites or isinstance(named, Mapping):
        # Every version of transformers accepts Base64 instead of a path.
        value = base64.urlsafe_b64encode(json.dumps(config).encode()).decode()
    else:
        value = str(Path(named))
    return with_option(result, _CONFIG_OPTION, value)


class DsatCallback(TrainerCallback):  # type: ignore[misc]  # the library's types are not checked here
    """Checks that a Trainer uses the batch sizes of the current launch, and disables evaluation and saving.

    Evaluation and saving are disabled in measured launches. Outside of a launch the callback does nothing, so it can
    stay in the script.

    Args:
        plan: The launch; None for the current one, if any.
    """

    def __init__(self, plan: LaunchPlan | None = None) -> None:
        self._plan = current_plan() if plan is None else plan

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compare the batch sizes of ``TrainingArguments`` with the launch's.

        Raises:
            ValueError: If they differ, since the launch would measure a different configuration.
        """
        del state, control, kwargs
        for key, field in TRAINER_FIELDS.items() if self._plan is not None else ():
            wanted = self._plan.overlay.get(key) if self._plan is not None else None
            if isinstance(wanted, int) and getattr(args, field) != wanted:
                raise ValueError(
                    f"{field} is {getattr(args, field)}, but this launch is to run with {wanted}. Set it before the "
                    "training starts, with get_hf_args_with_overwrites or from the DeepSpeed config."
                )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Keep the Trainer from evaluating and saving in measured launches."""
        del args, state, kwargs
        if self._plan is not None and self._plan.measures:
            control.should_evaluate = control.should_save = False
        return control

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Keep the Trainer from evaluating and saving in measured launches."""
        return self.on_step_end(args, state, control, **kwargs)


def _number_of(args: Sequence[str], option: str) -> int | None:
    """Return the integer value of an option in the arguments, or None."""
    number = None
    for arg, following in zip(args, [*args[1:], ""], strict=False):
        name, equals, value = arg.partition("=")
        text = value if equals else following
        if name in (option, option.replace("_", "-")) and text.isdigit():
            number = int(text)  # the last occurrence counts
    return number
