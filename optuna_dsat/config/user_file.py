"""Read and check a user's DeepSpeed config, and find misspelt keys, which DeepSpeed silently ignores or rejects.

A config may have three extensions that DeepSpeed does not accept: lists as values of knobs (which narrow the search),
``"all"`` in place of a list, and the ``autotuning`` section.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from optuna_dsat.config.autotuning_section import Autotuning, parse_autotuning, positive_int
from optuna_dsat.config.conditions import BF16, BF16_MASTER, BF16_STATES, OFFLOAD_OPTIMIZER, OFFLOAD_PARAM
from optuna_dsat.config.documents import as_written, checked, read_document, read_hjson
from optuna_dsat.config.ds_config import ALL, AUTO, GRADIENT_ACCUMULATION, MICRO_BATCH, TRAIN_BATCH, ZERO
from optuna_dsat.config.knobs import KNOBS
from optuna_dsat.errors import ConfigError

_SECTIONS = (
    "optimizer", "scheduler", "fp16", "bf16", "bfloat16", "autotuning",
    "activation_checkpointing", "aio", "amp", "checkpoint", "comet", "comms_logger", "compile", "compression_training",
    "csv_monitor", "curriculum_learning", "data_efficiency", "data_types", "eigenvalue", "elasticity", "flops_profiler",
    "hybrid_engine", "nebula", "pipeline", "progressive_layer_drop", "sparse_attention", "tensor_parallel",
    "tensorboard", "torch_autocast", "wandb",
)  # fmt: skip
"""Keys whose values must be objects: ``DeepSpeedConfig`` 0.19.8 rejects all other values."""


@dataclass(frozen=True, kw_only=True)
class UserConfig:
    """A user's DeepSpeed config file."""

    path: str
    """Path of the file as given by the user."""
    raw: Mapping[str, Any]
    """The complete config, including lists and the ``autotuning`` section."""
    autotuning: Autotuning


def load(path: str | Path | None) -> UserConfig:
    """Read a user's config, empty without a file; ``ConfigError`` as :func:`read`, or on ``shape_errors``."""
    return _checked(read(path), "" if path is None else str(path))


def read(path: str | Path | None) -> dict[str, Any]:
    """Return the content of a DeepSpeed config file without checking the types of values; empty without a file.

    Raises:
        ConfigError: If the file is missing, a directory, unreadable, empty, not UTF-8, not JSON, not an object,
            or contains a key twice; the message contains the file, and line and column if known.
    """
    if path is None:
        return {}
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
    return _parsed(text, str(path))


def parse(text: str, *, path: str = "<config>") -> UserConfig:
    """Read a user's config from its text; ``path`` is named in messages. ``ConfigError`` as :func:`load`."""
    return _checked(_parsed(text, path), path)


def _checked(raw: Mapping[str, Any], path: str) -> UserConfig:
    for _, text in shape_errors(raw):
        raise ConfigError(f"{path}: {text}")
    return UserConfig(path=path, raw=raw, autotuning=parse_autotuning(raw, path=path))


def _parsed(text: str, path: str) -> dict[str, Any]:
    if not text.strip():
        raise ConfigError(f"{path} is empty; a DeepSpeed config is a JSON object, such as "
                          '{"train_micro_batch_size_per_gpu": 1}.')  # fmt: skip
    build = partial(_unique, path=path)
    try:
        raw = json.loads(text, object_pairs_hook=build)
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
        raw = read_hjson(text, build=build)
        if not isinstance(raw, dict):
            where = f"{path}, line {error.lineno}, column {error.colno}"
            raise ConfigError(f"{where}: not JSON ({error.msg}), nor HJSON.") from None
    except ValueError:
        raise ConfigError(f"{path}: holds a whole number of more than 64 bits.") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply to be a DeepSpeed config.") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: a DeepSpeed config is a JSON object, this is {_kind(raw)}.")
    result: dict[str, Any] = checked(raw, path, ConfigError)
    return result


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


