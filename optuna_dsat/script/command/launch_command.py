"""The training command as typed by the user: a launcher and its options, then a script or module and its options.

A launcher is recognized by its code, not by its name: a Python interpreter, an executable script that imports
the main function of ``deepspeed``, ``torchrun`` or ``accelerate``, or a console script of an installed package. A
launcher, and any other program that is not Python (a shell script, ``make``, ``uv run``), is run until it starts a rank
(``interception``). Anything else is the script itself.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from optuna_dsat.errors import UsageError
from optuna_dsat.runtime.files import open_regular, shortened
from optuna_dsat.runtime.user_code import parsed_source
from optuna_dsat.script.command.interception import (
    InterceptedRank,
    count_launches,
    intercept,
    is_of_launch,
    is_wrapper,
    ranks_of,
    starts_launcher,
)
from optuna_dsat.script.command.interceptor import LAUNCHERS, program
from optuna_dsat.script.command.launcher_options import facts_of
from optuna_dsat.script.command.preparation import until_exit
from optuna_dsat.script.command.source import Source, module_file
from optuna_dsat.script.interpreter import has_console_script, interpreter_of, module_command, package_folders
from optuna_dsat.secrecy.references import without_secrets

MAINS = {
    "deepspeed.launcher.runner": "deepspeed",
    "deepspeed.launcher.launch": "deepspeed.launcher.launch",
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torch.distributed.launch",
    "accelerate.commands.accelerate_cli": "accelerate",
    "accelerate.commands.launch": "accelerate-launch",
}
"""Module whose main function an executable runs -> launcher. ``python -m`` runs the same modules."""

_TRAINS = {
    ("llamafactory.cli", "train"): "llamafactory.launcher",
}
"""(Module of a console script, its first argument) -> the module that trains in each rank, from their sources."""
_LONGEST_SCRIPT = 2**16
"""Maximum size of a console script in bytes; larger executables are not parsed."""
_SIGNS = (
    *("accelerate.commands", "torch.distributed.run", "torch.distributed.launch", "deepspeed.launcher"),
    *(f"{quote}{name}{quote}" for name in ("accelerate", "torchrun", "deepspeed") for quote in "\"'"),
)
"""Text in the sources of a console script that launches a training itself."""
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
"""Matches a variable assignment in front of a command."""
_OF_SUBMITIT = "submitit.core._submit"
"""Module that runs a task of a job in its own process."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_SHOWN_CHARS = 300
"""Maximum length of a launch in a notice."""


@dataclass(frozen=True, kw_only=True)
class LaunchCommand:
    """A parsed training command."""

    script: str
    """Path of a Python file, or a module's name."""
    is_module: bool = False
    args: tuple[str, ...] = ()
    ranks: int | None = None
    """Ranks that it starts on each node; None if the launcher decides."""
    without_launcher: bool = False
    """Whether it starts the script in a single process, without a launcher."""
    launcher: str | None = None
    """``deepspeed`` or ``torchrun``, which can train with a config of the study as well; None for any other."""
    binds_cores: bool = False
    """Whether each rank runs on its own cores."""
    nodes: int = 1
    """Nodes that it starts ranks on."""
    hosts: tuple[str, ...] = ()
    """Host names if there are several nodes; empty if it does not name them."""
    elsewhere: tuple[str, ...] = ()
    """Its options, with values, that specify the location of other nodes."""
    rendezvous: tuple[str, ...] = ()
    """Its options, with values, that specify the rendezvous."""
    gpus: str | None = None
    """Indices of the GPUs that it selects, as ``0,2``; None if it selects none."""
    without_gpus: str | None = None
    """Indices of the GPUs that it excludes."""
    config: str | None = None
    """DeepSpeed config that the launcher's own options name."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the launcher would set for the script, except for rank and rendezvous."""
    folder: str | None = None
    """Working directory of the launch; None for the command's working directory."""
    python: str | None = None
    """Interpreter that the launcher runs the script with; None if the command names none."""
    is_wrapped: bool = False
    """Whether the command was run to find its launch."""
    prepared: str = ""
    """Folder of the files that it has prepared before its launch (``preparation``); empty for none."""
    notes: tuple[str, ...] = ()
    """Sentences about its parts that have no effect here."""

    def source(self, cwd: Path) -> Source:
        """Return the source of the script as it is found from a folder."""
        return Source(script=self.script, is_module=self.is_module, cwd=cwd, python=self.python)


