"""DeepSpeed's compiled operators that the configurations of a search need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optuna_dsat.config.conditions import NVME, OFFLOAD_OPTIMIZER, OFFLOAD_PARAM
from optuna_dsat.config.ds_config import effective
from optuna_dsat.config.search_space import SearchSpace
from optuna_dsat.config.structures import Structure
from optuna_dsat.runtime.agent.operators import ASYNC_IO, COMMUNICATION

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


_DEEPSPEEDS_OWN = ("Fused", "DeepSpeed")
"""Prefixes of the classes of optimizers that have an operator."""


def operators_at_start(ds_config: Mapping[str, Any], *, device: str, to_nvme: bool = False) -> tuple[str, ...]:
    """Return the names of the operator builders needed to launch the user's config, and to offload ``to_nvme``."""
    config = effective(ds_config)
    structure, name = Structure.of(config), _own_optimizer(config)
    target = structure.offload_optimizer if structure.stage != 0 else "none"  # accelerate fills in "auto"
    names = {(_ON_DEVICE if target == "none" else _ON_HOST).get(name, "")} - {""}
    if to_nvme or (structure.stage == 3 and structure.nvme_count):
        names.add(ASYNC_IO)
    if device == "cpu":
        names.add(COMMUNICATION)
    return tuple(sorted(names))


def _own_optimizer(ds_config: Mapping[str, Any]) -> str:
    """Return the type of the config's optimizer in lower case; empty without an optimizer or with torch's optimizer."""
    optimizer = ds_config.get("optimizer")
    if not isinstance(optimizer, Mapping):
        return ""
    params = optimizer.get("params")
    is_torchs = isinstance(params, Mapping) and params.get("torch_adam")
    return "" if is_torchs else str(optimizer.get("type", "")).lower()


def operators_of(
    ds_config: Mapping[str, Any], space: SearchSpace, *, measured_with: str = "", replaced_on_host: bool = False
) -> tuple[str, ...]:
    """Return the names of the operator builders that launches of a search may need.

    As chosen by ``DeepSpeedEngine._configure_basic_optimizer`` of DeepSpeed 0.19.8. An optimizer that the script builds
    itself provides its operator.

    Args:
        ds_config: The user's config.
        space: The search space.
        measured_with: Class of the optimizer in the profile launch; empty if unknown.
        replaced_on_host: Whether accelerate prepares the script's optimizer: if offloaded, DeepSpeed's optimizer
            replaces it (``map_pytorch_optim_to_deepspeed`` of accelerate 1.15), unless the config forbids it.
    """
    name = _own_optimizer(ds_config)
    choices = {tuned.name: tuned.choices for tuned in space.knobs}
    offloads = choices.get(OFFLOAD_OPTIMIZER, ("none",)) if max(space.stages) > 0 else ("none",)
    names: set[str] = {ASYNC_IO} if swaps(space) else set()
    if not name or (name in _ON_DEVICE and measured_with and not measured_with.startswith(_DEEPSPEEDS_OWN)):
        # Without an optimizer in the config, or if the script builds its own.
        if not replaced_on_host or ds_config.get("zero_force_ds_cpu_optimizer") is False:
            return tuple(names)
        offloads = tuple(value for value in offloads if value != "none")
        name = measured_with.lower() if measured_with.lower() in _ON_HOST else "adam"
    if any(value != "none" for value in offloads) and name in _ON_HOST:
        names.add(_ON_HOST[name])
    if "none" in offloads and name in _ON_DEVICE:
        names.add(_ON_DEVICE[name])
    return tuple(sorted(names))


def swaps(space: SearchSpace) -> bool:
    """Return whether configurations of a space offload to NVMe, which DeepSpeed does at ZeRO 3 only."""
    choices = {tuned.name: tuned.choices for tuned in space.knobs}
    to_nvme = True in choices.get(NVME, ()) or "nvme" in (
        *choices.get(OFFLOAD_OPTIMIZER, ()),
        *choices.get(OFFLOAD_PARAM, ()),
    )
    return max(space.stages) == 3 and to_nvme
