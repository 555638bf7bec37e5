"""Complete, merge, compare and write DeepSpeed configs. Imports neither torch nor DeepSpeed.

``effective`` removes extensions of a user's config that DeepSpeed does not accept (``optuna_dsat.config.user_file``).
``"auto"`` (filled in by Hugging Face) stays until an overlay replaces it.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna_dsat.config.autotuning_section import parse_autotuning as parse_autotuning
from optuna_dsat.config.autotuning_section import positive_int
from optuna_dsat.config.conditions import OFFLOAD_OPTIMIZER, OFFLOAD_PARAM
from optuna_dsat.config.knobs import KNOBS
from optuna_dsat.errors import ConfigError
from optuna_dsat.runtime.files import write_text_atomic
from optuna_dsat.runtime.overlay import GRADIENT_ACCUMULATION as GRADIENT_ACCUMULATION
from optuna_dsat.runtime.overlay import MICRO_BATCH as MICRO_BATCH
from optuna_dsat.runtime.overlay import TRAIN_BATCH as TRAIN_BATCH
from optuna_dsat.runtime.overlay import ZERO as ZERO
from optuna_dsat.runtime.overlay import flatten as flatten
from optuna_dsat.runtime.overlay import merge as merge
from optuna_dsat.runtime.overlay import set_value

AUTO = "auto"
"""Value that Hugging Face's integration replaces; treated as unset without the integration."""
AUTO_IN_WORDS = (
    '"auto" is filled in by the Hugging Face Trainer and, in part, by accelerate and Lightning, not by DeepSpeed'
)
ALL = "all"
"""Value that selects every choice of a knob, as in DeepSpeed's autotuner."""

MICRO_BATCH_CAP = 2**16
"""Default limit of the micro-batch, in samples per rank."""
BATCH_KEYS = (TRAIN_BATCH, MICRO_BATCH, GRADIENT_ACCUMULATION)
_AUTOTUNING = "autotuning"

ZERO_ALIASES = {
    "prefetch_bucket_size": "stage3_prefetch_bucket_size",
    "param_persistence_threshold": "stage3_param_persistence_threshold",
    "model_persistence_threshold": "stage3_model_persistence_threshold",
    "max_live_parameters": "stage3_max_live_parameters",
    "max_reuse_distance": "stage3_max_reuse_distance",
}
"""Field name of ``DeepSpeedZeroConfig``, which DeepSpeed accepts as well -> documented key."""

_OF_ZERO = tuple(knob for knob in KNOBS if knob.is_of_zero)
_ZERO_DEFAULTS: Mapping[str, Any] = {
    knob.path[1]: knob.default for knob in _OF_ZERO if len(knob.path) == 2 and knob.kind not in ("modules", "section")
}
"""DeepSpeed's defaults of the keys that have no section."""
_OFFLOAD_DEFAULTS: Mapping[str, Any] = {knob.path[2]: knob.default for knob in KNOBS if knob.is_in_offload}
"""DeepSpeed's defaults of the keys in the sections of offloads."""
_STAGE3_KEYS = frozenset(knob.path[1] for knob in _OF_ZERO if knob.stages == (3,)) - {OFFLOAD_OPTIMIZER}
_SIZES = frozenset(knob.path[1] for knob in _OF_ZERO if knob.kind == "size")
_ZERO_STAGE_KEYS = frozenset(knob.path[1] for knob in _OF_ZERO) - {"stage"}


OLD_OFFLOADS = {"cpu_offload": OFFLOAD_OPTIMIZER, "cpu_offload_param": OFFLOAD_PARAM}
"""Deprecated flag of ``zero_optimization`` -> the section that DeepSpeed derives from it."""
OLD_PINNING = "cpu_offload_use_pin_memory"
"""Deprecated flag for ``pin_memory`` of these sections."""


@dataclass(frozen=True)
class BatchTriangle:
    """Consistent batch sizes: train = micro x accumulation x data-parallel ranks."""

    train_batch_size: int
    micro_batch: int
    """Samples per rank and forward pass."""
    gradient_accumulation_steps: int


