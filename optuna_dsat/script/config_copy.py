"""Write the best config as YAML, for a script that reads its DeepSpeed config from such a file itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from optuna_dsat.config.ds_config import GRADIENT_ACCUMULATION, MICRO_BATCH, TRAIN_BATCH, merge
from optuna_dsat.runtime.overlay import flatten, nest
from optuna_dsat.runtime.trial_config import settings_told
from optuna_dsat.script.config_location import holds_config, read_settings
from optuna_dsat.script.settings_file import SettingsCopy, names_file

__all__ = ["best_of_file", "config_copy", "passes", "paths_among"]

_BATCH_KEYS = frozenset({TRAIN_BATCH, MICRO_BATCH, GRADIENT_ACCUMULATION})


def config_copy(
    source: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    own: Mapping[str, Any],
    args: Sequence[str],
    cwd: str,
    folder: Path,
) -> SettingsCopy | None:
    """Return the best config as YAML; None unless the script passes the config that one of its YAML arguments contains.

    A copy that differs only in the micro-batch would contradict the file's other batch sizes and lack the ZeRO stage.
    Settings that the script adds to the file's config, such as scheduler steps, are left to the script.

    Args:
        source: Source of the script's batch size, from ``BatchRule.source``; empty if it is the config.
        config: The best config, with all batch sizes.
        own: The config that the script itself passes; its batch sizes are not compared.
        args: The script's arguments.
        cwd: Its working directory.
        folder: Folder of the copy.
    """
    if source and (source.get("kind") != "setting" or source["key"] not in (MICRO_BATCH, TRAIN_BATCH)):
        return None
    for file in (Path(source["file"]),) if source else paths_among(args, cwd=cwd):
        if file.suffix not in (".yaml", ".yml") or not any(names_file(arg, file, cwd=cwd) for arg in args):
            continue
        result = read_settings(file)
        if holds_config(result) and passes(result, own=own):
            text = _yaml(best_of_file(result, config, own=own))
            return SettingsCopy(original=file, path=folder / f"best_{file.name}", text=text, names_config=True)
    return None


def passes(found: Mapping[str, Any], *, own: Mapping[str, Any]) -> bool:
    """Whether a script passes the config in a file, apart from batch sizes and settings that the script adds."""
    return _told(found).items() <= _told(own).items()


def best_of_file(record: Mapping[str, Any], config: Mapping[str, Any], *, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the best config plus the settings of a file that it lacks but the script may read.

    Args:
        record: The config in the file.
        config: The best config, with all batch sizes.
        own: The config that the script itself passes.
    """
    return merge(_untold(record), _without_added(config, own=own, record=record))


def paths_among(args: Sequence[str], *, cwd: str) -> list[Path]:
    """Return arguments (or the part after ``=``) that could be file paths."""
    return [Path(cwd) / arg.rpartition("=")[2] for arg in args]


def _yaml(config: Mapping[str, Any]) -> str:
    import yaml

    text: str = yaml.safe_dump(dict(config), sort_keys=False)
    return text


def _without_added(config: Mapping[str, Any], *, own: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """Drop from a config the settings that the script adds to its file and the search left unchanged."""
    kept = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and isinstance(own.get(key), Mapping) and isinstance(record.get(key), Mapping):
            kept[key] = _without_added(value, own=own[key], record=record[key])
        elif key in record or key in _BATCH_KEYS or key not in own or value != own[key]:
            kept[key] = value
    return kept


def _told(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the comparable settings of a config that a script passes, without batch sizes: dotted key -> value."""
    return settings_told({key: value for key, value in config.items() if key not in _BATCH_KEYS})


def _untold(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the other settings of a file, which the best config may lack and the script may read."""
    parts = settings_told(record)
    beside = {key: value for key, value in flatten(record).items() if key not in parts}
    return {key: value for key, value in nest(beside).items() if key not in (*_BATCH_KEYS, "autotuning")}
