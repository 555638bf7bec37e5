"""Merges the trial's overlay into the DeepSpeed config that the script passes, without mutating either."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a nested config as dotted key -> value, without empty objects; lists are values."""
    result: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            result |= {f"{key}.{below}": item for below, item in flatten(value).items()}
        else:
            result[key] = value
    return result


def nest(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with dotted keys, at any depth, as nested objects: ``{"a.b": 1}`` is ``{"a": {"b": 1}}``."""
    result: dict[str, Any] = {}
    for key, value in flatten(settings).items():
        set_value(result, key, value)
    return result


def set_value(config: dict[str, Any], key: str, value: Any) -> None:
    """Set the value at a dotted key of a nested config, whose missing sections are made."""
    *path, name = key.split(".")
    for part in path:
        if not isinstance(config.get(part), dict):
            config[part] = {}
        config = config[part]
    config[name] = value


ZERO = "zero_optimization"
TRAIN_BATCH, MICRO_BATCH = "train_batch_size", "train_micro_batch_size_per_gpu"
GRADIENT_ACCUMULATION = "gradient_accumulation_steps"
LEAF_MODULE = "leaf_module"
MODEL, CHECKPOINT_EVERY, COMPILE, BIND_CORES = "optuna_dsat", "checkpoint_every", "compile", "bind_cores"
"""Section of settings that change the model, its engine or its process, which DeepSpeed never gets, and its keys."""
_BATCH_KEYS = (TRAIN_BATCH, GRADIENT_ACCUMULATION, MICRO_BATCH)
"""Any two determine the third; in the order in which the script's value is dropped."""

_DEPRECATED_OFFLOAD = {
    "offload_optimizer": ("cpu_offload", "cpu_offload_use_pin_memory"),
    "offload_param": ("cpu_offload_params", "cpu_offload_param", "cpu_offload_use_pin_memory"),
}
"""Key -> deprecated keys that DeepSpeed rejects together with it (``deepspeed/runtime/zero/config.py``)."""

_DEEPSPEED_CPU_OPTIMIZERS = frozenset({"DeepSpeedCPUAdam", "DeepSpeedCPULion"})
"""Client optimizers that DeepSpeed accepts under offload without ``zero_force_ds_cpu_optimizer: false``."""


def merge(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` updated with ``overlay``: objects merge key by key, None removes a key.

    ``"auto"`` in the overlay does not replace a value of ``base``, which Hugging Face may have filled in. Neither
    argument is changed, and the result shares no objects with them.
    """
    merged = {key: _deep_copy(value) for key, value in base.items()}
    for key, value in overlay.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping):
            below = merged.get(key)
            merged[key] = merge(below if isinstance(below, Mapping) else {}, value)
        elif value != "auto" or key not in merged:
            merged[key] = _deep_copy(value)
    return merged


def checkpoint_every(config: Mapping[str, Any]) -> int:
    """Return the activation checkpointing of a complete config: of every so many blocks, 0 for none."""
    return int((config.get(MODEL) or {}).get(CHECKPOINT_EVERY) or 0)


def over_command(overlay: Mapping[str, Any], user: Mapping[str, Any]) -> dict[str, Any]:
    """Return an overlay of a launch over the ``user``'s config, with what the user's command does itself.

    Its checkpointing is left on where both have it, and its ranks keep their own cores unless the overlay differs.
    """
    settings: dict[str, Any] = {}
    if checkpoint_every(user) and checkpoint_every(overlay) == checkpoint_every(user):
        settings[CHECKPOINT_EVERY] = None
    if binds_cores(user) and (overlay.get(MODEL) or {}).get(BIND_CORES) is None:
        settings[BIND_CORES] = True
    return merge(overlay, {MODEL: settings} if settings else {})


def is_compiled(config: Mapping[str, Any]) -> bool:
    """Return whether a complete config has the engine compiled."""
    return bool((config.get(MODEL) or {}).get(COMPILE))


def binds_cores(config: Mapping[str, Any]) -> bool:
    """Return whether a complete config has each rank run on its own cores."""
    return bool((config.get(MODEL) or {}).get(BIND_CORES))


def is_bf16(config: Mapping[str, Any]) -> bool:
    """Return whether a config enables bf16 itself, and does not leave it open."""
    return (config.get("bf16") or {}).get("enabled") is True


def growing_samples(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted key -> last value of the first lengths in a config's curricula and random layerwise token dropping.

    Their samples grow during training. Trials start at the last length, which needs the most memory.
    """
    flat = flatten({key: config[key] for key in ("data_efficiency",) if key in config})
    firsts = {key: re.sub(r"\.min_(?=difficulty$|value$)", ".max_", key) for key in flat}
    return {key: flat[last] for key, last in firsts.items() if flat.get(last, flat[key]) != flat[key]}


def without_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without the settings that change the model."""
    return {key: value for key, value in config.items() if key != MODEL}


class LaidConfig(dict[str, Any]):
    """Config with the overlay applied long before ``deepspeed.initialize``; remembers the replaced values.

    Libraries keep and complete the config from their arguments, so only this class preserves the script's values.
    Copies by ``copy.deepcopy`` preserve them too.
    """

    def __init__(self, config: Mapping[str, Any], laid: Mapping[str, Any]) -> None:
        super().__init__(laid)
        before, after = flatten(scripts_own(config)), flatten(laid)
        self.noted: set[str] = set(config.noted) if isinstance(config, LaidConfig) else set()
        """Dotted keys passed to ``note_own``."""
        self._replaced = {
            key: (before.get(key), after.get(key))
            for key in {**before, **after}
            if before.get(key) != after.get(key) or key in self.noted
        }

    def note_own(self, key: str, value: Any) -> None:
        """Record the script's value of a setting that its config leaves to the library; the first call counts."""
        if key not in self.noted:
            self.noted.add(key)
            self._replaced[key] = (value, flatten(self).get(key))

    def scripts_own(self) -> dict[str, Any]:
        """Return the config with the script's values; later changes by the script or the library are kept."""
        result = flatten(self)
        for key, (before, after) in self._replaced.items():
            if result.get(key) == after or after == "auto":
                result[key] = before
        return nest({key: value for key, value in result.items() if value is not None})


def scripts_own(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config without the overlay, if it is a ``LaidConfig``; else unchanged."""
    return config.scripts_own() if isinstance(config, LaidConfig) else config


def effective_config(
    base: Mapping[str, Any], overlay: Mapping[str, Any], *, client_optimizer: object | None = None
) -> dict[str, Any]:
    """Return the config that DeepSpeed gets: the script's with the overlay applied, made consistent.

    - If train batch, micro-batch and accumulation are all given, the script's value is dropped.
    - Deprecated ``cpu_offload`` keys are removed if the overlay sets offload.
    - Offload with a client optimizer is allowed by ``zero_force_ds_cpu_optimizer``, as DeepSpeed's message advises.
    - The ``autotuning`` section is removed: DeepSpeed's own autotuning hooks end the process.
    """
    config = without_model(merge(base, overlay))
    config.pop("autotuning", None)
    if all(key in config for key in _BATCH_KEYS) and any(key in overlay for key in _BATCH_KEYS):
        open_key = next((key for key in _BATCH_KEYS if overlay.get(key) is None), None)
        if open_key is not None:
            del config[open_key]
    zero = config.get(ZERO)
    if isinstance(zero, dict):
        chosen = overlay.get(ZERO)
        for key, deprecated in _DEPRECATED_OFFLOAD.items():
            if isinstance(chosen, Mapping) and key in chosen:
                for old in deprecated:
                    zero.pop(old, None)
        offload = zero.get("offload_optimizer")
        device = offload.get("device") if isinstance(offload, Mapping) else None
        names = {cls.__name__ for cls in type(client_optimizer).__mro__}
        if (
            client_optimizer is not None
            and names.isdisjoint(_DEEPSPEED_CPU_OPTIMIZERS)
            and (device in ("cpu", "nvme") or zero.get("cpu_offload"))
        ):
            config.setdefault("zero_force_ds_cpu_optimizer", False)
    return config


def without_impossible_zero(laid: Mapping[str, Any], user: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config for an engine without an optimizer, such as a reference model.

    ZeRO 1 and 2 partition the optimizer, and DeepSpeed rejects them without an optimizer; the script's
    ``zero_optimization`` section is then kept.
    """
    config = dict(laid)
    zero = config.get(ZERO)
    if isinstance(zero, Mapping) and zero.get("stage") in (1, 2):
        config.pop(ZERO)
        if ZERO in user:
            config[ZERO] = _deep_copy(user[ZERO])
    return config


def read_config(config: Any) -> dict[str, Any]:
    """Read a config as DeepSpeed does: a dict, the path of a (H)JSON file, or base64 text.

    Raises:
        ValueError: If ``config`` is of another type, or the content is not a JSON object.
    """
    if isinstance(config, Mapping):
        return dict(config)
    try:
        try:
            text = Path(config).read_text(encoding="utf-8")
        except OSError:  # no such file, or too long for a file name
            text = base64.urlsafe_b64decode(config).decode("utf-8")
        parsed = _parse(text)
    except (OSError, TypeError, ValueError) as error:  # a wrong path is read as broken base64
        is_missing = str(config).endswith(".json") and not Path(config).is_file()
        missing = f", which is no file in {Path.cwd()}" if is_missing else ""
        raise ValueError(
            "deepspeed.initialize takes a config as a dict, the path of a JSON file or base64; "
            f"got {config!r}{missing}."
        ) from error
    if not isinstance(parsed, dict):
        raise ValueError(f"A DeepSpeed config is a JSON object; {config!r} holds {type(parsed).__name__}.")
    return parsed


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        import hjson  # DeepSpeed's dependency, for configs with comments

        return json.loads(hjson.dumpsJSON(hjson.loads(text)))


def _deep_copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _deep_copy(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_deep_copy(item) for item in value]
    return value
