"""Convert Determined's form of a search, ``optuna-dsat asha experiment.yaml model_dir/``, to arguments."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from optuna_dsat.cli.tables import notify
from optuna_dsat.errors import UsageError
from optuna_dsat.escape.shell import enter
from optuna_dsat.script.experiment import Experiment, read_experiment
from optuna_dsat.study.options.declaration import DEFAULT_OUTPUT_DIR, DEFAULT_STORAGE, OUTPUT_DIR_ENV, STORAGE_ENV
from optuna_dsat.study.options.parse import NO_CONFIG

_SUFFIXES = (".yaml", ".yml")
_DEVICE_OPTIONS = ("--gpus-per-trial", "--cpu-ranks")


@dataclass(frozen=True, kw_only=True)
class Unfolded:
    """Arguments of ``optuna-dsat``, and the process in which they are valid."""

    arguments: Sequence[str]
    folder: Path | None = None
    """Working directory of the search; None for the present directory."""
    gpus: str | None = None
    """``CUDA_VISIBLE_DEVICES`` of the search; None to keep the present value."""

    def apply(self) -> list[str]:
        """Change working directory and environment of this process accordingly; return the arguments."""
        if self.folder is not None:
            enter(self.folder)
        if self.gpus is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = self.gpus
        return list(self.arguments)


def is_experiment(words: Sequence[str], *, cwd: Path) -> bool:
    """Return whether arguments start with an experiment configuration and a model directory that exist."""
    if len(words) < 2 or not words[0].endswith(_SUFFIXES) or words[1] == NO_CONFIG:
        return False
    return (cwd / words[0]).is_file() and (cwd / words[1]).is_dir()


def unfold_experiment(words: Sequence[str], *, own: Sequence[str], known: frozenset[str], cwd: Path) -> Unfolded:
    """Convert an experiment configuration to the arguments of a search; given options override its settings.

    The search runs in the model directory. Unsupported keys are reported on stderr.

    Args:
        words: The configuration, the directory, further options and, after ``--``, arguments.
        own: Options in front of them.
        known: The search's options.
        cwd: The working directory.

    Raises:
        UsageError: If the configuration cannot be used.
    """
    file, folder = (cwd / words[0]).resolve(), (cwd / words[1]).resolve()
    further, rest = list(words[2:]), []
    if "--" in further:
        further, rest = further[: further.index("--")], further[further.index("--") + 1 :]
    given = [*own, *further]
    experiment = read_experiment(file)
    arguments = [*_settings(experiment, given=given, known=known), *given, *kept_places(cwd, folder, given=given)]
    named = os.path.relpath(file, folder)
    for note in _notes(experiment, known=known):
        notify(f"{named}: {note}")
    return Unfolded(arguments=[*arguments, *_target(experiment, named, folder=folder, rest=rest)], folder=folder)


def _settings(experiment: Experiment, *, given: Sequence[str], known: frozenset[str]) -> list[str]:
    """Return the options for the searcher, the devices and the environment of an experiment."""
    from optuna_dsat.launch.machine.devices import detect_devices

    settings = [word for name, value in experiment.options.items() if name in known for word in (name, value)]
    if experiment.slots is not None and not any(word.partition("=")[0] in _DEVICE_OPTIONS for word in given):
        settings += [_DEVICE_OPTIONS[detect_devices().kind != "cuda"], str(experiment.slots)]
    for name, value in experiment.environment.items():
        settings += ["--env", f"{name}={value}"]
    return settings


def kept_places(cwd: Path, folder: Path, *, given: Sequence[str]) -> list[str]:
    """Return options that keep output and database relative to ``cwd`` if a search runs in another folder.

    They must follow the given options, whose paths are relative to ``cwd``.
    """
    if folder == cwd.resolve():
        return []
    from optuna_dsat.cli.parsing.options_file import find_options

    file = find_options(cwd)
    in_file = {f"--{name}" for name in (file.table if file else {})}
    output = value_given(given, "--output-dir") or os.environ.get(OUTPUT_DIR_ENV)
    storage = value_given(given, "--storage") or os.environ.get(STORAGE_ENV)
    places = []
    if output or "--output-dir" not in in_file:
        places += ["--output-dir", str(cwd.absolute() / (output or DEFAULT_OUTPUT_DIR))]
    if storage or "--storage" not in in_file:
        scheme, result, name = (storage or DEFAULT_STORAGE).partition(":///")
        if result and scheme.startswith("sqlite") and name and not name.startswith((":", "file:")):
            places += ["--storage", f"{scheme}:///{cwd.absolute() / name}"]
    return places


def value_given(words: Sequence[str], option: str) -> str | None:
    """Return the value of an option on a command line; None if it is not given."""
    result = None
    for word, following in zip(words, (*words[1:], ""), strict=False):
        name, equals, value = word.partition("=")
        if name == option:
            result = value if equals else following
    return result


def _notes(experiment: Experiment, *, known: frozenset[str]) -> list[str]:
    """Return notes on an experiment: unsupported keys, and how a script receives its hyperparameters."""
    unknown = [name.removeprefix("--") for name in experiment.options if name not in known]
    notes = []
    if experiment.without_meaning:
        notes.append(f"{', '.join(experiment.without_meaning)}: without meaning here.")
    if unknown:
        notes.append(f"{', '.join(unknown)}: no option of this search.")
    if not experiment.is_trial:
        notes.append("the script is run as it is; hyperparameters reach it as its own arguments, after --.")
    return notes


def _target(experiment: Experiment, named: str, *, folder: Path, rest: Sequence[str]) -> list[str]:
    """Return script or model definition, config and arguments."""
    if experiment.is_trial:
        if not experiment.config:
            raise UsageError(
                f"{named}: the hyperparameters name no DeepSpeed config: add deepspeed_config: ds_config.json."
            )
        return [*experiment.entry, experiment.config, "--hparams", named, "--", *rest]
    from optuna_dsat.script.command.launch_command import LaunchCommand, read_command

    words = [*experiment.entry, *rest]
    command = read_command(words, cwd=folder)
    if command is None and words[0].endswith(".py"):
        command = LaunchCommand(script=words[0], args=tuple(words[1:]))
    if command is None:
        raise UsageError(f"{named}: the entrypoint `{shlex.join(experiment.entry)}` runs no Python script or module.")
    module = ["--module"] if command.is_module else []
    module += [] if command.python is None else ["--python", command.python]
    return [*module, command.script, experiment.config or NO_CONFIG, "--", *command.args]
