"""Find the program of the ranks: a script, module or model definition of the user, without importing it."""

from __future__ import annotations

import ast
import os
import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optuna_dsat.errors import UsageError
from optuna_dsat.script.command.source import module_file, python_tree
from optuna_dsat.script.experiment import training_options
from optuna_dsat.script.trial_class import (
    RUNNER,
    Hparams,
    find_trial_class,
    is_trial_class,
    overwrites_of,
    runner_arguments,
)
from optuna_dsat.tuning.options.given import config_path
from optuna_dsat.tuning.options.tune_options import TuneOptions

_OF_CONFIGS = (".hjson", ".json", ".jsonc", ".toml", ".yaml", ".yml")
"""Suffixes of settings files."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A script, a module, or the runner of a ``DeepSpeedTrial``."""

    script: str
    """Absolute path, or a module's name if ``is_module``."""
    is_module: bool
    args: tuple[str, ...]
    stem: str
    """First part of its study's default name."""
    overwrites: Mapping[str, Any] = field(default_factory=dict)
    """Config of the hyperparameters, merged over the user's config."""


def find_target(options: TuneOptions, *, python: str | None) -> Target:
    """Return the target that the ranks run; ``UsageError`` if it does not exist, or is not Python."""
    rest = tuple(str(arg) for arg in options.script_args or ())
    script, hparams = Path(options.script), None if options.hparams is None else Path(options.hparams)
    entry = str(script)
    if not options.module and is_trial_class(entry) and not script.is_file():
        config = config_path(options)
        if config is None:
            raise UsageError(f"{entry} is a model definition: name its DeepSpeed config, too.")
        return trial_target(entry, config, hparams, _with_experiment(rest, hparams))
    if hparams is not None:
        raise UsageError("--hparams is for a DeepSpeedTrial (NAME:CLASS); a script takes its arguments after --.")
    name, stem = _module(entry, python) if options.module else _script(script)
    return Target(script=name, is_module=options.module, args=rest, stem=stem)


def trial_target(entry: str, config: Path, hparams: Path | None, rest: tuple[str, ...]) -> Target:
    """Return a ``DeepSpeedTrial``'s runner with its arguments; ``UsageError`` if class or hparams are invalid."""
    find_trial_class(entry, Path.cwd())
    overwrites = {} if hparams is None else overwrites_of(Hparams.load(hparams), config, Path.cwd())
    named = None if hparams is None else str(hparams)
    return Target(
        script=RUNNER,
        is_module=True,
        args=runner_arguments(entry, config=str(config), hparams=named, rest=rest),
        stem=entry.partition(":")[2],
        overwrites=overwrites,
    )


def _with_experiment(rest: tuple[str, ...], hparams: Path | None) -> tuple[str, ...]:
    """Add the lengths and the seed of an experiment configuration to the runner's arguments, unless they are given."""
    experiment = None if hparams is None else Hparams.load(hparams).experiment
    given = {word.partition("=")[0] for word in rest}
    wanted = training_options(experiment or {})
    return (*rest, *(word for name, value in wanted.items() if name not in given for word in (name, value)))


def _script(path: Path) -> tuple[str, str]:
    """Return the absolute path of a script, with its links as in the ``__file__`` of its own command, and its stem.

    Of a folder, Python runs ``__main__.py``.
    """
    if (path / "__main__.py").is_file():
        return _script(path / "__main__.py")[0], path.resolve().name
    if zipfile.is_zipfile(path):
        raise UsageError(f"The script {path} is a zip archive: unpack it, and name the folder.")
    if not path.is_file():
        first, space, _ = str(path).partition(" ")
        is_command = space and (first.endswith(".py") or shutil.which(first))
        raise UsageError(
            f"The script {path} {'is not a file' if path.exists() else 'does not exist'}."
            + (" To run a module, say so with -m." if module_file(str(path), Path.cwd()) else "")
            + (" Write a command without quotes around it." if is_command else "")
        )
    if path.suffix == ".ipynb":
        raise UsageError(f"The script {path} is a notebook: export it, by jupyter nbconvert --to script {path}.")
    body = [] if path.suffix in _OF_CONFIGS else python_tree(path, f"The script {path}").body
    is_json = len(body) == 1 and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Dict)
    if path.suffix in _OF_CONFIGS or is_json:
        raise UsageError(f"The script {path} is a config. Name the training script first, its config second.")
    plain = Path(os.path.abspath(path))  # noqa: PTH100 - without `..`, unless a link is before it
    return str(plain if plain.exists() and plain.samefile(path) else path.absolute()), path.stem


def _module(name: str, python: str | None) -> tuple[str, str]:
    """Return the name of a runnable module, and its last part."""
    if not all(part.isidentifier() for part in name.split(".")):
        raise UsageError(f"-m takes a module's name, such as package.module; got {name!r}.")
    file = module_file(name, Path.cwd(), python=python)
    if file is None:
        path = name.replace(".", "/")
        raise UsageError(
            f"The module {name} was not found: there is no {path}.py and no {path}/__main__.py in {Path.cwd()}, "
            "and no such module is installed."
        )
    python_tree(file, f"The module {name}")
    return name, name.rpartition(".")[2]


def writable(path: Path) -> Path:
    """Return the absolute path of a directory that exists or can be created, else ``UsageError``; creates nothing."""
    absolute = path.absolute()
    parent = absolute
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(
            f"The output directory {path} cannot be written to ({parent}). Give another with --output-dir."
        )
    return absolute
