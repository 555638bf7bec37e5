"""Nested configs as flat mappings with dotted keys; here, as the runtime may import nothing that others share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["flatten"]


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a nested config as dotted key -> value; empty objects vanish, lists are values."""
    result: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            result |= {f"{key}.{below}": one for below, one in flatten(value).items()}
        else:
            result[key] = value
    return result
