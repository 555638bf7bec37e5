"""A search in front of a training command (``optuna-dsat tune deepspeed train.py ...``), or Determined's form of it.

The command, or an experiment configuration and its model directory (``asha experiment.yaml model_dir/``), follows the
search's own options. Both are converted to arguments of the search before typer parses them.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from typer.core import TyperCommand, TyperGroup, TyperOption

from optuna_dsat.cli.parsing.catalogue import SEARCHES, TAKE_LAUNCHER
from optuna_dsat.cli.parsing.help import HELP_NAMES
from optuna_dsat.cli.parsing.options_file import OPTIONS_ENV, file_of
from optuna_dsat.cli.parsing.rewriting import at_home
from optuna_dsat.cli.tables import notify
from optuna_dsat.errors import UsageError
from optuna_dsat.escape.shell import enter
from optuna_dsat.runtime.measure.memory import usable_cores
from optuna_dsat.script.command.launch_command import LaunchCommand
from optuna_dsat.script.experiment import Experiment, read_experiment
from optuna_dsat.study.options.declaration import DEFAULT_OUTPUT_DIR, DEFAULT_STORAGE, OUTPUT_DIR_ENV, STORAGE_ENV
from optuna_dsat.study.options.parse import NO_CONFIG

if TYPE_CHECKING:
    from optuna_dsat.launch.machine.devices import Devices

_DEVICE_OPTIONS = ("--gpus-per-trial", "--cpu-ranks")


def unfold_command(argv: Sequence[str], root: TyperGroup, *, cwd: Path) -> Unfolded:
    """Convert a training command in the arguments to script, config, ranks and the script's arguments.

    Arguments with an explicit script and config, and arguments of other commands, are returned unchanged. Parts without
    effect are reported on stderr.

    Raises:
        UsageError: If the launcher rejects its options, or options of the search would be lost.
    """
    start, name = _first_positional(argv, root.params)
    if name not in TAKE_LAUNCHER:
        return Unfolded(arguments=argv)
    search = root.commands[name]
    assert isinstance(search, TyperCommand)
    rest = list(argv[start + 1 :])
    end, first = _first_positional(rest, search.params)
    options, words = at_home(rest[:end]), rest[end:]
    if first == "--":
        words = words[1:]
    if first is None or not words or (first.startswith("-") and first != "--"):
        return Unfolded(arguments=argv)
    known = frozenset(name for param in search.params if isinstance(param, TyperOption) for name in param.opts)
    if name in SEARCHES and is_experiment(words, cwd=cwd):
        experiment = unfold_experiment(words, options=options, known=known, cwd=cwd)
        return replace(experiment, arguments=[*argv[: start + 1], *experiment.arguments])

    from optuna_dsat.script.command.launch_command import read_command
    from optuna_dsat.script.command.preparation import until_exit
    from optuna_dsat.script.interpreter import named_python

    names_module = "-m" in options or "--module" in options
    named = value_given(options, "--python")
    python = None if named is None else named_python(named)

    def given() -> list[str]:
        return [*_in_file(name, value_given(argv[:start], "--options"), cwd=cwd), *options]

    def into() -> Path:
        is_kept = name in SEARCHES and "--dry-run" not in options
        return _output_dir(given(), cwd=cwd) if is_kept else until_exit()

    command = None if names_module else read_command(words, cwd=cwd, python=python, on_notice=notify, into=into)
    if command is None and not names_module:
        _refuse_missing(words, cwd=cwd, options=known)
        if first == "--":
            command = LaunchCommand(script=words[0], args=tuple(words[1:]))
    if command is None:
        _note_further(words, search.params)
        return Unfolded(arguments=[*argv[: start + 1], *options, *_with_config(words, search.params)])
    own_notes = [] if first == "--" else _options_behind(command, words, search, cwd=cwd)
    places, folder = [], None if command.folder is None else Path(command.folder)
    if folder is not None:
        notify(f"Launches run in {folder}, where the command goes.")
        places = kept_places(cwd, folder, given=options)
    if name not in SEARCHES:  # doctor, whose option for ranks is about GPUs and which has none for variables
        from optuna_dsat.launch.machine.devices import detect_devices

        ranks = ["--gpus-per-node", str(command.ranks)] if command.ranks and detect_devices().kind == "cuda" else []
        target = _target(replace(command, environment={}), named=named is not None, cwd=folder or cwd)
        arguments = [*argv[: start + 1], *ranks, *options, *places, *target]
        return Unfolded(arguments=arguments, folder=folder, environment=command.environment)
    parts = given()
    engine = value_given(parts, "--on") or "here"
    notes = (*command.notes, *_note_on_nodes(command, engine=engine), *own_notes)
    for note in notes:
        notify(note)
    ranks, gpus = _ranks(command, options=options, given=parts, engine=engine, cwd=folder or cwd)
    target = _target(command, named=named is not None, cwd=folder or cwd)
    launch = [*ranks]
    if command.prepared:
        launch += ["--prepared", command.prepared]
        if value_given(parts, "--isolation") == "off":
            notify("With --isolation off trials do not see the files that the command has made: make them beforehand.")
    if command.launcher and value_given(options, "--train-launcher") is None:
        launch += ["--train-launcher", command.launcher]
    if command.binds_cores:
        launch += ["--fix", "bind_cores=true"]
    typed = {word.partition("=")[0] for word in options}
    return Unfolded(
        arguments=[*argv[: start + 1], *options, *places, *launch, *target],
        folder=folder,
        gpus=gpus,
        of_command=frozenset(word for word in (*launch, *target[: target.index("--")]) if word[:2] == "--") - typed,
    )


def _refuse_missing(words: Sequence[str], *, cwd: Path, options: Container[str]) -> None:
    """Raise if the command's program does not exist: its options would be parsed as the search's ``options``."""
    from optuna_dsat.script.command.interceptor import LAUNCHERS

    name = words[0]
    programs = (*LAUNCHERS, "python", "python3")
    starts_launcher = any(  # such as uv
        Path(word).name in programs and before not in options for before, word in pairwise(words)
    )
    has_option = any(word.startswith("-") and word != "--" for word in words[1:2])
    if (has_option or starts_launcher) and not Path(cwd, name).exists():
        from optuna_dsat.script.command.interception import REMEDY

        raise UsageError(f"{name}: no file in {cwd}, and no program that can be found (PATH). {REMEDY}")


def _in_file(command: str, options: str | None, *, cwd: Path) -> list[str]:
    """Return the options in the options file that specify where a search runs its launches."""
    named = options or os.environ.get(OPTIONS_ENV)
    file = file_of(Path(named) if named else None, cwd=cwd)
    values = {} if file is None else {name: file.value_of(command, name) for name in ("on", "cpu-ranks", "output-dir")}
    return [f"--{name}={value}" for name, value in values.items() if value is not None]


def _note_on_nodes(command: LaunchCommand, *, engine: str) -> Iterator[str]:
    """Yield a sentence on parts of a command that name other nodes or a rendezvous, if they have no effect."""
    if engine != "here":
        given, where = command.rendezvous, ""
    else:
        given, where = (*command.elsewhere, *command.rendezvous), "tuned on this machine alone, and "
    more = f" With --on slurm or --on ray it is tuned on {command.nodes} nodes." if where and command.nodes > 1 else ""
    if given:
        yield f"{', '.join(given)}: {where}each launch chooses its own rendezvous.{more}"


def _options_behind(command: LaunchCommand, words: Sequence[str], search: TyperCommand, *, cwd: Path) -> list[str]:
    """Return a note on options of the search after a script whose source declares options of the same name."""
    options = {
        spelling
        for option in search.params
        if isinstance(option, TyperOption) and option.name != "module"
        for spelling in (*option.opts, *option.secondary_opts)
    }
    passed = {word.partition("=")[0] for word in command.args}
    of_script = len(words) - len(command.args) - 1  # only script arguments follow a "--" at or after this index
    end = next((index for index, word in enumerate(words) if word == "--" and index >= of_script), len(words))
    start = words.index(command.script) if command.script in words else 0  # options before it are a launcher's
    typed = [
        word for word in dict.fromkeys(word.partition("=")[0] for word in words[start + 1 : end]) if word in options
    ]
    behind = [word for word in typed if word in passed or command.is_wrapped]
    if not behind:
        return []
    declared = command.source(Path(command.folder or cwd)).declared_options(behind)
    if lost := [word for word in behind if word not in declared or word not in passed]:
        raise UsageError(
            f"{', '.join(lost)}: options within the command go to the script, but {command.script} does not "
            f"declare {'them' if len(lost) > 1 else 'it'}. Options of the search precede the command: optuna-dsat "
            f"{search.name} {lost[0]} ... {words[0]}. To pass on all options as they are, write -- before the command."
        )
    return [
        f"{', '.join(behind)}: passed to the script, which declares it. Options of the search precede the command: "
        f"optuna-dsat {search.name} {behind[0]} ..."
    ]


def _with_config(words: Sequence[str], params: Sequence[object]) -> list[str]:
    """Insert a placeholder for a missing config in ``SCRIPT [options] -- ARGS``: typer would use one of ARGS."""
    if "--" not in words:
        return list(words)
    end = list(words).index("--")
    between, _ = _first_positional(words[1:end], params)
    return list(words) if 1 + between < end else [*words[:end], NO_CONFIG, *words[end:]]


def _note_further(words: Sequence[str], params: Sequence[object]) -> None:
    """Report arguments behind script and config that are passed to the script without ``--``: perhaps mistyped."""
    given, rest = list[str](), [*words[: words.index("--")]] if "--" in words else [*words]
    while (positional := _first_positional(rest, params))[1] is not None:
        given.append(positional[1])
        rest = rest[positional[0] + 1 :]
    if given[2:] and not any(word.startswith("-") for word in given):  # an unknown option is refused anyway
        notify(f"Passed to {given[0]}: {shlex.join(given[2:])}. Write -- before arguments of the script.")


def _first_positional(argv: Sequence[str], params: Sequence[object]) -> tuple[int, str | None]:
    """Return index and word of the first argument that is neither an option nor its value; None if there is none.

    An unknown option counts as well: whether the next argument is its value is not known.
    """
    options = {
        spelling: param
        for param in params
        if isinstance(param, TyperOption)
        for spelling in (*param.opts, *param.secondary_opts)
    }
    index = 0
    while index < len(argv):
        word = argv[index]
        if word == "--" or not word.startswith("-"):
            return index, word
        option = options.get(word)
        name = word.partition("=")[0] if word.startswith("--") else word[:2]
        if name not in options and name not in HELP_NAMES:
            return index, word
        index += 2 if option is not None and not option.is_flag and not option.count else 1
    return len(argv), None


def _target(command: LaunchCommand, *, named: bool, cwd: Path) -> list[str]:
    """Return the arguments for interpreter, environment, script, config and the script's arguments of a command."""
    from optuna_dsat.script.settings_file import find_config

    config = command.config or find_config(command.args, cwd=cwd)
    environment = [word for name, value in command.environment.items() for word in ("--env", f"{name}={value}")]
    target = [command.script, NO_CONFIG if config is None else os.path.relpath(cwd / config, cwd)]
    python = [] if command.python is None or named else ["--python", command.python]
    return [*python, *environment, *(["--module"] if command.is_module else []), *target, "--", *command.args]


