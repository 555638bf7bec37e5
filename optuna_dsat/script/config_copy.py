"""The best config as YAML, for the command of a script that reads its DeepSpeed config from such a file by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from optuna_dsat.config.ds_config import GRADIENT_ACCUMULATION, MICRO_BATCH, TRAIN_BATCH
from optuna_dsat.script.settings_file import SettingsCopy, names_file

__all__ = ["ConfigCopy", "config_copy"]

_BATCH_KEYS = frozenset({TRAIN_BATCH, MICRO_BATCH, GRADIENT_ACCUMULATION})


class ConfigCopy(SettingsCopy):
    """A copy that is the whole best config."""


def config_copy(
    source: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    own: Mapping[str, Any],
    args: Sequence[str],
    cwd: str,
    folder: Path,
) -> ConfigCopy | None:
    """Return the best config as YAML; None unless the script passes what such a file of its arguments holds.

    A copy that differs in the micro-batch alone would contradict the file's other batch sizes, and lack the stage.

    Args:
        source: What the script's batch size follows by, as of ``BatchRule.source``.
        config: The best config, with all batch sizes.
        own: The config that the script passes by itself; its batch sizes are not compared.
        args: The script's arguments.
        cwd: Its working directory.
        folder: Where the copy is to lie.
    """
    if source.get("kind") != "setting" or source["key"] not in (MICRO_BATCH, TRAIN_BATCH):
        return None
    file = Path(source["file"])
    if file.suffix not in (".yaml", ".yml") or not any(names_file(arg, file, cwd=cwd) for arg in args):
        return None
    import yaml

    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    if not isinstance(found, Mapping) or _without_batch(found) != _without_batch(own):
        return None
    text = yaml.safe_dump(dict(config), sort_keys=False)
    return ConfigCopy(original=file, path=folder / f"best_{file.name}", text=text)


def _without_batch(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in _BATCH_KEYS}
