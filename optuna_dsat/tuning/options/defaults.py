"""Which field of the spec an option fills, and its default there."""

from __future__ import annotations

from typing import Any

from optuna_dsat.study.spec import MethodOptions, StudySpec

__all__ = ["default", "spec_field"]


def spec_field(option: str) -> str | None:
    """Return the field of ``StudySpec`` or ``MethodOptions`` that an option fills; None if it fills none."""
    known = StudySpec.model_fields.keys() | MethodOptions.model_fields.keys()
    return next((name for name in (option, f"{option}_s") if name in known), None)


def default(option: str) -> Any:
    """Return the default of the spec's field that an option fills."""
    name = spec_field(option)
    found = StudySpec.model_fields.get(name or "") or MethodOptions.model_fields[name or ""]
    return found.default