def _ranks(
    command: LaunchCommand, *, options: Sequence[str], given: Sequence[str], engine: str, cwd: Path
) -> tuple[list[str], str | None]:
    """Return the options for the ranks of a command, and the GPUs that it selects on this machine, if any.

    ``given`` contains the options of the options file, followed by the search's own.
    """
    from optuna_dsat.launch.machine.devices import detect_devices

    if engine != "here":
        return _nodes(command, options=options, given=given, engine=engine), None
    if any(word.partition("=")[0] in _DEVICE_OPTIONS for word in options):
        return [], None
    own_ranks = command.without_launcher and command.source(cwd).starts_own_ranks()
    alone = command.without_launcher and not own_ranks
    if not alone and command.ranks is None and command.gpus is None and command.without_gpus is None:
        return [], None
    devices = detect_devices()
    if devices.kind != "cuda":
        return (_one_rank(devices) if alone else _cpu_ranks(command.ranks)), None
    gpus = _selected(command, devices)
    if alone:
        visible = devices if gpus is None else detect_devices(environ={**os.environ, "CUDA_VISIBLE_DEVICES": gpus})
        return _one_rank(visible), gpus
    return ([] if command.ranks is None else ["--gpus-per-trial", str(command.ranks)]), gpus


def _nodes(command: LaunchCommand, *, options: Sequence[str], given: Sequence[str], engine: str) -> list[str]:
    """Return the options for the nodes that a launcher uses, and for the ranks on each node."""
    wanted = {
        "--nodes-per-trial": command.nodes if command.nodes > 1 else None,
        "--gpus-per-node": None if value_given(given, "--cpu-ranks") else command.ranks,
    }
    result = [
        word
        for option, value in wanted.items()
        if value is not None and value_given(options, option) is None
        for word in (option, str(value))
    ]
    names = [name for name in command.hosts if not name.replace(".", "").isdigit() and "@" not in name]
    if engine == "slurm" and names and names == list(command.hosts):
        result.append(f"--slurm-arg=--nodelist={','.join(names)}")
    if engine == "ray" and value_given(options, "--ray-node") is None:
        result += [word for host in command.hosts for word in ("--ray-node", host.rpartition("@")[2])]
    return result


