"""Redirects reads of the user's DeepSpeed config file to the launch's.

Many scripts open a config whose path is hard-coded or the default of an option, and take their batch size from it.
Replacing arguments does not affect those; therefore opening the user's config for reading opens the launch's instead.
"""

from __future__ import annotations

import builtins
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from optuna_dsat.runtime.arguments import is_same_file

__all__ = ["reads_redirected"]

_WRITING = frozenset("wax+")


@contextmanager
def reads_redirected(
    *, user_config: str, config: str, on_read: Callable[[bool], None] = lambda _: None
) -> Iterator[None]:
    """Return a context in which opening the user's config for reading opens ``config``.

    Covers ``open``, ``io.open`` and ``pathlib``. Writing and other files are unaffected, except for two comparisons
    of file names.

    Args:
        user_config: The user's DeepSpeed config; empty for none, which redirects nothing.
        config: The launch's.
        on_read: Called at each reading of either, with whether it was opened by the launch's name, as an argument of
            the script gives it, rather than by the user's.
    """
    if not user_config:
        yield
        return
    real = builtins.open
    name, own_name = Path(user_config).name, Path(config).name

    def redirected(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, str | os.PathLike) and not _WRITING & set(mode):
            if _names(file, name, user_config):
                file = config
                on_read(False)
            elif _names(file, own_name, config):
                on_read(True)
        return real(file, mode, *args, **kwargs)

    builtins.open = redirected
    io.open = redirected
    try:
        yield
    finally:
        builtins.open = real
        io.open = real


def _names(file: str | os.PathLike[str], name: str, user_config: str) -> bool:
    path = os.fspath(file)
    return isinstance(path, str) and path.endswith(name) and is_same_file(path, user_config)
