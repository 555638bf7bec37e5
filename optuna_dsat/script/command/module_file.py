"""Find the file that ``python -m NAME`` or ``import NAME`` runs, without importing user code."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from importlib.machinery import PathFinder
from pathlib import Path

from optuna_dsat.errors import UsageError
from optuna_dsat.runtime.user_code import parsed_source
from optuna_dsat.script.interpreter import package_folders


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


def module_file(name: str, cwd: Path, *, of_package: str = "__main__.py", python: str | None = None) -> Path | None:
    """Return the file that ``python -m name`` runs in ``cwd``; None if there is none.

    The file is ``package/module.py``, or ``package/module/__main__.py`` for a package. As in Python, the working
    directory precedes installed packages. Nothing is imported, so submodules of a package that extends its ``__path__``
    on import are not found. With ``__init__.py`` as file of a package, it is the file that ``import name`` runs.
    """
    top, *rest = name.split(".")
    for folder in (cwd, *package_folders(top, python)):
        base = folder.joinpath(top, *rest)
        for file in (base / of_package, base.with_name(f"{base.name}.py")):
            if file.is_file():
                return file
    return None


def is_importable(name: str, folders: Iterable[Path], *, python: str | None) -> bool:
    """Return whether the top-level package of a module is installed, built in or in one of the folders.

    Nothing is imported.
    """
    top = name.partition(".")[0]
    if top in sys.builtin_module_names or PathFinder.find_spec(top, [str(folder) for folder in folders]) is not None:
        return True
    return bool(package_folders(top, python))
