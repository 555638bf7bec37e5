"""Errors on stored studies that this version cannot read, mostly because a newer version wrote them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from pydantic import ValidationError

from optuna_dsat.errors import ConfigError, UnreadableStudyError
from optuna_dsat.words import rule_in_words

__all__ = ["check_profile_names", "reading"]

_REASON_CHARS = 200
_LEARNED_VARIABLES = "ACCELERATE_"
"""Beginning of the variables that a profile launch learns (``runtime/adapt/accelerate.py``)."""


@contextmanager
def reading(name: str, what: str, versions: Mapping[str, str]) -> Iterator[None]:
    """Convert errors from reading a study's data to an error that names the study.

    Args:
        name: The study.
        what: Description of the data, such as ``its spec``.
        versions: Package -> version that the study was created with; empty if unknown.

    Raises:
        UnreadableStudyError: If this version cannot read the data.
    """
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, ConfigError) as error:
        made = versions.get("optuna-dsat")
        by = f" (made by optuna-dsat {made})" if made else ""
        reason = f"{what}: {_reason(error)}{by}"
        why = "A newer version may have written it, or it was altered."
        raise UnreadableStudyError(f"The study {name!r} cannot be read: {reason}. {why}", reason=reason) from error


def _reason(error: Exception) -> str:
    """Return the first line of an error, one of pydantic's with the field."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(str(part) for part in first['loc'])}: {rule_in_words(first['msg'])}"[:_REASON_CHARS]
    if isinstance(error, KeyError):
        return f"{error} is not known or missing"[:_REASON_CHARS]
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")[:_REASON_CHARS]


def check_profile_names(modules: Sequence[str], environment: Mapping[str, str]) -> None:
    """Check the modules that a profile makes later launches import, and the variables that it sets for them.

    Raises:
        ValueError: Names what no profile launch learns.
    """
    strange = [name for name in modules if not name.isprintable() or "/" in name or name.startswith(".")]
    strange += [name for name in environment if not name.startswith(_LEARNED_VARIABLES)]
    if strange:
        raise ValueError(f"no launch learns {repr(strange[0])[:60]}")
