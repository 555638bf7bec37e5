"""Stub until the redirection lands."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

__all__ = ["redirect_writes"]


def redirect_writes(upper: Path, *, folders: Sequence[str], passed: Sequence[str]) -> None:
    """Redirect."""
