"""Differences between the exported config and the user's config, key by key."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from optuna_dsat.config import ds_config
from optuna_dsat.words import setting_in_words

__all__ = ["Change", "changes_in_words", "config_changes", "shown_settings"]


@dataclass(frozen=True, kw_only=True)
class Change:
    """A setting that differs between the best config and the user's own."""

    key: str
    """Dotted key of the config."""
    own: str
    """The user's value as JSON; empty if it is not set."""
    best: str
    """The best config's value as JSON; empty if it is not set."""


def config_changes(own: Mapping[str, Any], best: Mapping[str, Any]) -> tuple[Change, ...]:
    """Return every key whose value differs, sorted: changed, added and dropped ones.

    Args:
        own: The user's config with all batch sizes.
        best: The exported config with all batch sizes.
    """
    before, after = shown_settings(own), shown_settings(best)
    return tuple(
        Change(key=key, own=before.get(key, ""), best=after.get(key, ""))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    )


def changes_in_words(changes: Iterable[Change]) -> str:
    """Return sentences with the changed, added and dropped keys; empty if there are none."""
    kinds: dict[str, list[str]] = {"Changed from your config": [], "Added": [], "Dropped": []}
    for change in changes:
        if change.own and change.best:
            kinds["Changed from your config"].append(f"{change.key} {change.own} -> {change.best}")
        elif change.best:
            kinds["Added"].append(f"{change.key} {change.best}")
        else:
            kinds["Dropped"].append(f"{change.key} {change.own}")
    return " ".join(f"{kind}: {', '.join(keys)}." for kind, keys in kinds.items() if keys)


def shown_settings(config: Mapping[str, Any]) -> dict[str, str]:
    """Return dotted key -> value of a config as its user writes it, without nulls; text is in quotes."""
    return {
        key: json.dumps(value, ensure_ascii=False) if isinstance(value, str) else setting_in_words(value)
        for key, value in ds_config.flatten(config).items()
        if value is not None
    }
