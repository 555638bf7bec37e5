"""Calls functions once the script has imported a module."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["ImportWatch"]


class ImportWatch(MetaPathFinder):
    """Calls a function once a module has been imported, immediately if it already is.

    Args:
        callbacks: Module name -> function that is called once, with the module.
    """

    def __init__(self, callbacks: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._callbacks = dict(callbacks)
        self._searching: set[tuple[int, str]] = set()
        """(thread, module) that the other finders are asked for; one of them may ask all finders in its turn."""

    def install(self) -> None:
        """Start watching."""
        for name in list(self._callbacks):
            if name in sys.modules:
                self._callbacks.pop(name)(sys.modules[name])
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a watched module through the other finders and wrap its loader."""
        callback = self._callbacks.get(fullname)
        search = (threading.get_ident(), fullname)
        if callback is None or search in self._searching:
            return None
        self._searching.add(search)
        try:
            found = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
            spec = next((spec for spec in found if spec is not None), None)
        finally:
            self._searching.discard(search)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            # A loader may be that of other modules, too, as those of a zip file are.
            if module.__name__ == fullname and self._callbacks.pop(fullname, None) is not None:
                # A module may put another one in its place, as a copy in the script's folder that leads to it does.
                callback(sys.modules.get(fullname, module))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
