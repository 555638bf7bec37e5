"""Functions replaced and modules watched in the script's process; the modules and variables that a script sets.

The warm launcher preloads the modules that the script has imported by the end of a profile launch.
"""

from __future__ import annotations

import functools
import os
import site
import sys
import sysconfig
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, MethodType, ModuleType
from typing import Any, TypeVar


def imported_modules() -> list[str]:
    """Return the imported installed modules, in import order, without the standard library and the user's modules."""
    folders = installed_folders()
    names = []
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        origin = getattr(spec, "origin", None)
        if spec is not None and spec.name == name and isinstance(origin, str) and origin.startswith(folders):
            names.append(name)
    return names


def installed_folders() -> tuple[str, ...]:
    """Return the folders of installed packages, each with a trailing slash."""
    paths = sysconfig.get_paths()
    folders = {paths["purelib"], paths["platlib"], *site.getsitepackages()}
    if site.ENABLE_USER_SITE:
        folders.add(site.getusersitepackages())
    return tuple(str(Path(folder)) + "/" for folder in folders)


def loaded_operators() -> list[str]:
    """Return the sorted names of DeepSpeed's compiled operators that this process has loaded."""
    builder = sys.modules.get("deepspeed.ops.op_builder.builder")
    loaded = getattr(getattr(builder, "OpBuilder", None), "_loaded_ops", {})
    return sorted(loaded)


class ImportWatch(MetaPathFinder):
    """Calls a function once a module has been imported, immediately if it already is."""

    def __init__(self, callbacks: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._callbacks = dict(callbacks)
        self._searching: set[tuple[int, str]] = set()
        """(thread, module) being searched with the other finders, which may themselves search all finders."""

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
            result = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
            spec = next((spec for spec in result if spec is not None), None)
        finally:
            self._searching.discard(search)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            # A loader may be shared with other modules, such as the loader of a zip file.
            if module.__name__ == fullname and self._callbacks.pop(fullname, None) is not None:
                # A module may replace itself in sys.modules, e.g. a copy in the script's folder that forwards to it.
                callback(sys.modules.get(fullname, module))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


# Detects environment variables that a script changes.
#
# Modules that read them at import must not be imported before the rank is forked.

_OWN_PACKAGE = "optuna_dsat"
_STANDARD_LIBRARY = getattr(sys, "stdlib_module_names", frozenset(sys.builtin_module_names))  # since Python 3.10

ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""All versions of torch read the first. Older ones do not know the second, and 2.9 enables no expandable segments by it
(pytorch issue 183387). Read when CUDA is initialized, hence in the rank itself; only the allocator's ``backend`` is
chosen when torch is imported (observed with torch 2.13)."""


_Text = TypeVar("_Text")


def as_text(value: _Text) -> _Text | str:
    """Return a name or value as ``os.environ`` has it; ``os.environb``, of the same class, has bytes."""
    return os.fsdecode(value) if isinstance(value, bytes) else value


class EnvironmentWatch:
    """Records variables that are set or deleted, except by installed modules during their import.

    Changes by imports are replayed in a forked rank (``runtime/agent/forked.py``). Variables with their original value
    at the time of the ``changed`` call count as unchanged, since accelerate clears the environment temporarily.
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
        if name in ALLOCATOR and "backend" not in value:
            return
        below_other_package = False
        while frame is not None:
            module = str(frame.f_globals.get("__name__", ""))
            package = module.partition(".")[0]
            if package == _OWN_PACKAGE and not below_other_package:
                return  # the runtime itself
            below_other_package |= package not in _STANDARD_LIBRARY
            imported = frame.f_code.co_name == "<module>" and module != "__main__"
            if imported and frame.f_code.co_filename.startswith(self._folders):
                return
            frame = frame.f_back
        self._before.setdefault(name, before)


_COPYING_CLASSES = (("pathlib", "_NormalAccessor"), ("glob", "_StringGlobber"), ("tempfile", "_TemporaryFileCloser"))
"""Classes of the standard library that copy functions of ``os`` (``pathlib`` before Python 3.11, ``glob`` in 3.13)."""


def replace_function(module: ModuleType, name: str, replacement: Callable[..., Any]) -> None:
    """Set a module's function, also where ``from module import name`` or the standard library has copied it."""
    original = getattr(module, name)
    for other in list(sys.modules.values()):
        for copied in (name, f"_builtin_{name}", f"bltn_{name}"):  # of bz2 and tokenize, and of tarfile
            if getattr(other, "__dict__", {}).get(copied) is original:
                setattr(other, copied, replacement)
    setattr(module, name, replacement)
    for owner in (getattr(sys.modules.get(place), copying, None) for place, copying in _COPYING_CLASSES):
        for attribute, value in list(vars(owner).items()) if owner is not None else ():
            defaults = getattr(value, "__defaults__", None) or ()
            if original in (value, getattr(value, "__func__", None)):
                setattr(owner, attribute, staticmethod(replacement))
            elif original in defaults:
                value.__defaults__ = tuple(replacement if item is original else item for item in defaults)


def patch(
    owner: Any, name: str, *, copies: bool = False, is_method: bool = False
) -> Callable[[Callable[..., Any]], Callable[[], None]]:
    """Return a decorator that replaces a function of a module, class or object.

    The decorated function gets the original as its first argument. The decorator returns a function that restores the
    original. With ``copies``, the function is also replaced where ``from module import name`` copied it. With
    ``is_method``, the replacement is a bound method, whose object is then an argument, too, as torch's schedulers need.
    """
    defined, original = vars(owner).get(name), getattr(owner, name)

    def decorate(function: Callable[..., Any]) -> Callable[[], None]:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        if copies:
            replace_function(owner, name, replacement)
        setattr(owner, name, MethodType(replacement, owner) if is_method else replacement)

        def undo() -> None:
            if defined is None:
                delattr(owner, name)
            else:
                setattr(owner, name, defined)

        return undo

    return decorate
