"""DeepSpeed's compiled operators that the configurations of a search need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optuna_dsat.config.knobs import NVME, OFFLOAD_OPTIMIZER
from optuna_dsat.config.search_space import SearchSpace

__all__ = ["operators_of"]

_ON_HOST = {
    "adagrad": "CPUAdagradBuilder",
    "adam": "CPUAdamBuilder",
    "adamw": "CPUAdamBuilder",
    "lion": "CPULionBuilder",
}
"""Optimizer of the config -> builder of its operator if the optimizer is offloaded."""

_ON_DEVICE = {
    "adam": "FusedAdamBuilder",
    "adamw": "FusedAdamBuilder",
    "lamb": "FusedLambBuilder",
    "lion": "FusedLionBuilder",
}
"""Optimizer of the config -> builder of its operator if the optimizer is on the device."""


def operators_of(ds_config: Mapping[str, Any], space: SearchSpace) -> tuple[str, ...]:
    """Return the names of the operator builders that launches of a search may need.

    As chosen by ``DeepSpeedEngine._configure_basic_optimizer`` of DeepSpeed 0.19.8. An optimizer that the script builds
    itself provides its operator.

    Args:
        ds_config: The user's config.
        space: The search space.
    """
    optimizer = ds_config.get("optimizer")
    if not isinstance(optimizer, Mapping):
        return ()
    name = str(optimizer.get("type", "")).lower()
    params = optimizer.get("params")
    if isinstance(params, Mapping) and params.get("torch_adam"):
        return ()
    choices = {tuned.name: tuned.choices for tuned in space.knobs}
    offloads = choices.get(OFFLOAD_OPTIMIZER, ("none",)) if max(space.stages) > 0 else ("none",)
    found = set()
    if any(value != "none" for value in offloads) and name in _ON_HOST:
        found.add(_ON_HOST[name])
    if "none" in offloads and name in _ON_DEVICE:
        found.add(_ON_DEVICE[name])
    if "nvme" in offloads or (max(space.stages) == 3 and True in choices.get(NVME, ())):
        found.add("AsyncIOBuilder")
    return tuple(sorted(found))
