"""The table of ``--dry-run``: the given options and their origins."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from optuna_dsat.cli.tables import UNBOUNDED, print_table
from optuna_dsat.secrecy.command import without_secrets
from optuna_dsat.tuning.options.given import Given

__all__ = ["options_given", "show_options"]

_POSITIONAL = frozenset({"script", "ds_config", "script_args"})


def options_given(given: Given) -> dict[str, dict[str, str]]:
    """Return each given option with its value in command-line form and its origin."""
    return {
        name.replace("_", "-"): {"value": _in_words(name, getattr(given.options, name)), "from": origin}
        for name, origin in given.origins.items()
        if name not in _POSITIONAL
    }


def show_options(given: Given) -> None:
    """Print each given option with its value and origin."""
    rows = [(name, option["value"], option["from"]) for name, option in options_given(given).items()]
    if not rows:
        print("Every option is left at its default.")
        return
    print("Options that are not left at their defaults:")
    print_table(("option", "value", "from"), rows, piped_width=UNBOUNDED)


def _in_words(name: str, value: Any) -> str:
    """Format a value as on a command line; the password in a storage URL is masked."""
    from optuna_dsat.store import display_url

    if name == "storage":
        return display_url(value)
    if isinstance(value, Mapping):
        pairs = ((key, item if isinstance(item, str) else json.dumps(item)) for key, item in value.items())
        return " ".join(without_secrets([f"{key}={text}" for key, text in pairs]))
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