def _one_rank(devices: Devices) -> list[str]:
    """Return the option for one rank, as with a command without a launcher."""
    on_gpus, number = devices.kind == "cuda", devices.per_launch
    option = "--gpus-per-trial" if on_gpus else "--cpu-ranks"
    if number > 1:
        share = f"1 of {number} GPUs" if on_gpus else "1 rank"
        notify(
            f"The command has no launcher and trains in one process: each trial takes {share}. {option} {number} tunes "
            f"for {number}{'' if on_gpus else ' ranks'}."
        )
    return [option, "1"]


def _selected(command: LaunchCommand, devices: Devices) -> str | None:
    """Return the GPUs that a command selects, as in ``CUDA_VISIBLE_DEVICES``; None if it selects none."""
    if command.gpus is not None or command.without_gpus is None:
        return command.gpus
    left_out = command.without_gpus.split(",")
    return ",".join(str(index) for index in range(len(devices.devices)) if str(index) not in left_out)


def _cpu_ranks(ranks: int | None) -> list[str]:
    """Return the option for the ranks of a CPU launch: the launcher's number, if there are enough cores."""
    cores = usable_cores()
    words = "No GPU was found: the command is tuned on the CPU"
    if ranks is None or ranks > cores:
        fewer = "" if ranks is None else f", with fewer ranks than {ranks}, as there are {cores} cores"
        sys.stderr.write(f"{words}{fewer}.\n")
        return []
    sys.stderr.write(f"{words}, with {'1 rank' if ranks == 1 else f'{ranks} ranks'}.\n")
    return ["--cpu-ranks", str(ranks)]


