"""Flattens nested configs to dotted keys. Lies in the runtime because the runtime must not import other folders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["flatten"]


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a nested config as dotted key -> value; empty objects are dropped, lists are values."""
    result: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            result |= {f"{key}.{below}": one for below, one in flatten(value).items()}
        else:
            result[key] = value
    return result
