"""Where the options of a search come from, as ``--dry-run`` shows it."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from optuna_dsat.tuning.options import TuneOptions

__all__ = ["show_options"]

_OBVIOUS = frozenset({"script", "ds_config", "script_args", "dry_run"})


def show_options(options: TuneOptions) -> None:
    """Print the options that were given, and where: the rest have their defaults."""
    from optuna_dsat.store import display_url

    table = Table(title="Options that are not left at their defaults", title_justify="left")
    for heading in ("option", "value", "from"):
        table.add_column(heading, overflow="fold")
    for name, origin in options.origins.items():
        if name in _OBVIOUS:
            continue
        value = getattr(options, name)
        shown = display_url(value) if name == "storage" else " ".join(map(str, value)) if type(value) is list else value
        table.add_row(name.replace("_", "-"), Text(str(shown)), Text(origin))
    Console(highlight=False).print(table)
