"""Find the DeepSpeed config of a training command, and copy a settings file with the best config for it.

The config is in an option, an argument, or a key of a settings file.

The copy has the best batch size where the script reads it, and the best config: as the whole file, as a section of it,
or by its path, as the script's file has its own config. The other values are unchanged; comments are not kept.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from optuna_dsat.config.ds_config import BATCH_KEYS, MICRO_BATCH, TRAIN_BATCH
from optuna_dsat.runtime.files import read_regular
from optuna_dsat.runtime.overlay import flatten, merge, nest
from optuna_dsat.runtime.trial_config import settings_told

_OPTIONS = ("--deepspeed_config", "--deepspeed-config", "--deepscale_config", "--deepspeed")
"""Options that name the config by convention: DeepSpeed's and the Hugging Face Trainer's."""
_OF_CONFIGS = _OPTIONS[:3]
"""Options whose file is always the config; ``--deepspeed`` may be a flag in front of another argument."""
_KEYS = ("deepspeed", "deepspeed_config", "deepspeed_config_file", "ds_config")
"""Keys that name the config in settings files, at any level."""
_SURE = frozenset({"zero_optimization", "train_micro_batch_size_per_gpu"})
_LIKELY = frozenset(
    {
        *("train_batch_size", "gradient_accumulation_steps", "gradient_clipping"),
        *("steps_per_print", "wall_clock_breakdown", "zero_allow_untested_optimizer"),
    }
)
_SECTIONS = frozenset({"fp16", "bf16", "optimizer", "scheduler"})
"""Keys of a DeepSpeed config: a single certain key identifies it, or two likely keys or sections."""
_SETTINGS = (".yaml", ".yml", ".json")
_LARGEST_BYTES = 2**20


def find_config(args: Sequence[str], *, cwd: Path) -> Path | None:
    """Return the DeepSpeed config that a script's arguments refer to; None if they name none.

    Conventional options come first, then any argument that is a config, then settings files, whose paths are relative
    to the working directory or to the file.
    """
    pairs = [(option, cwd / value) for option, value in _pairs(args)]
    for option, path in pairs:
        if option in _OF_CONFIGS and path.suffix in (".json", ".hjson") and path.is_file():
            return path
    by_option = [path for option, path in pairs if option in _OPTIONS]
    for path in (*by_option, *(path for _, path in pairs)):
        if looks_like_config(path):
            return path
    return next((named for _, named in _named_by_settings(args, cwd=cwd)), None)


def missing_config(args: Sequence[str], *, cwd: Path) -> str:
    """Return the option and value of a script's arguments that name a config which does not exist; empty for none."""
    named = ((option, value) for option, value in _pairs(args) if option in _OPTIONS)
    missing = (pair for pair in named if pair[1].endswith((".json", ".hjson")) and not (cwd / pair[1]).exists())
    return " ".join(next(missing, ()))


def find_config_key(args: Sequence[str], *, cwd: Path, config: Path) -> str | None:
    """Return the dotted key under which a settings file among a script's arguments names a DeepSpeed config."""
    keys = (key for key, named in _named_by_settings(args, cwd=cwd) if named.resolve() == config.resolve())
    return next(keys, None)


def _named_by_settings(args: Sequence[str], *, cwd: Path) -> Iterator[tuple[str, Path]]:
    for path in settings_files(args, cwd=cwd):
        yield from _named_in(read_settings(path), folders=(cwd, path.parent))


def settings_files(args: Sequence[str], *, cwd: Path) -> Iterator[Path]:
    """Yield the paths among a script's arguments that have the suffix of a settings file."""
    return (cwd / value for _, value in _pairs(args) if Path(value).suffix in _SETTINGS)


def looks_like_config(path: Path) -> bool:
    """Whether a file contains a DeepSpeed config: JSON or HJSON with its keys."""
    return path.suffix in (".json", ".hjson", "") and holds_config(read_settings(path))


def holds_config(result: Any) -> TypeGuard[Mapping[str, Any]]:
    """Whether the content of a file is a DeepSpeed config, judged by its keys."""
    if not isinstance(result, Mapping):
        return False
    sections = {key for key in _SECTIONS & result.keys() if isinstance(result[key], Mapping)}  # a Trainer's are flags
    return bool(_SURE & result.keys()) or len(_LIKELY & result.keys() | sections) > 1


def _pairs(args: Sequence[str]) -> Iterable[tuple[str, str]]:
    """Yield (option, value) of ``--option value`` and ``--option=value``, and ("", argument) of other arguments."""
    option = ""
    for arg in args:
        name, equals, value = arg.partition("=")
        if arg.startswith("-") and not equals:
            option = arg
        else:
            yield (name, value) if equals else (option, arg)
            option = ""


