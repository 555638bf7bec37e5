"""What the ``autotuning`` section of a config asks for, in terms of options."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from optuna_dsat.config import ds_config
from optuna_dsat.config.autotuning_section import Autotuning
from optuna_dsat.config.knobs import KNOBS, NVME
from optuna_dsat.launch.devices import detect_devices
from optuna_dsat.tuning.declaration import options_in
from optuna_dsat.tuning.given import Given
from optuna_dsat.tuning.options import AutotuningOptions, TuneOptions

__all__ = ["options_of", "with_autotuning"]

_METRICS = {
    "flops": "FLOPS_per_gpu",
    "throughput": "throughput",
    "latency": "latency",
    "forward": "forward",
    "backward": "backward",
    "step": "step",
}
"""DeepSpeed's metric, in lower case -> ours."""
_METHODS = {"random": "random", "gridsearch": "binary", "model_based": "asha"}
"""DeepSpeed's tuner -> the method nearest to it."""

_INSTEAD = {
    "results_dir": "--output-dir is used",
    "exps_dir": "--output-dir is used",
    "overwrite": "a study of the same name is continued",
    "metric_path": "steps are timed without a file of the script's",
    "model_info": "the profile launch measures the model",
    "model_info_path": "the profile launch measures the model",
    "num_tuning_micro_batch_sizes": "the method decides how many micro-batches it tries",
    "min_train_batch_size": "give min_train_micro_batch_size_per_gpu",
}
"""Ignored key -> what takes its place."""


def options_of(section: Autotuning) -> tuple[dict[str, Any], list[str]]:
    """Return the options that an ``autotuning`` section gives, and a line for each thing that is not honoured.

    Args:
        section: The section.

    Returns:
        Options by name (``method`` among them), for those that were not given otherwise; and lines such as
        ``autotuning.results_dir is not used: --output-dir is used``.
    """
    declared = options_in(AutotuningOptions)
    options = {name: getattr(section, one.autotuning) for name, one in declared.items() if one.autotuning is not None}
    notes = _not_honoured(section)
    if section.metric is not None:
        options["metric"] = _METRICS.get(section.metric.lower())
        if options["metric"] is None:
            notes.append(f"autotuning.metric is not used: {section.metric!r} is none of {', '.join(_METRICS)}.")
    if section.tuner_type is not None:
        options["method"] = method = _METHODS.get(section.tuner_type)
        if method is None:
            notes.append(f"autotuning.tuner_type is not used: {section.tuner_type!r} is none of {', '.join(_METHODS)}.")
        elif method != section.tuner_type:
            notes.append(f"autotuning.tuner_type {section.tuner_type} is not there: `tune` and `run` use {method}.")
    return {name: value for name, value in options.items() if value is not None}, notes


def _not_honoured(section: Autotuning) -> list[str]:
    """Return a line for each key of the section that has no counterpart here."""
    notes = [f"autotuning.{key} is not used: {_INSTEAD[key]}." for key in section.ignored]
    notes += [f"autotuning.{key} is not used: neither DeepSpeed nor this tuner knows it." for key in section.unknown]
    if section.enabled is False:
        notes.append("autotuning.enabled is false; the section is honoured all the same, since you started a tuner.")
    if section.num_nodes is not None and section.num_nodes > 1:
        notes.append(f"autotuning.num_nodes is not used: a launch runs on one machine, not on {section.num_nodes}.")
    if section.mp_size is not None and section.mp_size > 1:
        notes.append(
            f"autotuning.mp_size is not used: batch sizes are those of {section.mp_size} times as many data-parallel "
            "ranks as a model-parallel script has."
        )
    return notes


def with_autotuning(given: Given) -> tuple[Given, list[str]]:
    """Return the options, those that were not given taken from the config's ``autotuning`` section; and notes.

    The notes name what of the section is not honoured.

    Raises:
        ConfigError: If the config cannot be read.
    """
    options = given.options
    user = ds_config.load(None if options.ds_config is None else Path(options.ds_config))
    wanted, notes = options_of(user.autotuning)
    names = {field.name for field in fields(options)}
    offered = names - given.origins.keys()
    gpus = wanted.pop("gpus_per_trial", None)
    if gpus is not None and options.gpus_per_trial is None and options.cpu_ranks is None:
        found = detect_devices()
        available = len(found.devices) if found.kind == "cuda" else 0
        if gpus <= available:
            wanted["gpus_per_trial"] = gpus
        else:
            notes.append(f"autotuning.num_gpus is not used: it is {gpus}, and this machine offers {available} GPUs.")
    if user.autotuning.fast:
        wanted["no_tune"] = _kept_by_fast(options, user)
        offered.add("no_tune")
    if "method" in wanted and "method" not in offered:
        del wanted["method"]
        notes = [note for note in notes if "tuner_type" not in note]  # a method was named on the command line
    if "early_stopping" in wanted and "early_stopping" not in names:
        notes.append("autotuning.tuner_early_stopping is not used by this method.")
    taken: dict[str, Any] = {name: value for name, value in wanted.items() if name in offered}
    return given.with_values(taken, f"autotuning in {options.ds_config}"), notes


def _kept_by_fast(options: TuneOptions, user: ds_config.UserConfig) -> list[str]:
    """Return the knobs that ``autotuning.fast`` leaves as they are: all but the stage, listed and fixed knobs."""
    listed = {key.split(".")[1] for key in user.lists if "." in key}
    kept = {knob.name for knob in KNOBS if knob.name not in listed and knob.path[-1] != "stage"}
    return sorted({*(options.no_tune or ()), *kept} - set(options.fix or ()) - {NVME})