def read_command(
    words: Sequence[str],
    *,
    cwd: Path,
    python: str | None = None,
    on_notice: Callable[[str], None] = lambda _: None,
    into: Callable[[], Path] = until_exit,
) -> LaunchCommand | None:
    """Parse a command, in front of which variables may be set; None if its first word is a script, not a launcher.

    The interpreter ``python`` has the launchers. ``on_notice`` gets the command that is run to find its launch, and
    ``into`` the files that it prepares.

    Raises:
        UsageError: If the launcher rejects its options, cannot start here, or starts nothing that can be tuned.
    """
    count = next((place for place, word in enumerate(words) if not _ASSIGNMENT.match(word)), len(words))
    if 0 < count < len(words):
        rest = words[count:]
        variables = dict(word.split("=", 1) for word in words[:count])
        with _environment(variables):
            command = read_command(rest, cwd=cwd, python=python, on_notice=on_notice, into=into)
        command = command or LaunchCommand(script=rest[0], args=tuple(rest[1:]))
        ranks, nodes = ranks_of(variables) if command.without_launcher else (None, 1)
        if ranks is not None:
            variables = {name: value for name, value in variables.items() if not is_of_launch(name)}
        return _with_environment(_with_ranks(command, ranks, nodes), variables)
    run = partial(_wrapped, cwd=cwd, on_notice=on_notice, into=into)
    file = _program(words[0], cwd=cwd, python=python) if words else None
    launcher = None if file is None else _launcher_of(file)
    if file is None or launcher is None:
        wraps = bool(words) and is_wrapper(words[0], cwd=cwd)
        return run(words, python=python) if wraps else None
    if launcher == "python":
        interpreter = python or os.path.abspath(file)  # noqa: PTH100
        return _python(words, cwd=cwd, python=interpreter, run=run)
    interpreter = python or interpreter_of(file) or sys.executable
    if launcher in MAINS:
        return _launched(launcher, list(words[1:]), cwd=cwd, python=interpreter)
    return _console_script(launcher, words, python=interpreter, run=run)


def _launched(module: str, words: list[str], *, cwd: Path, python: str) -> LaunchCommand:
    """Run a launcher until it starts a rank; folders in ``cwd`` do not shadow its packages."""
    name = MAINS[module]
    if name == "accelerate" and words[:1] != ["launch"]:
        raise UsageError(f"accelerate: only `accelerate launch` trains; got `accelerate {' '.join(words[:1])}`.")
    command = [*module_command(python, module), *words]
    return of_rank(intercept(command, cwd=cwd, python=python, launcher=name), cwd=cwd)


def _wrapped(
    words: Sequence[str], *, cwd: Path, python: str | None, on_notice: Callable[[str], None], into: Callable[[], Path]
) -> LaunchCommand:
    """Run another program until it starts a rank."""
    seen = intercept(words, cwd=cwd, python=python, on_notice=on_notice, into=into)
    if _OF_SUBMITIT in seen.words:
        raise UsageError(
            f"`{shlex.join(without_secrets(words))}` trains in a job of submitit, which is not measured. Put torchrun "
            "in front of a script that calls the same function."
        )
    shown = shortened(shlex.join(without_secrets(_as_typed(seen.launch_words))), _SHOWN_CHARS)
    on_notice(f"It launches `{shown}`.")
    result = replace(of_rank(seen, cwd=cwd), is_wrapped=True)
    if count_launches(words, cwd=cwd, script=result.script) > 1:
        on_notice(
            "The shell script contains other launches, which are not tuned: for another, put `optuna-dsat tune` in "
            "front of its own command."
        )
    return result


def of_rank(seen: InterceptedRank, *, cwd: Path) -> LaunchCommand:
    """Return the command of an intercepted rank."""
    result = _python(seen.words, cwd=seen.folder, python=seen.python)
    if seen.launcher is not None:
        result = replace(result, without_launcher=False, **facts_of(seen.launcher, seen.options))
    else:
        result = _with_ranks(result, seen.ranks, seen.nodes)
    folder = None if seen.folder.resolve() == cwd.resolve() else str(seen.folder)
    reads = result.source(seen.folder).mentioned(seen.rank_variables)
    variables = {**seen.environment, **(seen.rank_variables if reads else {})}
    return _with_environment(replace(result, folder=folder, prepared=seen.prepared), variables)


def _with_ranks(command: LaunchCommand, ranks: int | None, nodes: int) -> LaunchCommand:
    """Return a command of which another program starts a number of ranks on each node; None for a single process."""
    if ranks is None:
        return command
    elsewhere = (f"{nodes} nodes",) if nodes > 1 else ()
    return replace(command, ranks=ranks, nodes=nodes, elsewhere=elsewhere, without_launcher=False)


def _as_typed(words: Sequence[str]) -> Sequence[str]:
    """Return a launcher's words as typed by the user, without the interpreter from the executable's first line."""
    is_launcher = len(words) > 1 and Path(words[1]).name in LAUNCHERS
    return (Path(words[1]).name, *words[2:]) if is_launcher else (Path(words[0]).name, *words[1:])


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process, for the programs that it starts, during the block."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _with_environment(command: LaunchCommand, variables: Mapping[str, str]) -> LaunchCommand:
    """Return a command with variables set; GPUs that they select become its GPUs."""
    rest = {name: value for name, value in variables.items() if name != _VISIBLE}
    gpus = command.gpus if command.gpus is not None or command.without_gpus is not None else variables.get(_VISIBLE)
    return replace(command, environment={**rest, **command.environment}, gpus=gpus)