def read_settings(path: Path) -> Any:
    """Return the content of a YAML, JSON or HJSON file; None for any other file."""
    try:
        return parsed_settings(read_regular(path, most_bytes=_LARGEST_BYTES).decode("utf-8"), path.suffix)
    except (OSError, UnicodeDecodeError, ValueError):
        return None


def parsed_settings(text: str, suffix: str) -> Any:
    """Return the data of a text, in YAML by the suffix, else JSON or HJSON; None if it is neither."""
    import hjson
    import yaml

    try:
        return yaml.safe_load(text) if suffix in (".yaml", ".yml") else hjson.loads(text)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError, TypeError, AttributeError):
        return None


def _named_in(result: Any, *, folders: Sequence[Path], depth: int = 6, within: str = "") -> Iterator[tuple[str, Path]]:
    """Yield (dotted key, path) of the DeepSpeed configs that a settings file names."""
    if depth == 0 or not isinstance(result, Mapping):
        return
    for key, value in result.items():
        if key in _KEYS and isinstance(value, str):
            named = next((folder / value for folder in folders if looks_like_config(folder / value)), None)
            if named is not None:
                yield f"{within}{key}", named
        yield from _named_in(value, folders=folders, depth=depth - 1, within=f"{within}{key}.")


_DEPTH = 6
"""Maximum nesting depth at which a section is searched for."""
_WRITTEN = re.compile(r"(^|_)(out|output|outputs|log|logs|logging|save|run)(_|$)", re.IGNORECASE)
"""Keys of paths that a script writes to; they may exist from an earlier run."""

_Key = tuple[str, ...]
"""Keys and list indices that lead to a value of a settings file; empty for the whole file."""


@dataclass(frozen=True, kw_only=True)
class SettingsCopy:
    """A copy of the user's settings file with another batch size and another DeepSpeed config."""

    original: Path
    path: Path
    text: str
    sets_batch: bool = True
    """Whether it sets the batch size of the best config."""
    names_config: bool = False
    """Whether it names or contains the best config."""

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
    user: Mapping[str, Any],
    args: Sequence[str],
    cwd: str,
    folder: Path,
    sections: bool = False,
    user_config: str = "",
    best_config: str = "",
) -> SettingsCopy | None:
    """Return a copy of a settings file among the arguments; None if the user has to edit the file.

    None is returned if no argument names such a file, if its format is not JSON or YAML, if a path or custom tag in it
    may refer to a neighbouring file, which the copy would miss, or if an alias repeats what is to be changed. A file or
    section is the script's config if the script passes it to DeepSpeed, apart from batch sizes and settings that the
    script adds, such as scheduler steps.

    ``source`` is that of the script's batch size (``BatchRule.source``), ``config`` the best config with all batch
    sizes, ``user`` the config that the script itself passes. ``sections`` is whether the config may be a section of the
    file. ``best_config`` is the path that replaces ``user_config`` in the copy.
    """
    files = [file for arg in args if (file := Path(cwd) / arg.rpartition("=")[2]).suffix in _SETTINGS]
    is_setting = source.get("kind") == "setting"
    sources = [file for file in files if is_setting and names_file(source["file"], file, cwd=cwd)]
    changes_batch = bool(sources) and config[MICRO_BATCH] != source["own"]
    for file in sources if changes_batch else files:
        document = _Document.read(file)
        if document is None or (user_config and names_file(user_config, file, cwd=cwd)):
            continue
        changes: dict[_Key, Any] = {}
        if not source or file in sources:
            changes = document.config_change(source.get("key"), config, user=user, sections=sections)
        is_config = bool(changes)
        values = dict(_values(document.settings))
        if not is_config and user_config:
            changes = {key: best_config for key, value in values.items() if _is_path(value, user_config, file, cwd)}
        names_config = bool(changes)
        number = tuple(str(source.get("key")).split("."))
        if changes_batch and not any(number[: len(key)] == key for key in changes):
            scale = int(source.get("scale", 1))
            if values.get(number) != source["own"] * scale:
                continue
            changes[number] = config[MICRO_BATCH] * scale
        text = document.changed(changes)
        if text is not None:
            return SettingsCopy(
                original=file,
                path=folder / f"best_{file.name}",
                text=text,
                sets_batch=is_config or changes_batch,
                names_config=names_config,
            )
    return None


def _is_path(value: Any, path: str, file: Path, cwd: str) -> bool:
    """Whether a value in a settings file is a path, relative to the working directory or to the file."""
    is_text = isinstance(value, str) and bool(value)
    return is_text and any(names_file(f"={value}", path, cwd=name) for name in (cwd, str(file.parent)))


