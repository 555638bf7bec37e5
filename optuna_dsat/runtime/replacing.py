"""Replaces a function of a library in every module that took a copy of the name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

__all__ = ["replace_function"]


def replace_function(module: ModuleType, name: str, replacement: Callable[..., Any]) -> None:
    """Set a module's function, also where ``from module import name`` copied it.

    In a forked launch the library has been imported before anything is replaced.

    Args:
        module: The module that defines the function.
        name: Its name there.
        replacement: What takes its place.
    """
    original = getattr(module, name)
    for other in list(sys.modules.values()):
        if getattr(other, "__dict__", {}).get(name) is original:
            setattr(other, name, replacement)
    setattr(module, name, replacement)
