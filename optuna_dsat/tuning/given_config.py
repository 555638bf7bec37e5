"""The user's DeepSpeed config among the options: a file, a dictionary of Python code, or none."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from optuna_dsat.config import ds_config, user_file
from optuna_dsat.tuning.given import Given
from optuna_dsat.tuning.options import TuneOptions

__all__ = ["config_path", "user_config", "with_config_file", "write_config"]


@dataclass(frozen=True, kw_only=True)
class _Dictionary(os.PathLike[str]):
    """A config that was given as a dictionary, and the file that the script finds it in."""

    text: str
    """As JSON."""
    path: str

    def __fspath__(self) -> str:
        return self.path

    def __str__(self) -> str:
        return "ds_config"


def with_config_file(given: Given) -> Given:
    """Return the options with a dictionary as the config in place of which stands the file that it will be written to.

    The file's name depends on the content, so that giving the same dictionary again continues the study.
    """
    options = given.options
    if not isinstance(options.ds_config, Mapping):
        return given
    text = json.dumps(options.ds_config, indent=2, sort_keys=True)
    name = f"ds_config-{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}.json"
    path = (Path(options.output_dir) / name).absolute()
    return replace(given, options=replace(options, ds_config=_Dictionary(text=text, path=str(path))))


def config_path(options: TuneOptions) -> Path | None:
    """Return the path of the config; None if there is none."""
    named = options.ds_config
    if named is None:
        return None
    if isinstance(named, Mapping):
        raise TypeError("A dictionary has no path before with_config_file().")
    return Path(named)


def user_config(options: TuneOptions) -> user_file.UserConfig:
    """Return the config as read.

    Raises:
        ConfigError: If it cannot be read.
    """
    if isinstance(options.ds_config, _Dictionary):
        return user_file.parse(options.ds_config.text, path=str(options.ds_config))
    return user_file.load(config_path(options))


def write_config(options: TuneOptions) -> None:
    """Write a config that was given as a dictionary where the script finds it; only this user may read it."""
    if not isinstance(options.ds_config, _Dictionary):
        return
    raw: dict[str, Any] = json.loads(options.ds_config.text)
    path = Path(options.ds_config)
    path.parent.mkdir(parents=True, exist_ok=True)
    ds_config.write_json_atomic(path, raw, private=True)
