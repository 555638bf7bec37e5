"""Replaces a function of a library in every module of it that took a copy of the name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

__all__ = ["replace_function"]


def replace_function(module: ModuleType, name: str, replacement: Callable[..., Any]) -> None:
    """Set a module's function, also where ``from module import name`` copied it within the same package.

    In a forked launch the library has been imported before anything is replaced.

    Args:
        module: The module that defines the function.
        name: Its name there.
        replacement: What takes its place.
    """
    original = getattr(module, name)
    package = module.__name__.partition(".")[0]
    for other in [one for key, one in list(sys.modules.items()) if key.partition(".")[0] == package]:
        if vars(other).get(name) is original:
            setattr(other, name, replacement)
    setattr(module, name, replacement)
