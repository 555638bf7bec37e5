"""Supported keys of the ``autotuning`` section of a DeepSpeed config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from optuna_dsat.config.documents import as_written
from optuna_dsat.errors import ConfigError


@dataclass(frozen=True)
class Autotuning:
    """Supported keys of an ``autotuning`` section; None for unset keys."""

    enabled: bool | None = None
    fast: bool | None = None
    """Whether only ZeRO stage and micro-batch are tuned."""
    start_profile_step: int | None = None
    """Also read from ``start_step``."""
    end_profile_step: int | None = None
    """Also read from ``end_step``."""
    metric: str | None = None
    """``latency``, ``throughput``, ``flops`` and so on, as written."""
    arg_mappings: Mapping[str, str] | None = None
    """DeepSpeed key -> argument of the script that must have the same value."""
    min_train_micro_batch_size_per_gpu: int | None = None
    max_train_micro_batch_size_per_gpu: int | None = None
    max_train_batch_size: int | None = None
    tuner_type: str | None = None
    tuner_num_trials: int | None = None
    tuner_early_stopping: int | None = None
    num_gpus: int | None = None
    """The largest of a list."""
    gpu_counts: tuple[int, ...] = ()
    """List of ``num_gpus`` in ascending order, each searched separately; empty for a single number or if unset."""
    num_nodes: int | None = None
    """The largest of a list."""
    node_counts: tuple[int, ...] = ()
    """List of ``num_nodes`` in ascending order; empty for a single number or if unset."""
    mp_size: int | None = None
    ignored: tuple[str, ...] = ()
    """Keys of DeepSpeed's autotuner without a meaning for optuna-dsat (folders, ``model_info``...)."""
    unknown: tuple[str, ...] = ()
    """Keys also unknown to DeepSpeed's autotuner."""


_RENAMED = {"start_step": "start_profile_step", "end_step": "end_profile_step", "num_trials": "tuner_num_trials"}
IGNORED = {
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
_COUNTS = frozenset(field_.name for field_ in fields(Autotuning) if field_.type == "int | None")
_MAY_BE_LISTS = frozenset({"num_gpus", "num_nodes", "mp_size"})


def parse_autotuning(config: Mapping[str, Any], *, path: str = "<config>") -> Autotuning:
    """Read the ``autotuning`` section of a config, if any; ``ConfigError`` for wrong types or contradicting bounds."""
    written = (config.get("autotuning") or {}).items()
    section = {key.strip(): value.strip() if isinstance(value, str) else value for key, value in written}
    known = {field.name for field in fields(Autotuning)} - {"ignored", "unknown", "gpu_counts", "node_counts"}
    values: dict[str, Any] = {}
    for key, value in section.items():
        name = _RENAMED.get(key, key)
        if name in known and value is not None:
            values[name] = _autotuning_value(name, value, where=f"{path}: autotuning.")
    low, high = values.get("min_train_micro_batch_size_per_gpu"), values.get("max_train_micro_batch_size_per_gpu")
    if low is not None and high is not None and low > high:
        raise ConfigError(f"{path}: autotuning.min_train_micro_batch_size_per_gpu is {low}, above the maximum {high}.")
    return Autotuning(
        **values,
        gpu_counts=_listed(section.get("num_gpus")),
        node_counts=_listed(section.get("num_nodes")),
        ignored=tuple(sorted(IGNORED.keys() & section.keys())),
        unknown=tuple(sorted(section.keys() - known - _RENAMED.keys() - IGNORED.keys())),
    )


def _listed(counts: Any) -> tuple[int, ...]:
    """Return a list's numbers in ascending order; empty if the value is not a list."""
    return tuple(sorted({int(count) for count in counts})) if isinstance(counts, list) else ()


def _autotuning_value(name: str, value: Any, *, where: str) -> Any:
    if name in _COUNTS:
        if name in _MAY_BE_LISTS and isinstance(value, list) and value:
            return max(positive_int(item, name, where=where) for item in value)
        return positive_int(value, name, where=where)
    if name in ("enabled", "fast") and not isinstance(value, bool):
        raise ConfigError(f"{where}{name} is {as_written(value)}; it must be true or false.")
    if name == "arg_mappings":
        if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
            raise ConfigError(
                f"{where}{name} is {as_written(value)}; it must map DeepSpeed keys to names of script arguments."
            )
        return dict(value)
    if name in ("metric", "tuner_type") and not isinstance(value, str):
        raise ConfigError(f"{where}{name} is {as_written(value)}; it must be a string.")
    return value


def positive_int(value: Any, key: str, *, where: str = "") -> int:
    """Return an integer from 1, also from ``8.0``; else ``ConfigError`` names the value by ``where`` and ``key``."""
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not 1 <= value < math.inf
        or value != int(value)
    ):
        raise ConfigError(f"{where}{key} is {as_written(value)}; it must be a whole number of at least 1.")
    return int(value)