def _program(word: str, *, cwd: Path, python: str | None) -> Path | None:
    """Return the file of a command's first word; the environment of an interpreter need not be activated."""
    path = cwd / word
    if "/" in word or path.is_file():
        return path if path.is_file() else None
    folders = [] if python is None else [str(Path(python).parent)]
    folders += [os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)]
    result = next((file for folder in folders if (file := shutil.which(word, path=folder))), None)
    return None if result is None else Path(result)


def _launcher_of(file: Path) -> str | None:
    """Return ``python``, or the module of a launcher or console script, for a program; None for another program."""
    if _is_interpreter(file):
        return "python"
    main = _main_module(file)
    if main is None or (file.suffix == ".py" and main not in MAINS):
        return None
    if main in MAINS:
        return main
    python = interpreter_of(file) or sys.executable
    return main if has_console_script(file.name, main, python=python) else None


def _is_interpreter(file: Path) -> bool:
    """Whether a file is a Python interpreter: a binary with that name after resolving links."""
    real = file.resolve()
    if real == Path(sys.executable).resolve():
        return True
    if not real.name.startswith("python"):
        return False
    with open_regular(real) as opened:
        return opened.read(4) == b"\x7fELF"


def _main_module(file: Path) -> str | None:
    """Return the module whose function an executable script imports and calls at its end; None for any other file.

    A script that chooses the arguments itself is another program.
    """
    try:
        if file.stat().st_size > _LONGEST_SCRIPT:
            return None
        tree = parsed_source(file)
    except (OSError, SyntaxError):
        return None
    imported = {
        alias.asname or alias.name: node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    code = ast.unparse(tree)
    if len(tree.body) > 8 or code.count("argv") > code.count("argv[0]"):  # longer than a console script
        return None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and not (node.args or node.keywords)]
    called = {node.func.id for node in calls if isinstance(node.func, ast.Name)}
    return next((module for name, module in imported.items() if name in called), None)


def _console_script(
    module: str, words: Sequence[str], *, python: str, run: Callable[..., LaunchCommand]
) -> LaunchCommand:
    """Return the command of a console script, with its arguments: its own launch, else its module."""
    trains = _TRAINS.get((module, words[1] if len(words) > 1 else ""))
    if trains is not None:
        return LaunchCommand(script=trains, is_module=True, args=tuple(words[2:]), python=python)
    if _launches(module, python):
        return run(words, python=python)
    return LaunchCommand(script=module, is_module=True, args=tuple(words[1:]), python=python)


def _launches(module: str, python: str) -> bool:
    """Whether the sources of a console script's package mention a launcher, or start ranks by Python's command."""
    top, *rest = module.split(".")
    files: list[Path] = []
    for installed in package_folders(top, python):
        path = installed.joinpath(top, *rest)
        files += path.rglob("*.py") if path.is_dir() else path.parent.glob("*.py")
    return any(
        any(sign in file.read_text(encoding="utf-8", errors="replace") for sign in _SIGNS)
        or starts_launcher(file, cwd=file.parent)
        for file in files
    )


def _python(
    words: Sequence[str], *, cwd: Path, python: str, run: Callable[..., LaunchCommand] | None = None
) -> LaunchCommand:
    """Parse ``python [options] SCRIPT ...`` or ``python [options] -m MODULE ...``.

    ``run`` runs a script until it starts a rank; None for the command of a rank.
    """
    rest = program(words)
    if not rest:
        raise UsageError(f"{' '.join(words[:2])} runs no file; give a script or a module (-m).")
    start = next(place for place, word in enumerate(words) if word in (rest[0], "".join(rest[:2])))
    notes = (f"{' '.join(words[1:start])} of {words[0]} has no effect on the ranks.",) if start > 1 else ()
    if rest[0] != "-m":
        file = _program(rest[0], cwd=cwd, python=python)
        module = None if file is None else _launcher_of(file)
        if module in MAINS:
            return _launched(module, rest[1:], cwd=cwd, python=python)
        if run is None and module not in (None, "python"):  # a console script, which trains in its own process
            return LaunchCommand(script=module, is_module=True, args=tuple(rest[1:]), python=python)
        if run is not None and starts_launcher(cwd / rest[0], cwd=cwd):
            return run([words[0], *rest], python=python)
        return LaunchCommand(script=rest[0], args=tuple(rest[1:]), without_launcher=True, notes=notes, python=python)
    if not rest[1:]:
        raise UsageError(f"{' '.join(words)} names no module.")
    _, module, *args = rest
    if module in MAINS:
        return _launched(module, args, cwd=cwd, python=python)
    if run is not None and (file := module_file(module, cwd, python=python)) and starts_launcher(file, cwd=cwd):
        return run([words[0], *rest], python=python)
    return LaunchCommand(
        script=module, is_module=True, args=tuple(args), without_launcher=True, notes=notes, python=python
    )
