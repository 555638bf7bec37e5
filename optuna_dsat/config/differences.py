"""Knobs in which a configuration differs from the user's settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optuna_dsat.config.ds_config import (
    GRADIENT_ACCUMULATION,
    ZERO,
    canonical_zero,
    effective,
    knob_settings,
    merge,
    zero_default,
)
from optuna_dsat.config.knobs import KNOBS
from optuna_dsat.config.search_space import present
from optuna_dsat.config.structures import Structure

_IN_THE_STRUCTURE = frozenset({"stage", "device", "nvme_path", "buffer_size", "max_in_cpu"})
"""Keys of stage and offloads, and keys that the search sets with them alone."""


def knob_differences(
    config: Mapping[str, Any], own: Mapping[str, Any], *, params_count: int | None = None
) -> dict[str, Any]:
    """Return the knobs, except stage, offloads and micro-batch, whose effect differs from the user's settings.

    The baseline is the user's settings at the configuration's stage and offloads.

    ``params_count`` is the number of the model's parameters, above which all sizes are equivalent; None if unknown.

    Returns:
        Dotted key within the ZeRO section, name of a knob of another section, or ``gradient_accumulation_steps`` ->
        value; those of the ZeRO section first, sorted by key.
    """
    given, mine = effective(config), effective(own)
    stage = Structure.of(given).stage
    there = merge(mine, {ZERO: Structure.of(given).zero_section()})
    here, there_zero = (_flat(canonical_zero(item.get(ZERO) or {}, params_count)) for item in (given, there))
    written = _flat(given.get(ZERO) or {})
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


def lossy_settings(config: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the knobs that change numbers (``Knob.is_exact``) and differ from the user's settings, with values."""
    here, there = (knob_settings(plain, zero=plain.get(ZERO) or {}) for plain in (effective(config), effective(own)))
    values = {knob.name: (present(knob, here), present(knob, there)) for knob in KNOBS if not knob.is_exact}
    return {name: value for name, (value, own_value) in values.items() if value != own_value}


def _flat(zero: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ZeRO section with dotted keys for its subsections."""
    record: dict[str, Any] = {}
    for key, value in zero.items():
        if isinstance(value, Mapping):
            record |= {f"{key}.{name}": item for name, item in value.items()}
        else:
            record[key] = value
    return record
