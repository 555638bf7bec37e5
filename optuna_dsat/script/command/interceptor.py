"""Intercept the first rank that a command starts, in any Python process of the command.

``interception`` copies this file as ``sitecustomize``, so that interpreters without optuna-dsat run it, too: it imports
only the standard library. A launcher parses its options itself, then its process becomes the first rank, on this
machine and without waiting for other nodes. The rank is recorded before it runs a line of the user's script, and waits
to be terminated.
"""

from __future__ import annotations

import base64
import importlib
import importlib.machinery
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

RECORD = "OPTUNA_DSAT_LAUNCH_RECORD"
"""Variable with the path of the launch record; unset in all other processes."""
LAUNCHER = "OPTUNA_DSAT_LAUNCHER"
"""Variable with the path of a launcher's options; set in its ranks."""
TYPED = "OPTUNA_DSAT_TYPED"
"""Variable with the user's command as a JSON list, if the script that trains may be at its end."""

REFUSED = ".refused"
"""Suffix of the file, next to the record, with the error of a launcher."""

LAUNCHERS = ("deepspeed", "deepspeed.pt", "ds", "torchrun", "accelerate", "accelerate-launch")
"""Names of executables that launch a training."""
MODULES = (
    *("deepspeed.launcher.runner", "deepspeed.launcher.launch", "torch.distributed.run", "torch.distributed.launch"),
    *("accelerate.commands.accelerate_cli", "accelerate.commands.launch"),
)
"""Modules that launch a training with ``python -m``."""
MOST_SLOTS = 1024
"""Slots of this machine in ``--include`` and ``--exclude``: its devices are not counted."""
_WAIT_S = 0.2


def program(words: Sequence[str]) -> list[str]:
    """Return script and arguments of a Python process, with ``-m`` in front for a module; empty if it has neither."""
    rest = list(words[1:])
    while rest and rest[0].startswith("-") and not rest[0].startswith("-m"):
        flag = rest.pop(0)
        if flag in ("-c", "-"):
            return []
        if flag in ("-W", "-X") and rest:
            rest.pop(0)
    if rest and rest[0].startswith("-m") and rest[0] != "-m":
        rest[:1] = ["-m", rest[0][2:]]
    return rest


def typed_words() -> list[str]:
    """Return the command line of this process; Python 3.9 does not keep it."""
    return list(sys.orig_argv) if sys.version_info >= (3, 10) else _command_line(os.getpid())


