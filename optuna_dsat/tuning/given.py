"""Options together with where each comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from optuna_dsat.tuning.options import TuneOptions

__all__ = ["Given"]


@dataclass(frozen=True, kw_only=True)
class Given:
    """Options with the origin of each that was given."""

    options: TuneOptions
    origins: Mapping[str, str] = field(default_factory=dict)
    """Name of an option -> the command line, a variable of the environment, a file; the rest have their defaults."""

    def with_values(self, values: Mapping[str, Any], origin: str) -> Given:
        """Return the options with some replaced, of the origin named."""
        return Given(options=replace(self.options, **values), origins={**self.origins, **dict.fromkeys(values, origin)})

    def without(self, name: str) -> Given:
        """Return the options with one at its default, as if it had not been given."""
        default = next(one.default for one in fields(self.options) if one.name == name)
        values: dict[str, Any] = {name: default}
        origins = {key: origin for key, origin in self.origins.items() if key != name}
        return Given(options=replace(self.options, **values), origins=origins)
