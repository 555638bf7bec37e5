"""Convert command-line strings to option values; errors have the text that a command shows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from optuna_dsat.config.documents import checked
from optuna_dsat.errors import UsageError

NO_CONFIG = "-"
"""Word on a command line for a DeepSpeed config that only the script has."""


def named_config(path: Path | None) -> Path | None:
    """Return the DeepSpeed config that a command line names; None for ``NO_CONFIG``."""
    return None if path is None or str(path) == NO_CONFIG else path


def share(value: str | float, *, option: str = "--tie") -> float:
    """Parse a share given as ``1%`` or ``0.01``; raise ``UsageError`` for anything else."""
    text = str(value).strip()
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise UsageError(f"{option} is {text!r}; write a share such as 1% or 0.01.") from None


def split_stages(texts: Sequence[str] | None) -> tuple[int, ...] | None:
    """Parse ZeRO stages such as ``["1,2", "3"]``, in ascending order; None without. Others raise ``UsageError``."""
    if not texts:
        return None
    stages = set()
    for text in re.split(r"[,\s]+", " ".join(texts).strip()):
        if text not in ("0", "1", "2", "3"):
            raise UsageError(f"--zero-stages names {text!r}; ZeRO stages are 0, 1, 2 and 3.")
        stages.add(int(text))
    return tuple(sorted(stages))


def split_names(texts: Sequence[str] | None) -> tuple[str, ...] | None:
    """Parse names such as ``["batch,stage", "overlap_comm"]``; None without texts."""
    return tuple(name for text in texts for name in re.split(r"[,\s]+", text.strip(", "))) if texts else None


def split_counts(text: str | None, *, option: str) -> int | tuple[int, ...] | None:
    """Parse ``8``, or several numbers as ``1,2,4,8``; None without a text. Others raise ``UsageError``."""
    if text is None:
        return None
    parts = re.split(r"[,\s]+", text.strip("[] "))
    if not all(part.isdecimal() and len(part) < 7 for part in parts):
        raise UsageError(f"{option} is {text!r}; write a number such as 8, or several such as 1 2 4 8.")
    counts = tuple(dict.fromkeys(map(int, parts)))
    return counts[0] if len(counts) == 1 else counts


def one_count(value: int | Sequence[int] | None, *, option: str) -> int | None:
    """Return the number of devices of a single search; raise ``UsageError`` if there are several."""
    if value is None or isinstance(value, int):
        return value
    if len(value) != 1:
        raise UsageError(f"{option} is {', '.join(map(str, value))}; this takes one number.")
    return value[0]


def split_fixed(texts: Sequence[str] | None) -> dict[str, Any] | None:
    """Parse ``KEY=VALUE`` texts, values as JSON where possible; raise ``UsageError`` without a key or value."""
    fixed: dict[str, Any] = {}
    for text, key, value in _pairs(texts):
        if not key or not value:
            raise UsageError(f"--fix is {text!r}; write KEY=VALUE, such as --fix overlap_comm=true.")
        try:
            fixed[key] = checked(json.loads(value), f"--fix {key}")
        except ValueError:
            fixed[key] = value
        except RecursionError:
            raise UsageError(f"--fix {key} is nested too deeply.") from None
    return fixed or None


def split_pairs(texts: Sequence[str] | None, *, option: str, form: str) -> dict[str, str] | None:
    """Parse texts of a ``form`` such as ``NAME=VALUE``; raise ``UsageError`` if one has no name or no ``=``."""
    result = {}
    for text, name, value in _pairs(texts):
        if not name or value is None:
            raise UsageError(f"{option} is {text!r}; write {form}.")
        result[name] = value
    return result or None


def _pairs(texts: Sequence[str] | None) -> Iterator[tuple[str, str, str | None]]:
    """Yield each text with its parts before and after the first ``=``; None for the latter without one."""
    for text in texts or ():
        key, equals, value = text.partition("=")
        yield text, key, value if equals else None