def zero_section(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``zero_optimization`` section in its current form.

    ``true`` (formerly short for stage 1) becomes an object, ``cpu_offload`` and ``cpu_offload_param`` become the
    offload sections that DeepSpeed itself derives from them, and field names of ``DeepSpeedZeroConfig`` the documented
    keys.
    """
    section = config.get(ZERO) or {}
    if isinstance(section, bool):
        return {"stage": 1, "allgather_bucket_size": config.get("allgather_size", 500_000_000)}
    zero = {ZERO_ALIASES.get(key, key): value for key, value in section.items() if value is not None}
    pin = zero.pop(OLD_PINNING, None)
    for old, new in OLD_OFFLOADS.items():
        if zero.pop(old, None) is True and new not in zero:
            zero[new] = {"device": "cpu"} if pin is None else {"device": "cpu", "pin_memory": pin}
    return zero


def offload_device(section: Mapping[str, Any] | None) -> str:
    """Return the device of an offload section; ``none`` also for ``"auto"``, for which trainers write their own."""
    device = (section or {}).get("device")
    return "none" if device in (None, AUTO) else str(device)


def knob_settings(config: Mapping[str, Any], *, zero: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ``zero_optimization`` section together with the knobs of other sections, each under its last key."""
    result = dict(zero)
    for section, key in (knob.path for knob in KNOBS if not knob.is_of_zero):
        settings = config.get(section)
        if isinstance(settings, Mapping) and settings.get(key) not in (None, AUTO):
            result[key] = settings[key]
    return result


def zero_default(key: str, *, stage: Any) -> Any:
    """Return DeepSpeed's default of a key of ``zero_optimization``, None if it is not a tuned key."""
    return stage == 3 if key == "overlap_comm" else _ZERO_DEFAULTS.get(key)


def size_limit(key: str, params_count: int) -> int:
    """Return the size, in elements, above which all values of a key are equivalent.

    No bucket holds more than all parameters. ``stage3_max_reuse_distance`` counts the elements until a parameter's next
    use, across the forward and the backward pass, hence twice the parameters.
    """
    return 2 * params_count if key == "stage3_max_reuse_distance" else params_count


def with_values(config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with other values at dotted keys; None removes a key and sections that become empty."""
    result = copy.deepcopy(dict(config))
    for key, value in values.items():
        if value is None:
            _remove(result, key.split("."))
        else:
            set_value(result, key, value)
    return result


def _remove(section: dict[str, Any], path: Sequence[str]) -> None:
    """Remove the key at a path, if it exists, and sections that become empty."""
    name, *below = path
    if not below:
        section.pop(name, None)
    elif isinstance(section.get(name), dict):
        _remove(section[name], below)
        if not section[name]:
            del section[name]


def precision_of(config: Mapping[str, Any]) -> str:
    """Return the precision that a config enables: ``fp16``, ``bf16`` or, without either, ``fp32``."""
    keys = {"fp16": "fp16", "bf16": "bf16", "bfloat16": "bf16"}
    return next((kind for key, kind in keys.items() if (config.get(key) or {}).get("enabled") is True), "fp32")


def leaves_precision(config: Mapping[str, Any]) -> bool:
    """Return whether a config leaves its precision to the script's library, by ``"auto"``."""
    return AUTO in [(config.get(key) or {}).get("enabled") for key in ("fp16", "bf16")]


def effective(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's config as DeepSpeed reads it, ready to train with: lists resolved, tuning keys removed.

    A list is replaced by its first element, ``"all"`` by DeepSpeed's default (the key is removed), deprecated offload
    keys by their successors; keys with None and the ``autotuning`` section are removed. ``"auto"`` stays. The input is
    not changed.
    """
    result = {key: value for key, value in config.items() if key != _AUTOTUNING and value is not None}
    if MICRO_BATCH in result:
        _resolve_list(result, MICRO_BATCH)
    if ZERO not in result:
        return merge(result, {})  # shares no objects with the argument
    zero = zero_section(config)
    for key in list(zero):
        _resolve_list(zero, key)
    for key in ("offload_optimizer", "offload_param"):
        section = zero.get(key)
        if isinstance(section, str):
            section = {"device": section}
        if isinstance(section, dict):
            section = dict(section)
            for name in list(section):
                _resolve_list(section, name)
            zero[key] = section
    result[ZERO] = zero
    return merge(result, {})  # shares no objects with the argument


def _resolve_list(section: dict[str, Any], key: str) -> None:
    """Replace a list by its first element; remove ``"all"``."""
    value = section.get(key)
    if isinstance(value, list):
        value = value[0] if value else ALL
        section[key] = value
    if value == ALL:
        del section[key]


def batch_triangle(config: Mapping[str, Any], *, world_size: int) -> BatchTriangle:
    """Complete the batch sizes of a config as ``deepspeed.runtime.config.DeepSpeedConfig`` does.

    Accumulation defaults to 1 unless the other two determine it. If neither batch size is given (all ``"auto"``), the
    micro-batch is 1; DeepSpeed itself refuses such a config, the search completes it.

    ``config`` is a DeepSpeed config; of a list of micro-batches the first counts.

    Raises:
        ConfigError: If the given numbers contradict each other; the message names the number to change and its new
            value.
    """
    train, micro, accumulation = (_given(config, key) for key in BATCH_KEYS)
    if train is None:
        micro, accumulation = micro or 1, accumulation or 1
        train = micro * accumulation * world_size
    elif micro is not None and accumulation is None:
        accumulation = train // (micro * world_size)
    elif micro is None:
        accumulation = accumulation or 1
        micro = train // (accumulation * world_size)
    if not micro or not accumulation or train != micro * accumulation * world_size:
        raise ConfigError(_contradiction(config, train=train, world_size=world_size), key=TRAIN_BATCH)
    return BatchTriangle(train_batch_size=train, micro_batch=micro, gradient_accumulation_steps=accumulation)


def data_parallel_ranks(config: Mapping[str, Any], ranks: int) -> int:
    """Return the largest divisor of ``ranks`` that a config's batch sizes agree with; ``ranks`` if none.

    The ranks of a pipeline's stages and of tensor parallelism share their samples.
    """
    for divisor in (number for number in range(ranks, 0, -1) if ranks % number == 0):
        with contextlib.suppress(ConfigError):
            batch_triangle(config, world_size=divisor)
            return divisor
    return ranks


def batch_overlay(micro_batch: int, gradient_accumulation_steps: int = 1) -> dict[str, Any]:
    """Return the overlay that sets these batch sizes; it removes the global batch, which follows from them."""
    return {TRAIN_BATCH: None, MICRO_BATCH: micro_batch, GRADIENT_ACCUMULATION: gradient_accumulation_steps}


def _given(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    if isinstance(value, list):
        value = value[0] if value else None
    return None if value in (None, AUTO, ALL) else positive_int(value, key)


def _contradiction(config: Mapping[str, Any], *, train: int, world_size: int) -> str:
    micro, accumulation = _given(config, MICRO_BATCH), _given(config, GRADIENT_ACCUMULATION)
    named = [(micro, MICRO_BATCH), (accumulation, GRADIENT_ACCUMULATION)]
    factors = [f"{value} ({key})" for value, key in named if value is not None]
    unit = (micro or 1) * (accumulation or 1) * world_size
    product = " x ".join([*factors, "1 rank" if world_size == 1 else f"{world_size} ranks"])
    if micro is not None and accumulation is not None:
        rule, remedy = f"must be {product} = {unit}", f"set {TRAIN_BATCH} to {unit}, or leave one of the three out"
    else:
        below = train - train % unit
        near = f"{below} or {below + unit}" if below else f"{unit}"
        rule, remedy = f"must be a multiple of {product} = {unit}", f"set it to {near}, or use another number of ranks"
    return f"{TRAIN_BATCH} is {train}, but {rule}: {remedy}."


def canonical_key(config: Mapping[str, Any], *, params_count: int | None = None) -> str:
    """Return a key that is equal for configs with equal behaviour in DeepSpeed (32 hexadecimal digits, SHA-256).

    Ignored are key order, the spelling of numbers (``5e8``), values equal to DeepSpeed's defaults, offload to ``none``,
    sections that are empty or not enabled, knobs that the stage does not read, and bucket sizes beyond
    ``params_count``. The config has no lists (:func:`effective`).
    """
    plain = {key: value for key, value in _canonical(effective(config)).items() if value not in ({}, _OFF)}
    zero = canonical_zero(plain.pop(ZERO, {}), params_count)
    if plain.get(GRADIENT_ACCUMULATION) == 1 and MICRO_BATCH in plain:
        del plain[GRADIENT_ACCUMULATION]
    if zero:
        plain[ZERO] = zero
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


_OFF = {"enabled": False}
"""A section that is switched off, without its other settings."""


def _canonical(value: Any) -> Any:
    if isinstance(value, Mapping):
        if value.get("enabled") is False:
            return _OFF
        return {key: _canonical(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    return canonical_number(value)


def canonical_number(value: Any) -> Any:
    """Return an integral float as an int (5e7 as 50000000), any other value unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def canonical_zero(zero: Mapping[str, Any], params_count: int | None) -> dict[str, Any]:
    """Return a ZeRO section without settings that have no effect in DeepSpeed (see ``canonical_key``)."""
    stage = zero.get("stage", 0)
    if stage == 0:
        return {key: value for key, value in zero.items() if key not in _ZERO_STAGE_KEYS | {"stage"}}
    result: dict[str, Any] = {}
    for key, value in zero.items():
        if key in _STAGE3_KEYS and stage != 3:
            continue
        default = zero_default(key, stage=stage)
        if key in ("offload_optimizer", "offload_param"):
            if isinstance(value, Mapping) and offload_device(value) != "none":
                result[key] = {name: item for name, item in value.items() if item != _OFFLOAD_DEFAULTS.get(name)}
        elif key in _SIZES and params_count is not None and isinstance(value, int):
            limit = size_limit(key, params_count)
            capped = min(value, limit)
            if capped != min(default, limit):
                result[key] = capped
        elif value != default:
            result[key] = value
    result["stage"] = stage
    return result


def write_json_atomic(path: str | Path, data: Mapping[str, Any] | Iterable[Any], *, private: bool = False) -> None:
    """Write ``data`` as indented JSON atomically, or raise ``OSError``; if ``private``, only its owner may read it."""
    text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    write_text_atomic(Path(path), text, durable=True, mode=0o600 if private else 0o644)
