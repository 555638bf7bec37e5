"""Options with their origins."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from optuna_dsat.config import ds_config, user_file
from optuna_dsat.tuning.options.tune_options import TuneOptions


@dataclass(frozen=True, kw_only=True)
class Given:
    """Options with the origin of each that was given."""

    options: TuneOptions
    origins: Mapping[str, str] = field(default_factory=dict)
    """Name of an option -> the command line, a variable of the environment, a file; the rest have their defaults."""

    def with_values(self, values: Mapping[str, Any], origin: str) -> Given:
        """Return the options with some values replaced, with the given origin."""
        return Given(options=replace(self.options, **values), origins={**self.origins, **dict.fromkeys(values, origin)})

    def without(self, name: str) -> Given:
        """Return the options with one option reset to its default, as if it had not been given."""
        default = next(field_.default for field_ in fields(self.options) if field_.name == name)
        values: dict[str, Any] = {name: default}
        origins = {key: origin for key, origin in self.origins.items() if key != name}
        return Given(options=replace(self.options, **values), origins=origins)


@dataclass(frozen=True, kw_only=True)
class _Config(os.PathLike[str]):
    """A config that has been read, and the file from which the script reads it."""

    user: user_file.UserConfig
    path: str
    is_written: bool = True
    """Whether that file exists; False for a config given as a dictionary."""

    def __fspath__(self) -> str:
        return self.path

    def __str__(self) -> str:
        return self.user.path


def with_config(given: Given) -> Given:
    """Read the config, once for all searches of a start, else ``ConfigError``; a dictionary gets its file's path.

    The file's name depends on the content, so the same dictionary continues the study.
    """
    options = given.options
    config = options.ds_config
    if isinstance(config, Mapping):
        text = json.dumps(config, indent=2, sort_keys=True)
        name = f"ds_config-{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}.json"
        path = (Path(options.output_dir) / name).absolute()
        config = _Config(user=user_file.parse(text, path="ds_config"), path=str(path), is_written=False)
    elif config is not None and not isinstance(config, _Config):
        config = _Config(user=user_file.load(Path(config)), path=os.fspath(config))
    return replace(given, options=replace(options, ds_config=config))


def config_path(options: TuneOptions) -> Path | None:
    """Return the path of the config; None if there is none."""
    named = options.ds_config
    if isinstance(named, Mapping):
        raise TypeError("A dictionary has no path before with_config().")
    return None if named is None else Path(named)


def user_config(options: TuneOptions) -> user_file.UserConfig:
    """Return the user's config, which is read unless ``with_config`` has read it."""
    named = options.ds_config
    return named.user if isinstance(named, _Config) else user_file.load(config_path(options))


def write_config(options: TuneOptions) -> None:
    """Write a config given as a dictionary to the file that the script reads; only this user may read the file."""
    if isinstance(options.ds_config, _Config) and not options.ds_config.is_written:
        path = Path(options.ds_config)
        path.parent.mkdir(parents=True, exist_ok=True)
        ds_config.write_json_atomic(path, options.ds_config.user.raw, private=True)
