"""Find the DeepSpeed config of a training command: in an option, an argument, or a key of a settings file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from optuna_dsat.runtime.files import read_regular

__all__ = ["find_config", "find_config_key", "holds_config", "looks_like_config", "parsed_settings"]

_OPTIONS = ("--deepspeed_config", "--deepspeed-config", "--deepscale_config", "--deepspeed")
"""Options that name the config by convention: DeepSpeed's and the Hugging Face Trainer's."""
_KEYS = ("deepspeed", "deepspeed_config", "deepspeed_config_file", "ds_config")
"""Keys that name the config in settings files, at any level."""
_SURE = frozenset({"zero_optimization", "train_micro_batch_size_per_gpu"})
_LIKELY = frozenset(
    {
        *("train_batch_size", "gradient_accumulation_steps", "fp16", "bf16", "optimizer", "scheduler"),
        *("gradient_clipping", "steps_per_print", "wall_clock_breakdown", "zero_allow_untested_optimizer"),
    }
)
"""Keys of a DeepSpeed config: a single certain key identifies it, or two likely keys."""
_SETTINGS = (".yaml", ".yml", ".json")
_LARGEST_BYTES = 2**20


def find_config(args: Sequence[str], *, cwd: Path) -> Path | None:
    """Return the DeepSpeed config that a script's arguments refer to; None if they name none.

    Conventional options come first, then any argument that is a DeepSpeed config, then settings files among the
    arguments. Paths in a settings file are relative to the working directory or to the file.
    """
    by_option = [value for option, value in _pairs(args) if option in _OPTIONS]
    others = [value for _, value in _pairs(args)]
    for value in (*by_option, *others):
        path = cwd / value
        if looks_like_config(path):
            return path
    return next((named for _, named in _named_by_settings(args, cwd=cwd)), None)


def find_config_key(args: Sequence[str], *, cwd: Path, config: Path) -> str | None:
    """Return the dotted key under which a settings file among a script's arguments names a DeepSpeed config."""
    keys = (key for key, named in _named_by_settings(args, cwd=cwd) if named.resolve() == config.resolve())
    return next(keys, None)


def _named_by_settings(args: Sequence[str], *, cwd: Path) -> Iterator[tuple[str, Path]]:
    for _, value in _pairs(args):
        path = cwd / value
        if path.suffix in _SETTINGS:
            yield from _named_in(read_settings(path), folders=(cwd, path.parent))


def looks_like_config(path: Path) -> bool:
    """Whether a file contains a DeepSpeed config: JSON or HJSON with its keys."""
    return path.suffix in (".json", ".hjson", "") and holds_config(read_settings(path))


def holds_config(result: Any) -> TypeGuard[Mapping[str, Any]]:
    """Whether the content of a file is a DeepSpeed config, judged by its keys."""
    return isinstance(result, Mapping) and (bool(_SURE & result.keys()) or len(_LIKELY & result.keys()) > 1)


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
