"""Secrets that a study's launches need and that no database holds: which are missing here, and how to give them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from optuna_dsat.config import ds_config
from optuna_dsat.errors import UsageError
from optuna_dsat.secrecy.references import names_in, value_of
from optuna_dsat.study.spec import StudySpec

__all__ = ["missing_secrets", "require_secrets"]


def missing_secrets(spec: StudySpec) -> dict[str, str]:
    """Return what the study's launches need and this process does not know: variable -> what it is the value of."""
    found: dict[str, str] = {}
    for what, text in _places(spec):
        for name in names_in(text):
            if value_of(name) is None:
                found.setdefault(name, what)
    return found


def _places(spec: StudySpec) -> Iterator[tuple[str, str]]:
    """Yield every text of a study that may hold references, with what it is."""
    script, before = spec.script, ""
    for arg in script.args:
        option = re.match(r"[-+~]{0,2}[A-Za-z][\w./@-]*(?==)", arg)
        yield (option[0] if option else before if before.startswith("-") else "an argument"), arg
        before = arg
    for name, value in script.environment.items():
        yield f"the variable {name}", value
    for key, value in ds_config.flatten(spec.ds_config).items():
        for one in value if isinstance(value, list | tuple) else [value]:
            if isinstance(one, str):
                yield f"{key} of the DeepSpeed config", one


def require_secrets(spec: StudySpec) -> None:
    """Refuse a study whose secrets are not known here.

    Raises:
        UsageError: Names the option, and the variable to give its value in.
    """
    missing = missing_secrets(spec)
    if missing:
        named = "; ".join(f"{what} by {name}" for name, what in missing.items())
        raise UsageError(
            f"The study {spec.name!r} needs secrets, which are not stored: give the value of {named} in the "
            "environment, or resume on a terminal, which asks for them."
        )
