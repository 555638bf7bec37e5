"""The user's present config as the study means it: open batch sizes filled in, all of them explicit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from optuna_dsat.config import ds_config
from optuna_dsat.script.trainer import ScriptTrainer
from optuna_dsat.study.spec import StudySpec

__all__ = ["follow_trainer", "user_config"]


def user_config(spec: StudySpec, *, data_parallel_size: int | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the user's present config with its batch sizes made explicit, and the overlay that says the same.

    Args:
        spec: The study.
        data_parallel_size: Ranks that consume different samples; None for all.
    """
    config = ds_config.effective(spec.ds_config)
    triangle = ds_config.batch_triangle(config, world_size=data_parallel_size or spec.slots_per_trial)
    overlay = ds_config.batch_overlay(triangle.micro_batch, triangle.gradient_accumulation_steps)
    return ds_config.merge(config, overlay), overlay


def follow_trainer(spec: StudySpec, trainer: ScriptTrainer | None) -> StudySpec:
    """Return the spec as the script means it: open batch sizes filled in, its trainer's options following the config.

    A batch size that the user's config gives stays as it is. One that it leaves open is what the user gives as the
    option of ``--arg-mapping``, else what the trainer said. That mapping goes before the trainer's options.
    """
    config = dict(spec.ds_config)
    if _is_open(config.get(ds_config.TRAIN_BATCH)):  # else the batch sizes that it leaves open follow from it
        for key in (ds_config.MICRO_BATCH, ds_config.GRADIENT_ACCUMULATION):
            own = _mapped_value(spec, key) or (None if trainer is None else trainer.own(key))
            if own is not None and _is_open(config.get(key)):
                config[key] = own
    found = {} if trainer is None else trainer.options
    options = {key: _as_given(option, spec.script.args) for key, option in found.items()}
    script = spec.script.model_copy(update={"arg_mappings": {**options, **spec.script.arg_mappings}})
    return spec.model_copy(update={"ds_config": config, "script": script})


def _is_open(value: Any) -> bool:
    return value in (None, ds_config.AUTO)


def _mapped_value(spec: StudySpec, key: str) -> int | None:
    """Return the number that the user gives as the option mapped to a key, None where there is none."""
    option = spec.script.arg_mappings.get(key)
    args = spec.script.args
    for index, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        text = value if equals else "".join(args[index + 1 : index + 2])
        if name == option and text.isdigit():
            return int(text) or None
    return None


def _as_given(option: str, args: Sequence[str]) -> str:
    """Return the spelling of an option that the user gave: ``HfArgumentParser`` also takes dashes."""
    dashed = option.replace("_", "-")
    return dashed if any(arg.partition("=")[0] == dashed for arg in args) else option
