"""Reading and checking a user's DeepSpeed config.

It may contain three things that DeepSpeed itself does not accept: lists as values of knobs (the user's narrowing of the
search), the word ``"all"`` in their place, and the ``autotuning`` section.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna_dsat.config.autotuning_section import Autotuning, parse_autotuning, positive_int
from optuna_dsat.config.documents import checked, read_document, read_hjson
from optuna_dsat.config.ds_config import ALL, AUTO, GRADIENT_ACCUMULATION, MICRO_BATCH, TRAIN_BATCH, ZERO
from optuna_dsat.errors import ConfigError

__all__ = ["UserConfig", "load", "parse"]

_SECTIONS = (
    "optimizer", "scheduler", "fp16", "bf16", "bfloat16", "autotuning",
    "activation_checkpointing", "aio", "amp", "checkpoint", "comet", "comms_logger", "compile", "compression_training",
    "csv_monitor", "curriculum_learning", "data_efficiency", "data_types", "eigenvalue", "elasticity", "flops_profiler",
    "hybrid_engine", "nebula", "pipeline", "progressive_layer_drop", "sparse_attention", "tensor_parallel",
    "tensorboard", "torch_autocast", "wandb",
)  # fmt: skip
"""Keys of a config that are objects, and whatever else stands there ``DeepSpeedConfig`` 0.19.8 refuses."""


@dataclass(frozen=True, kw_only=True)
class UserConfig:
    """A DeepSpeed config file as the user wrote it."""

    path: str
    """Path of the file as given by the user."""
    raw: Mapping[str, Any]
    """The whole config, lists and ``autotuning`` section included."""
    autotuning: Autotuning
    lists: Mapping[str, tuple[Any, ...]]
    """Dotted key -> the values listed there, for every knob that the user narrowed; ``("all",)`` for ``"all"``."""


def load(path: str | Path | None) -> UserConfig:
    """Read a user's DeepSpeed config; an empty one if there is no file.

    Raises:
        ConfigError: If the file is missing, a directory, unreadable, empty, not UTF-8, not JSON, no object,
            or names a key twice; the message gives the file, and line and column where they are known.
    """
    if path is None:
        return UserConfig(path="", raw={}, autotuning=parse_autotuning({}), lists={})
    try:
        data = read_document(path, ConfigError)
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such DeepSpeed config file.") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a directory; name the DeepSpeed config file in it.") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}, line {line}: not UTF-8 text (byte {error.start}); save the file as UTF-8."
        ) from None
    return parse(text, path=str(path))


def parse(text: str, *, path: str = "<config>") -> UserConfig:
    """Read a user's DeepSpeed config from its text; ``path`` is named in messages.

    Raises:
        ConfigError: As :func:`load`.
    """
    if not text.strip():
        raise ConfigError(f"{path} is empty; a DeepSpeed config is a JSON object, such as "
                          '{"train_micro_batch_size_per_gpu": 1}.')  # fmt: skip
    try:
        raw = json.loads(text, object_pairs_hook=lambda pairs: _unique(pairs, path), parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        if path.endswith(".py"):
            raise ConfigError(
                f"{path} is Python, no config. Name the training script first, its config second."
            ) from None
        if path.endswith((".yaml", ".yml")) and not text.lstrip().startswith("{"):
            raise ConfigError(
                f"{path} is YAML, which DeepSpeed does not read. Leave it out: what the script passes to "
                "deepspeed.initialize is tuned then. Or convert it to JSON."
            ) from None
        raw = read_hjson(text)
        if not isinstance(raw, dict):
            where = f"{path}, line {error.lineno}, column {error.colno}"
            raise ConfigError(f"{where}: not JSON ({error.msg}), nor HJSON.") from None
    except ValueError:
        raise ConfigError(f"{path}: holds a whole number of more than 64 bits.") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply to be a DeepSpeed config.") from None
    except _BadConstantError as error:
        raise ConfigError(f"{path}: {error} is no JSON number.") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: a DeepSpeed config is a JSON object, this is {_kind(raw)}.")
    _check_shape(checked(raw, path, ConfigError), path)
    return UserConfig(path=path, raw=raw, autotuning=parse_autotuning(raw, path=path), lists=_lists(raw))


class _BadConstantError(Exception):
    """NaN or Infinity in a config."""


def _no_constant(name: str) -> Any:
    raise _BadConstantError(name)


def _unique(pairs: list[tuple[str, Any]], path: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ConfigError(
                f"{path}: the key {key!r} is given twice in one object; DeepSpeed refuses that. Keep one."
            )
        result[key] = value
    return result


def _kind(value: Any) -> str:
    names = {
        list: "a list", dict: "an object", str: "a string", bool: "a truth value", int: "a number", float: "a number",
    }  # fmt: skip
    return names.get(type(value), "null")


def _check_shape(raw: Mapping[str, Any], path: str) -> None:
    """Refuse values whose type no later step accepts."""
    zero = raw.get(ZERO, {})
    if not isinstance(zero, dict | bool):
        raise ConfigError(f"{path}: {ZERO} is {_kind(zero)}; it must be an object.")
    for key in _SECTIONS:
        section = raw.get(key, {})
        if not isinstance(section, dict):
            raise ConfigError(f"{path}: {key} is {_kind(section)}; it must be an object.")
    for key in ("optimizer", "scheduler"):
        section = raw.get(key, {})
        kind, params = section.get("type"), section.get("params")
        if isinstance(kind, list):
            raise ConfigError(f"{path}: {key}.type is a list, but is not searched; give one name.")
        if kind is not None and not isinstance(kind, str):
            raise ConfigError(f"{path}: {key}.type is {_kind(kind)}; it must be a string.")
        if params is not None and not isinstance(params, dict):
            raise ConfigError(f"{path}: {key}.params is {_kind(params)}; it must be an object.")
    for key in (TRAIN_BATCH, GRADIENT_ACCUMULATION):
        if isinstance(raw.get(key), list):
            raise ConfigError(f"{path}: {key} is a list, but is not searched; give one number.")
    for key in (TRAIN_BATCH, MICRO_BATCH, GRADIENT_ACCUMULATION):
        value = raw.get(key)
        for one in value if isinstance(value, list) else [value]:
            if one not in (None, AUTO, ALL):
                positive_int(one, key, where=f"{path}: ")
    for key, values in _lists(raw).items():
        if not values:
            raise ConfigError(f"{path}: {key} is an empty list; list at least one value or leave the key out.")


def _lists(raw: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return dotted key -> the list (or ``"all"``) that the user wrote in place of a knob's value."""
    found: dict[str, tuple[Any, ...]] = {}

    def note(key: str, value: Any) -> None:
        if isinstance(value, list):
            found[key] = tuple(value)
        elif value == ALL:
            found[key] = (ALL,)

    note(MICRO_BATCH, raw.get(MICRO_BATCH))
    zero = raw.get(ZERO)
    for key, value in zero.items() if isinstance(zero, dict) else ():
        note(f"{ZERO}.{key}", value)
        if key in ("offload_optimizer", "offload_param") and isinstance(value, dict):
            note(f"{ZERO}.{key}.device", value.get("device"))
    return found