def shape_errors(raw: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the key and a message for each value of an invalid type."""
    if not isinstance(raw.get(ZERO, {}), dict | bool):
        yield ZERO, f'{ZERO} is {_kind(raw[ZERO])}; it must be an object, such as {{"stage": 1}}.'
    zero = raw.get(ZERO)
    for key in (OFFLOAD_OPTIMIZER, OFFLOAD_PARAM):
        value = zero.get(key) if isinstance(zero, dict) else None
        if isinstance(value, str | bool | int | float) and value != AUTO:
            yield f"{ZERO}.{key}", f'{ZERO}.{key} is {_kind(value)}; it must be an object, such as {{"device": "cpu"}}.'
        if isinstance(value, dict) and value.get("device", "none") is None:
            yield f"{ZERO}.{key}.device", f"{ZERO}.{key}.device is null; it must be none, cpu or nvme."
    wrong = [key for key in _SECTIONS if not isinstance(raw.get(key, {}), dict)]
    for key in wrong:
        example = f', such as {{"enabled": {str(raw[key]).lower()}}}' if isinstance(raw[key], bool) else ""
        yield key, f"{key} is {_kind(raw[key])}; it must be an object{example}."
    for key in ("optimizer", "scheduler"):
        section = {} if key in wrong else raw.get(key, {})
        kind, params = section.get("type"), section.get("params")
        if isinstance(kind, list):
            yield f"{key}.type", f"{key}.type is a list, but is not searched; give one name."
        elif kind is not None and not isinstance(kind, str):
            yield f"{key}.type", f"{key}.type is {_kind(kind)}; it must be a string."
        if params is not None and not isinstance(params, dict):
            yield f"{key}.params", f"{key}.params is {_kind(params)}; it must be an object."
        elif key == "optimizer":
            yield from _wrong_params(params or {})
    for key in (TRAIN_BATCH, MICRO_BATCH, GRADIENT_ACCUMULATION):
        value = raw.get(key)
        if key != MICRO_BATCH and (isinstance(value, list) or value == ALL):
            what = as_written(ALL) if value == ALL else "a list"
            yield key, f"{key} is {what}, but is not searched; give one number."
            continue
        for item in value if isinstance(value, list) else [value]:
            if item not in (None, AUTO, ALL):
                try:
                    positive_int(item, key)
                except ConfigError as error:
                    yield key, str(error)
    for key, values in knob_lists(raw).items():
        if not values:
            yield key, f"{key} is an empty list; list at least one value or leave the key out."


def _wrong_params(params: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the key and a message for each parameter of an optimizer that no optimizer of DeepSpeed or torch takes."""
    rules = {name: "a number" for name in ("lr", "weight_decay") if isinstance(params.get(name), list | dict | bool)}
    betas = params.get("betas")
    is_pair = isinstance(betas, list) and [type(beta) in (int, float) for beta in betas] == [True, True]
    if not is_pair and betas not in (None, AUTO):
        rules["betas"] = "a list of two numbers, such as [0.9, 0.999]"
    for name, rule in rules.items():
        yield f"optimizer.params.{name}", f"optimizer.params.{name} is {as_written(params[name])}; it must be {rule}."


def knob_lists(raw: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return dotted key -> list (or ``"all"``) given in place of a knob's value."""
    result: dict[str, tuple[Any, ...]] = {}

    def note(key: str, value: Any) -> None:
        if isinstance(value, list):
            result[key] = tuple(value)
        elif value == ALL:
            result[key] = (ALL,)

    note(MICRO_BATCH, raw.get(MICRO_BATCH))
    zero = raw.get(ZERO)
    for key, value in zero.items() if isinstance(zero, dict) else ():
        is_offload = key in (OFFLOAD_OPTIMIZER, OFFLOAD_PARAM)
        note(f"{ZERO}.{key}.device" if is_offload and value else f"{ZERO}.{key}", value)
        for name, item in value.items() if is_offload and isinstance(value, dict) else ():
            note(f"{ZERO}.{key}.{name}", item)
    return result


_KEYS = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("optimizer", "scheduler", "fp16", "bf16", "zero_optimization", "activation_checkpointing", "steps_per_print"),
    *("communication_data_type", "prescale_gradients", "gradient_predivide_factor", "wall_clock_breakdown"),
)
"""Top-level keys that change the training: https://www.deepspeed.ai/docs/config-json/."""
READ_KEYS = frozenset((
    *_KEYS, *_SECTIONS, "allgather_size", "dataloader_drop_last", "datastates_ckpt", "disable_allgather",
    "disable_python_gc", "dump_state", "expert_parallel", "fp32_allreduce", "gradient_allreduce_op", "graph_harvesting",
    "data_parallel_size", "log_level", "managed_gradient_accumulation", "memory_breakdown", "quantize_training",
    "seq_parallel_communication_data_type", "sequence_parallel_size", "sparse_gradients", "timers",
    "use_data_before_expert_parallelism", "vocabulary_size", "weight_quantization", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
))  # fmt: skip
"""All top-level keys that DeepSpeed reads (0.14.5 to 0.19.8)."""
_ALIKE = 0.9
"""Minimum similarity of a misspelt key to the correct key; keys of other tools differ more."""
_ALIKE_IF_WRONG = 0.8
"""Minimum similarity for a key that is known to be wrong."""


QUOTED_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
"""Matches a string that is probably meant as a number."""
_OF_STAGE_3 = (
    *("allgather_sequential", "gather_16bit_weights_on_model_save", "max_live_parameters", "max_reuse_distance"),
    *("model_persistence_threshold", "module_granularity_threshold", "param_persistence_threshold"),
    *("prefetch_bucket_size", "use_all_reduce_for_fetch_params"),
)
"""Keys of ``zero_optimization`` that DeepSpeed reads with and without ``stage3_`` before them."""
_OF_SECTIONS = {
    "optimizer": ("type", "params"),
    "scheduler": ("type", "params"),
    "fp16": (
        "enabled", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale",
        "auto_cast", "consecutive_hysteresis", "fp16_master_weights_and_grads",
    ),
    BF16: ("enabled", BF16_MASTER, BF16_STATES, "check_grad_overflow", "immediate_grad_update"),
    f"{ZERO}.{OFFLOAD_OPTIMIZER}": (
        "device", "nvme_path", "pin_memory", "buffer_count", "ratio",
        "cpuadam_cores_perc", "fast_init", "pipeline_read", "pipeline_write", "super_offload",
    ),
    f"{ZERO}.{OFFLOAD_PARAM}": ("device", "nvme_path", "pin_memory", "buffer_count", "buffer_size", "max_in_cpu"),
    ZERO: (
        *(knob.path[1] for knob in KNOBS if knob.is_of_zero),
        *(before + name for name in _OF_STAGE_3 for before in ("", "stage3_")),
        "compute_grad_norm", "cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory", "elastic_checkpoint",
        "enable_sanity_checks", "ignore_unused_parameters", "legacy_stage1", "load_from_fp32_weights",
        "log_trace_cache_warnings", "memory_efficient_linear", "override_module_apply", "parameter_alignment",
        "pipeline_loading_checkpoint", "save_muon_momentum_buffer_in_memory",
        "stage3_gather_fp16_weights_on_model_save",
    ),
}  # fmt: skip
"""Section -> its keys in DeepSpeed 0.14.5 to 0.19.8."""


def misspelt_keys(keys: Iterable[str]) -> dict[str, str]:
    """Return misspelt key, of the config or of a section -> the key that it resembles."""
    result = {}
    for dotted in keys:
        names = dotted.split(".")
        for depth, key in enumerate(names):
            section = ".".join(names[:depth])
            known = _OF_SECTIONS.get(section, ()) if section else _KEYS
            if key in known:
                continue
            longer = (name for name in known if "_" in key and name.startswith(key))  # such as gradient_clip
            near = near_key(key, known, alike=_ALIKE_IF_WRONG if section else _ALIKE) or next(longer, "")
            if near:
                prefix = f"{section}." if section else ""
                result[prefix + key] = prefix + near
    return result


def near_key(key: str, known: Iterable[str], *, alike: float = _ALIKE_IF_WRONG) -> str:
    """Return the known key that a key resembles, else an empty string."""
    return next(iter(difflib.get_close_matches(key.strip().lower(), list(known), n=1, cutoff=alike)), "")


def misspelt_in_words(keys: Collection[str]) -> list[str]:
    """Return a sentence for each of ``misspelt_keys``, and one on other top-level keys that DeepSpeed ignores."""
    sections = dict.fromkeys(key.partition(".")[0] for key in keys)
    result = misspelt_keys(keys)
    lines = [f"DeepSpeed has no key {key!r}; {result[key]!r} is probably meant." for key in result]
    if unread := [key for key in sections if key not in (*READ_KEYS, *result) and key[:1].isalpha()]:
        lines.append(f"DeepSpeed ignores {', '.join(unread)} in the config: without effect unless the script reads it.")
    return lines


def correction(key: str) -> str:
    """Return the remedy for a key that is invalid in its section: remove it, or use the known key it resembles."""
    section, _, name = key.rpartition(".")
    near = near_key(name, _OF_SECTIONS.get(section) or chain.from_iterable(_OF_SECTIONS.values()))
    corrected = f"{section}.{near}" if section else near
    return f"Remove {key}, or write {corrected}" if near else f"Remove {key}"


_OPTIMIZERS = ("Adam", "AdamW", "Adagrad", "Lamb", "Lion", "Muon", "SGD")
_SCHEDULERS = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
_TYPES = {
    "optimizer": (
        *_OPTIMIZERS, "MuAdam", "MuAdamW", "MuSGD", "OneBitAdam", "OneBitLamb", "ZeroOneAdam",
        "ASGD", "Adadelta", "Adafactor", "Adamax", "LBFGS", "NAdam", "RAdam", "RMSprop", "Rprop", "SparseAdam",
    ),
    "scheduler": (
        *_SCHEDULERS, "ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR", "ExponentialLR",
        "LambdaLR", "LinearLR", "MultiStepLR", "MultiplicativeLR", "OneCycleLR", "PolynomialLR", "ReduceLROnPlateau",
        "StepLR",
    ),
}  # fmt: skip
"""Section -> types of DeepSpeed (0.14.5 to 0.19.8) and of torch."""


def misspelt_types(config: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each type of the config that DeepSpeed refuses, if it resembles a known type.

    Others may be classes that the script adds to ``torch.optim``. DeepSpeed ignores the case of its optimizers only.
    """
    values = {section: (config.get(section) or {}).get("type") for section in _TYPES}
    return [
        f"DeepSpeed has no {section} {value!r}; {near!r} is probably meant."
        for section, value in values.items()
        if isinstance(value, str) and (near := _near_type(section, value)) not in ("", value)
        if section == "scheduler" or near.lower() != value.lower()
    ]


def _near_type(section: str, value: str) -> str:
    names = {name.lower(): name for name in _TYPES[section]}
    return names.get(near_key(value, names), "")


def correction_of_type(section: str, value: str) -> str:
    """Return the remedy for a type of ``optimizer`` or ``scheduler`` that the installed DeepSpeed refuses."""
    near, frequent = _near_type(section, value), _OPTIMIZERS if section == "optimizer" else _SCHEDULERS
    return f"Write {near}" if near not in ("", value) else f"Write one of {', '.join(frequent)}"