_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, kw_only=True)
class Unfolded:
    """Arguments of ``optuna-dsat``, and the process in which they are valid."""

    arguments: Sequence[str]
    folder: Path | None = None
    """Working directory of the search; None for the present directory."""
    gpus: str | None = None
    """``CUDA_VISIBLE_DEVICES`` of the search; None to keep the present value."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that a command without ``--env`` sets for the script."""
    of_command: frozenset[str] = frozenset()
    """Options in ``arguments`` whose values are the training command's."""

    def apply(self) -> list[str]:
        """Change working directory and environment of this process accordingly; return the arguments."""
        if self.folder is not None:
            enter(self.folder)
        if self.gpus is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = self.gpus
        os.environ.update(self.environment)
        return list(self.arguments)


def is_experiment(words: Sequence[str], *, cwd: Path) -> bool:
    """Return whether arguments start with an experiment configuration and a model directory that exist."""
    if len(words) < 2 or not words[0].endswith(_SUFFIXES) or words[1] == NO_CONFIG:
        return False
    return (cwd / words[0]).is_file() and (cwd / words[1]).is_dir()


def unfold_experiment(words: Sequence[str], *, options: Sequence[str], known: frozenset[str], cwd: Path) -> Unfolded:
    """Convert an experiment configuration to the arguments of a search; given options override its settings.

    The search runs in the model directory; unsupported keys are reported on stderr. ``words`` are configuration,
    directory, further options and, after ``--``, arguments; ``options`` the options before them.

    Raises:
        UsageError: If the configuration cannot be used.
    """
    file, folder = (cwd / words[0]).resolve(), (cwd / words[1]).resolve()
    further, rest = list(words[2:]), []
    if "--" in further:
        further, rest = further[: further.index("--")], further[further.index("--") + 1 :]
    given = [*options, *further]
    experiment = read_experiment(file)
    arguments = [*_settings(experiment, given=given, known=known), *given, *kept_places(cwd, folder, given=given)]
    named = os.path.relpath(file, folder)
    for note in _notes(experiment, known=known):
        notify(f"{named}: {note}")
    return Unfolded(
        arguments=[*arguments, *_experiment_target(experiment, named, folder=folder, rest=rest)], folder=folder
    )


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
    """Return options, to follow the given, that keep output and database relative to ``cwd`` in another folder."""
    if folder == cwd.resolve():
        return []
    from optuna_dsat.cli.parsing.options_file import find_options

    file = find_options(cwd)
    in_file = {f"--{name}" for name in (file.table if file else {})}
    output = _named_output_dir(given)
    storage = value_given(given, "--storage") or os.environ.get(STORAGE_ENV)
    places = []
    if output or "--output-dir" not in in_file:
        places += ["--output-dir", str(_output_dir(given, cwd=cwd))]
    if storage or "--storage" not in in_file:
        scheme, result, name = (storage or DEFAULT_STORAGE).partition(":///")
        if result and scheme.startswith("sqlite") and name and not name.startswith((":", "file:")):
            places += ["--storage", f"{scheme}:///{cwd.absolute() / name}"]
    return places


def _named_output_dir(given: Sequence[str]) -> str | None:
    return value_given(given, "--output-dir") or os.environ.get(OUTPUT_DIR_ENV)


def _output_dir(given: Sequence[str], *, cwd: Path) -> Path:
    """Return the output directory of a search; ``given`` contains its options."""
    return cwd.absolute() / (_named_output_dir(given) or DEFAULT_OUTPUT_DIR)


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


def _experiment_target(experiment: Experiment, named: str, *, folder: Path, rest: Sequence[str]) -> list[str]:
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
