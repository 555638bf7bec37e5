"""Copy a script's settings file with the best batch size and config, for the command that trains with it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna_dsat.config.ds_config import MICRO_BATCH
from optuna_dsat.runtime.files import read_regular

__all__ = ["Document", "SettingsCopy", "names_file", "settings_copy"]

_FORMATS = (".json", ".yaml", ".yml")
_STANDARD = "tag:yaml.org,2002:"
"""Prefix of the tags that every loader supports; other tags may read files next to the original."""
_ONE_LINE = 2**30
"""Line width at which YAML writes any mapping on one line."""
_WRITTEN = re.compile(r"(^|_)(out|output|outputs|log|logs|logging|save|run)(_|$)", re.IGNORECASE)
"""Keys of paths that a script writes to; they may exist from an earlier run."""


@dataclass(frozen=True, kw_only=True)
class SettingsCopy:
    """A copy of the user's settings file with another batch size and another DeepSpeed config path."""

    original: Path
    path: Path
    text: str
    sets_batch: bool = True
    """Whether it sets the batch size of the best config."""
    names_config: bool = False
    """Whether it names the best config, or is the best config."""

    def pointed(self, args: Sequence[str], *, cwd: str) -> list[str]:
        """Return a script's arguments with the original file replaced by the copy."""
        return [
            f"{arg.rpartition('=')[0]}{arg.rpartition('=')[1]}{self.path}"
            if names_file(arg, self.original, cwd=cwd)
            else arg
            for arg in args
        ]


def names_file(arg: str, file: str | Path, *, cwd: str) -> bool:
    """Whether an argument, or its part after ``=``, is the path of a file."""
    try:
        return (Path(cwd) / arg.rpartition("=")[2]).resolve() == Path(file).resolve()
    except (ValueError, OSError):  # not a valid path: a NUL character or an unpaired surrogate
        return False


def settings_copy(
    source: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    args: Sequence[str],
    cwd: str,
    folder: Path,
    user_config: str = "",
    best_config: str = "",
) -> SettingsCopy | None:
    """Return a copy that sets a config's batch size and names the config; None if the user has to edit the file.

    None is returned if no argument names the file, if its format is not JSON or YAML, or if a path or custom tag in it
    may refer to a neighbouring file, which the copy would miss.

    Args:
        source: Source of the script's batch size, from ``BatchRule.source``.
        config: The best config, with all batch sizes.
        args: The script's arguments.
        cwd: Its working directory.
        folder: Folder of the copy.
        user_config: Path of the user's DeepSpeed config, which such a file may name; empty if there is none.
        best_config: Path of the best config, which replaces ``user_config`` in the copy.
    """
    sets_batch = source.get("kind") == "setting" and config[MICRO_BATCH] != source["own"]
    sets_batch = sets_batch and any(names_file(arg, source["file"], cwd=cwd) for arg in args)
    named = [Path(cwd) / arg.rpartition("=")[2] for arg in args] if user_config else []
    for file in [Path(source["file"])] if sets_batch else named:
        if file.suffix not in _FORMATS or names_file(str(file), user_config, cwd=cwd):
            continue
        try:
            document = Document.read(file, cwd=cwd, user_config=user_config)
        except (OSError, UnicodeDecodeError, ValueError):
            continue
        number = None
        if sets_batch:
            scale = int(source.get("scale", 1))
            number = (source["key"].split("."), source["own"] * scale, config[MICRO_BATCH] * scale)
        changed = None if document is None else document.changed(number=number, best_config=best_config)
        if document is not None and changed is not None:
            return SettingsCopy(
                original=file,
                path=folder / f"best_{file.name}",
                text=changed,
                sets_batch=sets_batch,
                names_config=bool(document.named),
            )
    return None


