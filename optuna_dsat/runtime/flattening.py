"""Flattens nested configs to dotted keys, and back. Lies in the runtime, which must not import other folders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["flatten", "nest"]


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a nested config as dotted key -> value; empty objects are dropped, lists are values."""
    result: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            result |= {f"{key}.{below}": one for below, one in flatten(value).items()}
        else:
            result[key] = value
    return result


def nest(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with dotted keys as nested objects: ``{"a.b": 1}`` is ``{"a": {"b": 1}}``."""
    result: dict[str, Any] = {}
    for key, value in settings.items():
        inner = nest(value) if isinstance(value, Mapping) else value
        for part in reversed(str(key).split(".")):
            inner = {part: inner}
        result = _joined(result, inner)
    return result


def _joined(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return both mappings merged key by key; None stays, since it removes a key of the config."""
    result = dict(one)
    for key, value in other.items():
        below = result.get(key)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        result[key] = _joined(below, value) if both else value  # type: ignore[arg-type]
    return result
