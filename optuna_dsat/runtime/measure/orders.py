"""Orders to ranks that have measured their trial: measure another in the running engine, or leave."""

from __future__ import annotations

import json
from pathlib import Path
from time import monotonic, sleep

from optuna_dsat.runtime.files import write_text_atomic

__all__ = ["await_order", "order_next"]

_NAME = "next.json"
_PAUSE_S = 0.003
_LONGEST_WAIT_S = 600.0
"""Wait for an order after which a rank leaves: the tuner stands still."""


def order_next(root: Path, launch: Path | None) -> None:
    """Order the ranks of a launch to go on with the trial that ``launch`` describes; None to leave."""
    write_text_atomic(root / _NAME, json.dumps({"launch": None if launch is None else str(launch)}))


def await_order(root: Path) -> Path | None:
    """Wait for the order to the ranks of a launch; return the next trial's launch description, None to leave."""
    deadline = monotonic() + _LONGEST_WAIT_S
    while monotonic() < deadline:
        try:
            launch = json.loads((root / _NAME).read_text(encoding="utf-8"))["launch"]
            return None if launch is None else Path(launch)
        except FileNotFoundError:
            sleep(_PAUSE_S)
        except (OSError, ValueError, KeyError, TypeError):  # the script has put something else there
            return None
    return None