@dataclass(frozen=True, kw_only=True)
class Document:
    """A settings file as text and as YAML nodes; JSON is parsed as YAML, too."""

    text: str
    root: Any
    named: Sequence[Any]
    """Nodes that are the path of the user's DeepSpeed config."""
    beside: Path
    is_json: bool

    @classmethod
    def read(cls, file: Path, *, cwd: str, user_config: str) -> Document | None:
        """Read a file; None if it is not YAML.

        Raises:
            OSError: If it cannot be read.
            ValueError: If it is too large or not text.
        """
        import yaml

        text = read_regular(file).decode("utf-8")
        try:
            root = yaml.compose(text.replace("\t", " "), Loader=yaml.SafeLoader)  # JSON may be indented with tabs
        except yaml.YAMLError:
            return None
        named = [
            node
            for _, node in _nodes(root)
            if user_config
            and isinstance(node, yaml.ScalarNode)
            and node.value
            and any(names_file(f"={node.value}", user_config, cwd=name) for name in (cwd, str(file.parent)))
        ]
        return cls(text=text, root=root, named=named, beside=file.parent, is_json=file.suffix == ".json")

    def changed(
        self,
        *,
        number: tuple[Sequence[str], int, int] | None,
        best_config: str = "",
        section: tuple[Sequence[str], Mapping[str, Any]] | None = None,
    ) -> str | None:
        """Return the text with a new number, a new section and the best config's path; None if not possible.

        Args:
            number: Key, old value and new value; None if no number changes.
            best_config: Path of the best config.
            section: Key and new content of a mapping; None if no mapping changes.
        """
        nodes = list(_nodes(self.root))
        if any(node not in self.named and _may_need(name, node, self.beside) for name, node in nodes):
            return None
        edits = [(node, json.dumps(best_config)) for node in self.named]
        if number is not None:
            key, own, new = number
            node = self._node_at(key)
            if self._text_of(node) != str(own):
                return None
            edits.append((node, str(new)))
        if section is not None:
            node = self._node_at(section[0])
            edits.append((node, self._written(section[1], node)))
        if any(sum(item is node for _, item in nodes) != 1 for node, _ in edits):  # because of aliases
            return None
        text = self.text
        for node, words in sorted(edits, key=lambda edit: edit[0].start_mark.index, reverse=True):
            text = f"{text[: node.start_mark.index]}{words}{text[_end(node) :]}"
        return text if edits else None

    def _node_at(self, key: Sequence[str]) -> Any:
        """Return the node at a key; None if absent."""
        node = self.root
        for name in key:
            node = dict(_children(node)).get(name)
        return node

    def _written(self, values: Mapping[str, Any], node: Any) -> str:
        """Format a mapping as replacement of a node, in block style if the node has block style."""
        import yaml

        first = self.text.rfind("\n", 0, node.start_mark.index) + 1
        line = self.text[first : node.start_mark.index]
        if not node.flow_style:
            lines: str = yaml.safe_dump(dict(values), sort_keys=False)
            return lines.rstrip("\n").replace("\n", "\n" + " " * len(line))
        if not self.is_json:  # YAML reads some numbers that JSON does not have
            flowing: str = yaml.safe_dump(dict(values), sort_keys=False, default_flow_style=True, width=_ONE_LINE)
            return flowing.rstrip("\n")
        if "\n" not in self.text[node.start_mark.index : _end(node)]:
            return json.dumps(values)
        return json.dumps(values, indent=2).replace("\n", "\n" + line[: len(line) - len(line.lstrip())])

    def _text_of(self, node: Any) -> str:
        return "" if node is None else self.text[node.start_mark.index : node.end_mark.index]


def _children(node: Any) -> Iterator[tuple[str, Any]]:
    """Yield (key or index, child node) of a node."""
    import yaml

    if isinstance(node, yaml.MappingNode):
        yield from ((str(key.value), value) for key, value in node.value)
    elif isinstance(node, yaml.SequenceNode):
        yield from ((str(index), value) for index, value in enumerate(node.value))


def _end(node: Any) -> int:
    """Return the end position of a node's text; the end mark of a block mapping is only at the next token."""
    children = [child for _, child in _children(node)]
    index: int = node.end_mark.index
    return max(map(_end, children), default=index) if children and not node.flow_style else index


def _nodes(node: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a YAML node and its descendants with their keys. Aliased nodes are yielded once per alias."""
    yield name, node
    for key, child in _children(node):
        yield from _nodes(child, key)


def _may_need(name: str, node: Any, beside: Path) -> bool:
    """Whether a node may be the path of a file next to the document, to be read by the script."""
    if node is None or not node.tag.startswith(_STANDARD):
        return True
    if node.tag != f"{_STANDARD}str" or not node.value.strip("./") or _WRITTEN.search(name):
        return False
    try:
        return not Path(node.value).is_absolute() and (beside / node.value).exists()
    except (OSError, ValueError):  # not a path: too long, or with an invalid character
        return False
