"""Find out what a console script would launch.

Started as ``python -m optuna_dsat.script.command.self_launch MODULE:FUNCTION NAME WORDS...``.

Some console scripts start their training with accelerate, torchrun or deepspeed themselves. Such a script is run here
with all ways of launching patched: its first launch is parsed instead of started, and printed as one line of JSON
(``launch_command.LaunchCommand``). A script that starts to train in its own process is stopped there and ``{}`` is
printed. ``{}`` is also printed for a script that fails; its first launch then shows the error.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import shlex
import subprocess
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from optuna_dsat.script.command.launch_command import MAINS, LaunchCommand, as_json, launcher_of, read_command
from optuna_dsat.script.command.launcher_options import of_accelerate, of_torchrun

__all__ = ["launch_of", "launches", "main"]

_SIGNS = (
    *("accelerate.commands", "torch.distributed.run", "torch.distributed.launch", "deepspeed.launcher"),
    *(f"{quote}{name}{quote}" for name in ("accelerate", "torchrun", "deepspeed") for quote in "\"'"),
)
"""Text in the sources of a console script that launches a training itself."""
_TRAINING = (
    ("deepspeed", "initialize"),
    ("torch.distributed", "init_process_group"),
    ("accelerate.accelerator", "Accelerator.__init__"),
)
"""(Module, function) with which training starts in the process itself.

Before a launch, a script may still parse arguments and detect devices.
"""


class _Launched(BaseException):
    """The script launches a training; an ``except Exception`` in the script does not catch this."""

    def __init__(self, found: LaunchCommand | None) -> None:
        super().__init__()
        self.found = found


def main(argv: Sequence[str]) -> None:
    """Print what the console script launches; ``{}`` if it trains in its own process."""
    module, _, function = argv[0].partition(":")
    found = None
    if launches(module):
        try:
            found = launch_of(lambda: getattr(importlib.import_module(module), function)(), argv[1:])
        except Exception:  # noqa: BLE001 - any error recurs in the first launch
            traceback.print_exc()
    print("{}" if found is None else as_json(found))


def launches(module: str) -> bool:
    """Whether the sources of a console script's package mention a launcher."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return False
    folder = Path(spec.origin).parent
    files = folder.rglob("*.py") if spec.submodule_search_locations else folder.glob("*.py")
    return any(sign in file.read_text(encoding="utf-8", errors="replace") for file in files for sign in _SIGNS)


def launch_of(run: Callable[[], object], argv: Sequence[str]) -> LaunchCommand | None:
    """Return the launch that a function makes; None if it returns, or starts to train, without a launch.

    Args:
        run: The console script's function.
        argv: ``sys.argv`` for it.

    Raises:
        SystemExit: If it rejects its arguments.
        ValueError: If the launcher's options conflict.
    """
    with mock.patch.object(sys, "argv", list(argv)), _closed_doors():
        try:
            run()
        except _Launched as asked:
            return asked.found
        except SystemExit as end:
            if end.code:
                raise
    return None


@contextlib.contextmanager
def _closed_doors() -> Iterator[None]:
    """Patch every way of launching, and of starting to train, to raise ``_Launched``."""
    with contextlib.ExitStack() as stack:
        for name, read in (
            ("accelerate.commands.launch.launch_command", of_accelerate),
            ("torch.distributed.run.run", of_torchrun),
        ):
            module, _, function = name.rpartition(".")
            if _is_there(module):
                stack.enter_context(mock.patch.object(importlib.import_module(module), function, _reader(read)))
        for module, function in _TRAINING:
            if _is_there(module):
                owner: Any = importlib.import_module(module)
                *classes, attribute = function.split(".")
                for name in classes:
                    owner = getattr(owner, name)
                stack.enter_context(mock.patch.object(owner, attribute, _trains))
        stack.enter_context(mock.patch.object(subprocess, "Popen", _watched(subprocess.Popen)))
        stack.enter_context(mock.patch.object(os, "system", _in_a_shell(os.system)))
        for name in ("execvp", "execvpe"):
            stack.enter_context(mock.patch.object(os, name, _executed(getattr(os, name))))
        yield


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _reader(read: Callable[[Namespace], LaunchCommand]) -> Callable[[Namespace], NoReturn]:
    def launch(given: Namespace) -> NoReturn:
        raise _Launched(read(given))

    return launch


def _trains(*_: Any, **__: Any) -> NoReturn:
    raise _Launched(None)


def _watched(popen: Any) -> Any:
    """Return a subclass of ``popen`` that does not start launchers."""

    class Watched(popen):  # type: ignore[misc]
        def __init__(self, args: Any, *others: Any, **kwargs: Any) -> None:
            _refuse_launcher(shlex.split(args) if isinstance(args, str) else [os.fsdecode(word) for word in args])
            super().__init__(args, *others, **kwargs)

    return Watched


def _executed(function: Callable[..., Any]) -> Callable[..., Any]:
    def execute(file: str, args: Sequence[str], *others: Any) -> Any:
        _refuse_launcher([file, *args[1:]])
        return function(file, args, *others)

    return execute


def _in_a_shell(function: Callable[[str], int]) -> Callable[[str], int]:
    def run(command: str) -> int:
        _refuse_launcher(shlex.split(command))
        return function(command)

    return run


def _refuse_launcher(words: Sequence[str]) -> None:
    """Raise ``_Launched`` if a command is a launcher's."""
    cwd = Path.cwd()
    launcher = launcher_of(words[0], cwd=cwd) if words else None
    is_module = launcher == "python" and any(word == "-m" and following in MAINS for word, following in pairwise(words))
    if is_module or launcher in MAINS.values():
        raise _Launched(read_command(words, cwd=cwd))


if __name__ == "__main__":
    main(sys.argv[1:])
