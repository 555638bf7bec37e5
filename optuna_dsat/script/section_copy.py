"""Copy the script's settings file and replace its DeepSpeed section with the best config."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from optuna_dsat.config.ds_config import MICRO_BATCH
from optuna_dsat.script.config_copy import best_of_file, passes, paths_among
from optuna_dsat.script.config_location import holds_config, read_settings
from optuna_dsat.script.settings_file import Document, SettingsCopy, names_file

__all__ = ["section_copy"]

_DEPTH = 6
"""Maximum nesting depth at which a section is searched for."""


def section_copy(
    source: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    own: Mapping[str, Any],
    args: Sequence[str],
    cwd: str,
    folder: Path,
) -> SettingsCopy | None:
    """Return a copy of the settings file that contains the script's config as a section; None if there is none.

    The file is a JSON or YAML file that an argument names, with exactly one section equal to the config that the script
    passes. The rest of the file is unchanged, except for a batch size that the script reads elsewhere in it.

    Args:
        source: Source of the script's batch size, from ``BatchRule.source``; empty if it is the config.
        config: The best config, with all batch sizes.
        own: The config that the script itself passes; its batch sizes are not compared.
        args: The script's arguments.
        cwd: Its working directory.
        folder: Folder of the copy.
    """
    if source and source.get("kind") != "setting":
        return None
    for file in paths_among(args, cwd=cwd):
        result = read_settings(file)
        sections = [item for item in _sections(result) if passes(item[1], own=own)]
        if len(sections) != 1 or (source and not names_file(source["file"], file, cwd=cwd)):
            continue
        key, section = sections[0]
        number = _number(source, config, section=key) if source else None
        text = _text(
            file, section=(key, best_of_file(section, config, own=own)), number=number, settings=result, cwd=cwd
        )
        if text is not None:
            return SettingsCopy(original=file, path=folder / f"best_{file.name}", text=text, names_config=True)
    return None


def _sections(result: Any, key: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """Yield (key, content) of the DeepSpeed configs within a mapping."""
    if not isinstance(result, Mapping) or len(key) >= _DEPTH:
        return
    for name, value in result.items():
        if holds_config(value):
            yield (*key, str(name)), value
        else:
            yield from _sections(value, (*key, str(name)))


def _number(
    source: Mapping[str, Any], config: Mapping[str, Any], *, section: tuple[str, ...]
) -> tuple[Sequence[str], int, int] | None:
    """Return (key, old value, new value) of the batch size; None if it is in the section or unchanged."""
    key, own = source["key"].split("."), source["own"]
    if tuple(key[: len(section)]) == section or config[MICRO_BATCH] == own:
        return None
    scale = int(source.get("scale", 1))
    return key, own * scale, config[MICRO_BATCH] * scale


def _text(
    file: Path,
    *,
    section: tuple[tuple[str, ...], Mapping[str, Any]],
    number: tuple[Sequence[str], int, int] | None,
    settings: Any,
    cwd: str,
) -> str | None:
    """Return the file's text with the new section and number; None if it would not parse to exactly this change."""
    import yaml

    try:
        document = Document.read(file, cwd=cwd, user_config="")
    except (OSError, UnicodeDecodeError, ValueError):
        return None
    text = None if document is None else document.changed(number=number, section=section)
    if text is None:
        return None
    expected = _replaced(settings, section[0], section[1])
    if number is not None:
        expected = _replaced(expected, tuple(number[0]), number[2])
    try:
        read = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError):
        return None
    return text if read == expected else None


def _replaced(settings: Mapping[str, Any], key: Sequence[str], value: Any) -> dict[str, Any]:
    name, *rest = key
    return {
        other: (_replaced(held, rest, value) if rest else value) if str(other) == name else held
        for other, held in settings.items()
    }
