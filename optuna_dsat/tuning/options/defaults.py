"""The spec field that an option sets, and its default."""

from __future__ import annotations

from typing import Any

from optuna_dsat.study.spec import MethodOptions, StudySpec

__all__ = ["default", "spec_field"]


def spec_field(option: str) -> str | None:
    """Return the field of ``StudySpec`` or ``MethodOptions`` that an option sets; None if there is none."""
    known = StudySpec.model_fields.keys() | MethodOptions.model_fields.keys()
    return next((name for name in (option, f"{option}_s") if name in known), None)


def default(option: str) -> Any:
    """Return the default of the spec field that an option sets."""
    name = spec_field(option)
    found = StudySpec.model_fields.get(name or "") or MethodOptions.model_fields[name or ""]
    return found.default
