"""Intercept the first launch or start of a training in any Python process of a command.

``wrapped_launch`` copies this file as ``sitecustomize``, so that interpreters without optuna-dsat run it, too: it
imports only the standard library. The launch is recorded instead of started, and its process waits to be terminated.
"""

from __future__ import annotations

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

LAUNCHERS = ("deepspeed", "deepspeed.pt", "ds", "torchrun", "accelerate", "accelerate-launch")
"""Names of executables that launch a training."""
MODULES = (
    *("deepspeed.launcher.runner", "deepspeed.launcher.launch", "torch.distributed.run", "torch.distributed.launch"),
    *("accelerate.commands.accelerate_cli", "accelerate.commands.launch"),
)
"""Modules that launch a training with ``python -m``."""
_BEGINNINGS = {"deepspeed": ("initialize", "init_distributed"), "torch.distributed": ("init_process_group",)}
"""Module -> functions with which a process starts to train without a launcher."""
_WAIT_S = 0.2


def launches(words: Sequence[str]) -> bool:
    """Whether the command line of a Python process is a launcher's."""
    rest = list(words[1:])
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        flag = rest.pop(0)
        if flag in ("-W", "-X") and rest:
            rest.pop(0)
    if rest[:1] == ["-m"]:
        return len(rest) > 1 and rest[1] in MODULES
    name = os.path.basename(rest[0]) if rest else ""  # noqa: PTH119 - a name, which may be of any length
    return name in LAUNCHERS and (name != "accelerate" or "launch" in rest)


def write_down(words: Sequence[str]) -> NoReturn:
    """Record the launch of this process unless another process was first; then wait until the reader has exited."""
    record = Path(os.environ[RECORD])
    found = {
        "words": list(words),
        "folder": str(Path.cwd()),
        "environment": dict(os.environ),
        "prefix": sys.prefix,
        "group": os.getpgrp(),
    }
    own = record.with_suffix(f".{os.getpid()}")
    try:
        own.write_text(json.dumps(found), encoding="utf-8")
        os.link(own, record)
    except OSError:  # another process was first
        pass
    while record.parent.is_dir():
        time.sleep(_WAIT_S)
    os._exit(1)


class _Watch(MetaPathFinder):
    """Replaces the functions of ``_BEGINNINGS`` when their module is imported."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words
        self._searching = False

    def find_spec(self, fullname: str, _path: Any, _target: ModuleType | None = None) -> Any:
        """Find a watched module through the other finders and wrap its loader."""
        if fullname not in _BEGINNINGS or self._searching:
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
            for name in _BEGINNINGS[fullname]:
                setattr(module, name, self._beginning())

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _beginning(self) -> Callable[..., NoReturn]:
        return lambda *_, **__: write_down(self._words)


def _run_the_hidden_one() -> None:
    """Run the ``sitecustomize`` shadowed by this file; it may itself run a shadowed one and must not find this file."""
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != here]
    hidden = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if hidden is not None and hidden.loader is not None:
        hidden.loader.exec_module(importlib.util.module_from_spec(hidden))


if __name__ == "sitecustomize" and RECORD in os.environ:
    _WORDS = list(getattr(sys, "orig_argv", ()))
    if launches(_WORDS):
        write_down(_WORDS)
    sys.meta_path.insert(0, _Watch(_WORDS))
    _run_the_hidden_one()
