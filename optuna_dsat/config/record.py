"""Records: frozen dataclasses that are stored as JSON and read again, also as other versions wrote them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from pydantic import TypeAdapter


class Record:
    """Base class of dataclasses that are stored as JSON."""

    def to_json(self: DataclassInstance) -> dict[str, Any]:
        """Return the fields, for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """Build from ``to_json`` of any version, without unknown keys; ``ValueError`` for missing or wrong fields."""
        kind: Any = cls
        read: Self = _adapter(kind).validate_python(record)
        return read


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)