@dataclass(frozen=True, kw_only=True)
class _Document:
    """A settings file and its data."""

    file: Path
    settings: Any

    @classmethod
    def read(cls, file: Path) -> _Document | None:
        """Read a file; None if it cannot be read, is empty, or is not YAML or JSON."""
        try:
            text = read_regular(file).decode("utf-8")
        except (OSError, ValueError):
            return None
        settings = parsed_settings(text, file.suffix)
        return None if settings is None else cls(file=file, settings=settings)

    def config_change(
        self, batch_key: str | None, config: Mapping[str, Any], *, user: Mapping[str, Any], sections: bool
    ) -> dict[_Key, Any]:
        """Return key -> new content of the script's config in this file; empty unless there is exactly one.

        A whole file is only replaced if it is YAML and the script reads its batch size from no other key than the
        config's: a copy that differs only in the micro-batch would contradict the file's other batch sizes.
        """
        is_whole = self.file.suffix != ".json" and batch_key in (None, MICRO_BATCH, TRAIN_BATCH)
        if is_whole and holds_config(self.settings) and _passes(self.settings, user=user):
            configs: list[tuple[_Key, Mapping[str, Any]]] = [((), self.settings)]
        else:
            configs = [item for item in _sections(self.settings) if sections and _passes(item[1], user=user)]
        if len(configs) != 1:
            return {}
        [(key, record)] = configs
        # Settings of the file that the best config lacks stay, since the script may read them.
        parts = settings_told(record)
        beside = nest({key: value for key, value in flatten(record).items() if key not in parts})
        kept = {name: value for name, value in beside.items() if name not in (*BATCH_KEYS, "autotuning")}
        return {key: merge(kept, _without_added(config, user=user, record=record))}

    def changed(self, changes: Mapping[_Key, Any]) -> str | None:
        """Return a file with other values at some keys; None if not possible, or without changes."""
        import yaml

        values = dict(_values(self.settings))
        rest = [key for key in values if not any(key[: len(at)] == at for at in changes)]
        if not changes or not changes.keys() <= values.keys() or any(self._may_need(key, values[key]) for key in rest):
            return None
        uses = Counter(id(value) for value in values.values() if isinstance(value, (Mapping, list)))
        if any(uses[id(values[key[:depth]])] > 1 for key in changes for depth in range(len(key) + 1)):
            return None  # an alias repeats what is to be changed
        expected = self.settings
        for key, value in changes.items():
            expected = _replaced(expected, key, value)
        if self.file.suffix == ".json":
            return json.dumps(expected, indent=2) + "\n"
        return str(yaml.safe_dump(expected, sort_keys=False, allow_unicode=True, default_flow_style=False))

    def _may_need(self, key: _Key, value: Any) -> bool:
        """Whether a value may be the path of a file next to the document, to be read by the script."""
        if not isinstance(value, str) or not value.strip("./") or (key and _WRITTEN.search(key[-1])):
            return False
        if key[:1] == ("defaults",) and key[1:2] and key[1].isdecimal():  # Hydra's list of files below its folder
            return value != "_self_"
        try:
            return not Path(value).is_absolute() and (self.file.parent / value).exists()
        except (OSError, ValueError):  # not a path: too long, or with an invalid character
            return False


def _values(settings: Any, key: _Key = ()) -> Iterator[tuple[_Key, Any]]:
    """Yield the keys of settings and of everything in them, with the values."""
    yield key, settings
    items: Any = enumerate(settings) if isinstance(settings, list) else getattr(settings, "items", tuple)()
    for name, value in items:
        yield from _values(value, (*key, str(name)))


def _replaced(settings: Any, key: _Key, value: Any) -> Any:
    if not key:
        return value
    if isinstance(settings, list):
        return [_replaced(item, key[1:], value) if str(at) == key[0] else item for at, item in enumerate(settings)]
    return {name: _replaced(item, key[1:], value) if str(name) == key[0] else item for name, item in settings.items()}


def _sections(settings: Any, key: _Key = ()) -> Iterator[tuple[_Key, Mapping[str, Any]]]:
    """Yield (key, content) of the DeepSpeed configs within a mapping."""
    if not isinstance(settings, Mapping) or len(key) >= _DEPTH:
        return
    for name, value in settings.items():
        if holds_config(value):
            yield (*key, str(name)), value
        else:
            yield from _sections(value, (*key, str(name)))


def _passes(record: Mapping[str, Any], *, user: Mapping[str, Any]) -> bool:
    """Whether a script passes the config in a file, apart from batch sizes and settings that the script adds."""
    in_file, passed = (
        settings_told({key: value for key, value in config.items() if key not in BATCH_KEYS})
        for config in (record, user)
    )
    return in_file.items() <= passed.items()


def _without_added(config: Mapping[str, Any], *, user: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """Drop from a config the settings that the script adds to its file and the search left unchanged."""
    kept = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and isinstance(user.get(key), Mapping) and isinstance(record.get(key), Mapping):
            kept[key] = _without_added(value, user=user[key], record=record[key])
        elif key in record or key in BATCH_KEYS or key not in user or value != user[key]:
            kept[key] = value
    return kept
