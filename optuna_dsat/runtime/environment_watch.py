"""Detects environment variables that a script changes.

Modules that read them at import must not be imported before the rank is forked.
"""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any, TypeVar

from optuna_dsat.runtime.imports import installed_folders

__all__ = ["EnvironmentWatch", "as_text"]

_OWN_PACKAGE = "optuna_dsat"

_ALLOCATOR = frozenset({"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"})
"""Read when CUDA is initialized, hence in the rank itself; only the allocator's ``backend`` is chosen when torch is
imported (observed with torch 2.13)."""


_Text = TypeVar("_Text")


def as_text(value: _Text) -> _Text | str:
    """Return a name or value of ``os.environb``, whose class is that of ``os.environ``, as the latter has it."""
    return os.fsdecode(value) if isinstance(value, bytes) else value


class EnvironmentWatch:
    """Records variables that are set or deleted, except by installed modules during their import.

    Changes by imports are replayed in a forked rank (``launch/forked.py``). A variable that has its original
    value again when ``changed`` is called counts as unchanged: accelerate clears the environment temporarily.
    """

    def __init__(self) -> None:
        self._before: dict[str, str | None] = {}
        """Variables that were set or deleted -> the value before; None if it was unset."""
        self._folders = installed_folders()

    def install(self) -> None:
        """Start watching ``os.environ``, until this process ends."""
        environ_class: Any = type(os.environ)
        set_item, delete_item = environ_class.__setitem__, environ_class.__delitem__

        def __setitem__(environ: Any, name: Any, value: Any) -> None:  # noqa: N807 - replaces the method
            if (before := environ.get(name)) != value:
                self._record(as_text(name), as_text(value), as_text(before), sys._getframe(1))
            set_item(environ, name, value)

        def __delitem__(environ: Any, name: Any) -> None:  # noqa: N807 - replaces the method
            if (before := environ.get(name)) is not None:
                self._record(as_text(name), "", as_text(before), sys._getframe(1))
            delete_item(environ, name)

        environ_class.__setitem__, environ_class.__delitem__ = __setitem__, __delitem__

    def changed(self) -> list[str]:
        """Return the sorted names of variables whose value differs from the original."""
        return sorted(name for name, value in self._before.items() if os.environ.get(name) != value)

    def _record(self, name: str, value: str, before: str | None, frame: FrameType | None) -> None:
        if name in _ALLOCATOR and "backend" not in value:
            return
        below_other_package = False
        while frame is not None:
            module = str(frame.f_globals.get("__name__", ""))
            package = module.partition(".")[0]
            if package == _OWN_PACKAGE and not below_other_package:
                return  # the runtime itself
            below_other_package |= package not in sys.stdlib_module_names
            imported = frame.f_code.co_name == "<module>" and module != "__main__"
            if imported and frame.f_code.co_filename.startswith(self._folders):
                return
            frame = frame.f_back
        self._before.setdefault(name, before)
