"""Differences between configs: knobs that differ from the user's settings, and changes that a running engine takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optuna_dsat.config.conditions import OFFLOAD_PARAM, ZERO_STAGE
from optuna_dsat.config.ds_config import (
    GRADIENT_ACCUMULATION,
    MICRO_BATCH,
    TRAIN_BATCH,
    ZERO,
    canonical_zero,
    effective,
    flatten,
    knob_settings,
    merge,
    zero_default,
)
from optuna_dsat.config.knobs import CHECKPOINT_EVERY, KNOBS, MODEL
from optuna_dsat.config.search_space import present
from optuna_dsat.config.structures import Structure

_IN_THE_STRUCTURE = frozenset({"stage", "device", "nvme_path", "buffer_size", "max_in_cpu"})
"""Keys of stage and offloads, and keys that the search sets with them alone."""


def knob_differences(
    config: Mapping[str, Any], user: Mapping[str, Any], *, params_count: int | None = None
) -> dict[str, Any]:
    """Return the knobs, except stage, offloads and micro-batch, whose effect differs from the user's settings.

    The user's settings are taken at the configuration's stage and offloads; all sizes above ``params_count`` are
    equivalent. Keys are dotted within the ZeRO section, whose knobs come first, names of other knobs, or
    ``gradient_accumulation_steps``.
    """
    given, mine = effective(config), effective(user)
    stage = Structure.of(given).stage
    there = merge(mine, {ZERO: Structure.of(given).zero_section()})
    here, there_zero = (flatten(canonical_zero(item.get(ZERO) or {}, params_count)) for item in (given, there))
    written = flatten(given.get(ZERO) or {})
    record = {}
    for key in sorted(here.keys() | there_zero.keys()):
        if key.rpartition(".")[2] not in _IN_THE_STRUCTURE and here.get(key) != there_zero.get(key):
            record[key] = written.get(key, zero_default(key, stage=stage))
    others, own_others = (knob_settings(item, zero={}) for item in (given, mine))
    for knob in KNOBS:
        value = others.get(knob.path[1], knob.default)
        if not knob.is_of_zero and value != own_others.get(knob.path[1], knob.default):
            record[knob.name] = value
    steps = given.get(GRADIENT_ACCUMULATION, 1)
    if steps != mine.get(GRADIENT_ACCUMULATION, 1):
        record[GRADIENT_ACCUMULATION] = steps
    return record


def lossy_settings(config: Mapping[str, Any], user: Mapping[str, Any]) -> dict[str, Any]:
    """Return the knobs that change numbers (``Knob.is_exact``) and differ from the user's settings, with values."""
    here, there = (knob_settings(plain, zero=plain.get(ZERO) or {}) for plain in (effective(config), effective(user)))
    values = {knob.name: (present(knob, here), present(knob, there)) for knob in KNOBS if not knob.is_exact}
    return {name: value for name, (value, own_value) in values.items() if value != own_value}


_BY_KEY = {knob.path[1]: knob for knob in KNOBS if knob.live}


def live_changes(running: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the changes that turn a running engine into one of another config; None if it must be built anew.

    Dotted key -> new value, DeepSpeed's default where the config has none; empty for the same config. No engine keeps
    anything of the size of a batch, and DeepSpeed reads most communication knobs at each step.
    """
    before, after = (_settings(config) for config in (running, wanted))
    params = {
        ZERO_STAGE: before.get(f"{ZERO}.stage", 0),
        "contiguous_gradients": before[f"{ZERO}.contiguous_gradients"],
        OFFLOAD_PARAM: before.get(f"{ZERO}.{OFFLOAD_PARAM}.device", "none"),
    }
    changes = {key: after.get(key) for key in {**before, **after} if before.get(key) != after.get(key)}
    for key, value in changes.items():
        if key in (MICRO_BATCH, GRADIENT_ACCUMULATION):
            live = isinstance(value, int) and isinstance(before.get(key), int)
        else:
            knob = _BY_KEY.get(key.removeprefix(f"{ZERO}."))
            live = value is not None and knob is not None and knob.is_live(params)
        if not live:
            return None
    return changes


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with DeepSpeed's defaults of tuned keys and without the global batch size, which follows."""
    flat = flatten(effective(config))
    flat.setdefault(GRADIENT_ACCUMULATION, 1)
    flat.setdefault(f"{MODEL}.{CHECKPOINT_EVERY}", 0)
    flat.pop(TRAIN_BATCH, None)
    stage = flat.setdefault(f"{ZERO}.stage", 0)
    for key in _BY_KEY:
        flat.setdefault(f"{ZERO}.{key}", zero_default(key, stage=stage))
    return {key: value for key, value in flat.items() if value is not None}
