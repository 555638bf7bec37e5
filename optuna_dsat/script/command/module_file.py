"""Find the file that ``python -m NAME`` or ``import NAME`` runs, without importing user code."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from optuna_dsat.errors import UsageError
from optuna_dsat.runtime.user_code import parsed_source

__all__ = ["is_importable", "module_file", "python_tree"]


def python_tree(file: Path, what: str) -> ast.Module:
    """Return the syntax tree of a Python file.

    Raises:
        UsageError: If it is not Python, or cannot be read.
    """
    try:
        return parsed_source(file)
    except SyntaxError as error:
        where = f" (line {error.lineno})" if error.lineno else ""
        raise UsageError(f"{what} is not Python{where}: {error.args[0]}.") from None
    except OSError as error:
        raise UsageError(f"{what} cannot be read: {error.strerror}.") from None


def module_file(name: str, cwd: Path, *, of_package: str = "__main__.py") -> Path | None:
    """Return the file that ``python -m name`` runs in ``cwd``; None if there is none.

    The file is ``package/module.py``, or ``package/module/__main__.py`` for a package. As in Python, the working
    directory precedes installed packages. Nothing is imported, so submodules of a package that extends its ``__path__``
    on import are not found. With ``__init__.py`` as file of a package, it is the file that ``import name`` runs.
    """
    top, *rest = name.split(".")
    spec = _spec(top)
    folders = [cwd]
    if spec is not None and spec.submodule_search_locations is not None:
        folders += [Path(location).parent for location in spec.submodule_search_locations]
    elif spec is not None and spec.origin is not None:
        folders.append(Path(spec.origin).parent)
    for folder in folders:
        base = folder.joinpath(top, *rest)
        for file in (base / of_package, base.with_name(f"{base.name}.py")):
            if file.is_file():
                return file
    return None


def is_importable(name: str, folders: Iterable[Path]) -> bool:
    """Return whether the top-level package of a module is installed, built in or in one of the folders.

    Nothing is imported.
    """
    top = name.partition(".")[0]
    return PathFinder.find_spec(top, [str(folder) for folder in folders]) is not None or _spec(top) is not None


def _spec(top: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(top)
    except (ImportError, ValueError):  # not a valid name, or a module without a spec
        return None