def _command_line(process: int) -> list[str]:
    return [os.fsdecode(word) for word in Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")[:-1]]


def _is_launcher(words: Sequence[str]) -> bool:
    return words[1] in MODULES if words[0] == "-m" and words[1:] else os.path.basename(words[0]) in LAUNCHERS  # noqa: PTH119


def is_rank(words: Sequence[str]) -> bool:
    """Whether this process runs a launcher's rank, or the script at the end of the user's command."""
    started = program(words)
    if not started or _is_launcher(started):
        return False
    return LAUNCHER in os.environ or started == json.loads(os.environ.get(TYPED, "[]"))[-len(started) :]


def write_down(words: Sequence[str]) -> NoReturn:
    """Record the rank in this process, as the launch's first if no other process was; wait for the reader's exit."""
    record = Path(os.environ[RECORD])
    result = {
        "words": list(words),
        "folder": str(Path.cwd()),
        "environment": dict(os.environ),
        "python": sys.executable,
        "group": os.getpgrp(),
        "process": _PROCESS,
    }
    if LAUNCHER in os.environ:
        result["launcher"] = json.loads(Path(os.environ[LAUNCHER]).read_text(encoding="utf-8"))
    complete, partial = (record.with_suffix(f".{state}{os.getpid()}") for state in ("rank", "partial"))
    try:
        partial.write_text(json.dumps(result), encoding="utf-8")
        partial.replace(complete)
        os.link(complete, record)
    except OSError:  # another process was first
        pass
    while record.parent.is_dir():
        time.sleep(_WAIT_S)
    os._exit(1)


def _note(name: str, given: Any, **more: Any) -> None:
    """Write down a launcher's options and environment, unless it was started by another launcher."""
    if LAUNCHER in os.environ:
        return
    note = {
        "name": name,
        "words": typed_words(),
        "environment": _ENVIRONMENT if _is_launcher(program(typed_words()) or [""]) else dict(os.environ),
        "options": {**vars(given), **more},
    }
    path = f"{os.environ[RECORD]}.{os.getpid()}"
    Path(path).write_text(json.dumps(note, default=str), encoding="utf-8")
    os.environ[LAUNCHER] = path


def _note_errors(words: Sequence[str]) -> None:
    """Write down why a launcher starts no rank: an option that its parser rejects, or an exception."""
    import argparse

    name = words[1] if words[0] == "-m" else os.path.basename(words[0])  # noqa: PTH119
    reject, show = argparse.ArgumentParser.error, sys.excepthook

    def note(message: str) -> None:
        Path(f"{os.environ[RECORD]}{REFUSED}").write_text(f"{name}: {message}", encoding="utf-8")

    def error(parser: Any, message: str) -> NoReturn:
        note(message)
        reject(parser, message)

    def hook(kind: Any, exception: Any, trace: Any) -> None:
        note(str(exception).strip().rpartition("\n")[2] or kind.__name__)
        show(kind, exception, trace)

    setattr(argparse.ArgumentParser, "error", error)  # noqa: B010 - its type is that of a method
    sys.excepthook = hook


def _start(name: str, given: Any, **more: Any) -> NoReturn:
    """Note a launcher's options and become its first rank."""
    _note(name, given, **more)
    options = vars(given)
    script, args = (options.get(f"training_{item}", options.get(f"user_{item}")) for item in ("script", "script_args"))
    words = [script, *(given.user_args if args is None else args)]
    if not given.no_python:
        words = [sys.executable, *(["-m"] if given.module else []), *words]
    os.execvp(words[0], words)


def _deepspeed(runner: Any) -> None:
    def main(args: list[str] | None = None) -> NoReturn:
        given = runner.parse_args(args)
        pool = runner.fetch_hostfile(given.hostfile)
        slots = runner.parse_inclusion_exclusion(pool or {"localhost": MOST_SLOTS}, given.include, given.exclude)
        _start("deepspeed", given, slots=slots, has_hosts=bool(pool))

    runner.main = main


def _deepspeed_node(launch: Any) -> None:
    def main() -> NoReturn:
        given = launch.parse_args()
        slots = json.loads(base64.urlsafe_b64decode(given.world_info))
        _start("deepspeed.launcher.launch", given, slots=slots, has_hosts=len(slots) > 1)

    launch.main = main


def _torchrun(run: Any) -> None:
    def start(given: Any) -> NoReturn:
        _start("torchrun", given, nodes=run.parse_min_max_nnodes(given.nnodes))

    run.run = start


def _accelerate(launch: Any) -> None:
    validate, load = launch._validate_launch_command, launch.load_config_from_file

    def loaded(file: Any) -> Any:
        result = load(file)
        if isinstance(named := getattr(result, "deepspeed_config", None), str):
            raise ValueError(f"deepspeed_config is {named!r}; it must be a section with deepspeed_config_file: {named}")
        return result

    def validated(given: Any) -> Any:
        asked = dict(vars(given))
        try:
            result = validate(given)
        except Exception as error:  # noqa: BLE001 - accelerate's message, in a line with the file
            message, file = " ".join(str(error).split()), str(given.config_file or "")
            sys.exit(message if file in message else f"{file}: {message}")
        defaults = getattr(result[1], "__dict__", None)
        _note("accelerate", result[0], asked=asked, defaults=defaults)
        result[0].num_machines = 1
        return result

    launch.load_config_from_file = loaded
    launch._validate_launch_command = validated


def _train(*_: Any, **__: Any) -> NoReturn:
    write_down(_WORDS)


def _training(*names: str) -> Callable[[Any], None]:
    """Return a function that patches functions with which a process starts to train without a launcher."""

    def patch(module: Any) -> None:
        for name in names:
            *owners, function = name.split(".")
            setattr(getattr(module, owners[0]) if owners else module, function, _train)

    return patch


_PATCHES: dict[str, Callable[[Any], None]] = {
    "deepspeed.launcher.runner": _deepspeed,
    "deepspeed.launcher.launch": _deepspeed_node,
    "torch.distributed.run": _torchrun,
    "accelerate.commands.launch": _accelerate,
    "deepspeed": _training("initialize", "init_distributed"),
    "torch.distributed": _training("init_process_group"),
    "accelerate.accelerator": _training("Accelerator.__init__"),
}
"""Module -> function that patches it when it is imported."""


class _Watch(MetaPathFinder):
    """Applies ``_PATCHES`` to modules when they are imported."""

    def __init__(self) -> None:
        self._searching = False

    def find_spec(self, fullname: str, _path: Any, _target: ModuleType | None = None) -> Any:
        """Find a watched module through the other finders and wrap its loader."""
        if fullname not in _PATCHES or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching = False
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _PATCHES[fullname](module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _run_as_imported(name: str) -> None:
    """Make ``python -m`` import a launcher's module, which is then patched, and run its main function."""
    import runpy

    def run(*_: Any) -> NoReturn:
        sys.argv[0] = name
        sys.exit(importlib.import_module(name).main())

    runpy._run_module_as_main = run  # type: ignore[attr-defined]


def _run_the_hidden_one() -> None:
    """Run the ``sitecustomize`` shadowed by this file; it may itself run a shadowed one and must not find this file."""
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != here]
    hidden = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if hidden is not None and hidden.loader is not None:
        hidden.loader.exec_module(importlib.util.module_from_spec(hidden))


if __name__ == "sitecustomize" and RECORD in os.environ:
    _WORDS = typed_words()
    _PROCESS = os.getpid()  # the same in processes that this one forks
    if "-c" in _WORDS and any(word.startswith("from multiprocessing.") for word in _WORDS):  # spawned by a script
        _PROCESS = os.getppid()
        _WORDS = _command_line(_PROCESS)
    _ENVIRONMENT = dict(os.environ)  # variables that a launcher sets on import are not the user's
    if is_rank(_WORDS):
        write_down(_WORDS)
    if program(_WORDS) and _is_launcher(program(_WORDS)):
        _note_errors(program(_WORDS))
    if program(_WORDS)[:1] == ["-m"] and program(_WORDS)[1] in MODULES:
        _run_as_imported(program(_WORDS)[1])
    sys.meta_path.insert(0, _Watch())
    _run_the_hidden_one()
