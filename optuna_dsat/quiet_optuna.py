"""Optuna's log lines, which would repeat ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import optuna

__all__ = ["quiet_optuna"]


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Within the block Optuna logs warnings and errors alone."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
