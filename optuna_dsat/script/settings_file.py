"""A copy of a script's settings file with the best batch size, for the command that trains with it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna_dsat.config.ds_config import MICRO_BATCH
from optuna_dsat.runtime.regular_file import read_regular

__all__ = ["SettingsCopy", "names_file", "settings_copy"]

_FORMATS = (".json", ".yaml", ".yml")
_STANDARD = "tag:yaml.org,2002:"
"""Prefix of the tags that every loader knows; others may read files beside the original."""
_WRITTEN = re.compile(r"(^|_)(out|output|outputs|log|logs|logging|save|run)(_|$)", re.IGNORECASE)
"""Keys of paths that a script writes to; an earlier run may have left them."""


@dataclass(frozen=True, kw_only=True)
class SettingsCopy:
    """A copy that differs from the user's file in one number."""

    original: Path
    path: Path
    text: str

    def pointed(self, args: Sequence[str], *, cwd: str) -> list[str]:
        """Return a script's arguments with the copy in the place of the original."""
        return [
            f"{arg.rpartition('=')[0]}{arg.rpartition('=')[1]}{self.path}"
            if names_file(arg, self.original, cwd=cwd)
            else arg
            for arg in args
        ]


def names_file(arg: str, file: str | Path, *, cwd: str) -> bool:
    """Whether an argument, or what stands behind its ``=``, is the path of a file."""
    try:
        return (Path(cwd) / arg.rpartition("=")[2]).resolve() == Path(file).resolve()
    except (ValueError, OSError):  # an argument that can be no path: a NUL character, half a surrogate pair
        return False


def settings_copy(
    source: Mapping[str, Any], config: Mapping[str, Any], *, args: Sequence[str], cwd: str, folder: Path
) -> SettingsCopy | None:
    """Return the copy that sets the batch size of a config; None where its user has to write the number.

    That is so where no argument names the file, its format is not JSON or YAML, or a path in it (or a tag of its own)
    may mean a file beside it, which the copy would miss.

    Args:
        source: What the script's batch size follows by, as of ``BatchRule.source``.
        config: The best config, with all batch sizes.
        args: The script's arguments.
        cwd: Its working directory.
        folder: Where the copy is to lie.
    """
    if source.get("kind") != "setting" or config[MICRO_BATCH] == source["own"]:
        return None
    file, scale = Path(source["file"]), int(source.get("scale", 1))
    if file.suffix not in _FORMATS or not any(names_file(arg, file, cwd=cwd) for arg in args):
        return None
    try:
        text = read_regular(file).decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    changed = _with_number(
        text,
        source["key"].split("."),
        own=source["own"] * scale,
        number=config[MICRO_BATCH] * scale,
        beside=file.parent,
    )
    return None if changed is None else SettingsCopy(original=file, path=folder / f"best_{file.name}", text=changed)


def _with_number(text: str, key: Sequence[str], *, own: int, number: int, beside: Path) -> str | None:
    """Return a document with another number at a key; None if it is not there once, or files beside it are meant."""
    import yaml

    try:
        root = yaml.compose(text.replace("\t", " "), Loader=yaml.SafeLoader)  # JSON may be indented by tabs
    except yaml.YAMLError:
        return None
    node = root
    for name in key:
        node = dict(_children(node)).get(name)
    nodes = list(_nodes(root))
    if sum(one is node for _, one in nodes) != 1 or any(_may_need(name, one, beside) for name, one in nodes):
        return None
    start, end = node.start_mark.index, node.end_mark.index
    return f"{text[:start]}{number}{text[end:]}" if text[start:end] == str(own) else None


def _children(node: Any) -> Iterator[tuple[str, Any]]:
    """Yield (key or index, node) of what a node holds."""
    import yaml

    if isinstance(node, yaml.MappingNode):
        yield from ((str(key.value), value) for key, value in node.value)
    elif isinstance(node, yaml.SequenceNode):
        yield from ((str(index), value) for index, value in enumerate(node.value))


def _nodes(node: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a node and all below it with their keys; one that aliases name comes once for each."""
    yield name, node
    for key, child in _children(node):
        yield from _nodes(child, key)


def _may_need(name: str, node: Any, beside: Path) -> bool:
    """Whether a node may mean a file in the folder of its document, to read it."""
    if node is None or not node.tag.startswith(_STANDARD):
        return True
    if node.tag != f"{_STANDARD}str" or not node.value.strip("./") or _WRITTEN.search(name):
        return False
    try:
        return not Path(node.value).is_absolute() and (beside / node.value).exists()
    except (OSError, ValueError):  # no path: too long, or with a character that none has
        return False
