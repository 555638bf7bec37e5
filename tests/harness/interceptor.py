"""A launcher's own main function in this process, up to the rank that it would become: ten times as fast as its own."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn
from unittest import mock

import pytest

from optuna_dsat.script.command import interceptor
from optuna_dsat.script.command.interception import InterceptedRank, intercept
from optuna_dsat.script.command.launch_command import LaunchCommand, of_rank
from optuna_dsat.script.command.preparation import until_exit

MODULES = {
    "deepspeed": "deepspeed.launcher.runner",
    "deepspeed.launcher.launch": "deepspeed.launcher.launch",
    "torchrun": "torch.distributed.run",
    "accelerate": "accelerate.commands.accelerate_cli",
}
PATCHED = {
    "deepspeed.launcher.runner": "main",
    "deepspeed.launcher.launch": "main",
    "torch.distributed.run": "run",
    "accelerate.commands.launch": "_validate_launch_command",
}
"""Module -> function that the interceptor replaces."""


TORCHRUN = """
import argparse


def parse_min_max_nnodes(text):
    return int(text), int(text)


def main(args=None):
    parser = argparse.ArgumentParser("torchrun")
    for name, value in {"--nnodes": "1", "--nproc_per_node": "1", "--rdzv_endpoint": "", "--standalone": None}.items():
        parser.add_argument(name, **({"action": "store_true"} if value is None else {"default": value}))
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    parser.set_defaults(module=False, no_python=False)
    run(parser.parse_args(args))


if __name__ == "__main__":
    main()
"""
"""A ``torch.distributed.run`` without torch; its ``run`` is the interceptor's."""


class _StartedError(BaseException):
    pass


def _execute(_: str, words: Sequence[str]) -> NoReturn:
    raise _StartedError(list(words), dict(os.environ))


class _Popen(subprocess.Popen):  # type: ignore[type-arg]
    """Starts no Python: accelerate starts a single rank as its child."""

    def __init__(self, args: Any, **others: Any) -> None:
        if args[0] == sys.executable:
            _execute(args[0], args)
        super().__init__(args, **others)


def started(launcher: str, words: Sequence[str]) -> InterceptedRank:
    """Return the rank that a launcher would become."""
    with TemporaryDirectory() as folder, ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {interceptor.RECORD: str(Path(folder) / "record")}))
        stack.enter_context(mock.patch.object(sys, "argv", [launcher, *words]))
        stack.enter_context(mock.patch.object(os, "execvp", _execute))
        stack.enter_context(mock.patch.object(subprocess, "Popen", _Popen))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # torchrun has a fault handler for a standard error that is a file
        for name, function in PATCHED.items():
            module = importlib.import_module(name)
            stack.enter_context(mock.patch.object(module, function, getattr(module, function)))
            interceptor._PATCHES[name](module)
        try:
            importlib.import_module(MODULES[launcher]).main()
        except _StartedError as rank:
            own, environ = rank.args
            note = json.loads(Path(environ[interceptor.LAUNCHER]).read_text(encoding="utf-8"))
            return InterceptedRank(
                words=tuple(own),
                python=sys.executable,
                folder=Path.cwd(),
                environment={name: value for name, value in environ.items() if name.startswith("ACCELERATE_")},
                launcher=note["name"],
                options=note["options"],
            )
    raise AssertionError("no rank was started")


def launched(launcher: str, words: Sequence[str]) -> LaunchCommand:
    """Return the command that a launcher would launch."""
    return replace(of_rank(started(launcher, words), cwd=Path.cwd()), python=None)


def intercept_here(
    words: Sequence[str],
    *,
    cwd: Path,
    python: str | None = None,
    launcher: str | None = None,
    on_notice: Callable[[str], None] = lambda _: None,
    into: Callable[[], Path] = until_exit,
) -> InterceptedRank:
    """Intercept a launcher in this process, and everything else in its own; takes the place of ``intercept``."""
    if launcher not in MODULES:
        return intercept(words, cwd=cwd, python=python, launcher=launcher, on_notice=on_notice, into=into)
    before = Path.cwd()
    os.chdir(cwd)
    try:
        return started(launcher, words[4:])
    except (ValueError, RuntimeError, SystemExit):  # its own output is looked at
        return intercept(words, cwd=cwd, python=python, launcher=launcher, on_notice=on_notice)
    finally:
        os.chdir(before)


def stand_in_for_torch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have scripts and torchrun import a ``torch.distributed`` that loads in no time, where they are intercepted."""
    package = folder / "stand_in" / "torch" / "distributed"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text("def init_process_group(*_): ...\n", encoding="utf-8")
    (package / "run.py").write_text(TORCHRUN, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(package.parents[1]), prepend=os.pathsep)
