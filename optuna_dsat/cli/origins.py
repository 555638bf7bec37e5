"""The table of ``--dry-run``: which options were given, and their origins."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from optuna_dsat.cli.tables import UNBOUNDED, print_table
from optuna_dsat.secrecy.command import without_secrets
from optuna_dsat.tuning.given import Given

__all__ = ["show_options"]

_POSITIONAL = frozenset({"script", "ds_config", "script_args"})


def show_options(given: Given) -> None:
    """Print each option that was given, with its value and origin."""
    rows = [
        (name.replace("_", "-"), _in_words(name, getattr(given.options, name)), origin)
        for name, origin in given.origins.items()
        if name not in _POSITIONAL
    ]
    if not rows:
        print("Every option is left at its default.")
        return
    print("Options that are not left at their defaults:")
    print_table(("option", "value", "from"), rows, piped_width=UNBOUNDED)


def _in_words(name: str, value: Any) -> str:
    """Return a value as on a command line; the password in a storage URL is masked."""
    from optuna_dsat.store import display_url

    if name == "storage":
        return display_url(value)
    if isinstance(value, Mapping):
        pairs = ((key, one if isinstance(one, str) else json.dumps(one)) for key, one in value.items())
        return " ".join(without_secrets([f"{key}={text}" for key, text in pairs]))
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
