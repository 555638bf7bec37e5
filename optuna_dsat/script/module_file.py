"""The file that ``python -m NAME`` or ``import NAME`` runs, found without importing anything of the user's."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

__all__ = ["importable_file", "module_file"]


def module_file(name: str, cwd: Path) -> Path | None:
    """Return the file that ``python -m name`` runs in ``cwd``, None where there is none.

    That is ``package/module.py``, or ``package/module/__main__.py`` for a package; the working directory comes before
    what is installed, as for Python itself. Installed packages are found through their own top level alone: nothing is
    imported, so a package that extends its own ``__path__`` while it is imported is not followed.

    Args:
        name: Dotted name of a module.
        cwd: Working directory of the launch.
    """
    return _file(name, cwd, "__main__.py")


def importable_file(name: str, cwd: Path) -> Path | None:
    """Return the file that ``import name`` runs in ``cwd``, found as ``module_file`` does, None where there is none.

    Args:
        name: Dotted name of a module.
        cwd: Working directory of the launch.
    """
    return _file(name, cwd, "__init__.py")


def _file(name: str, cwd: Path, of_package: str) -> Path | None:
    top, *rest = name.split(".")
    for folder in (cwd, *_installed(top)):
        base = folder.joinpath(top, *rest)
        for file in (base / of_package, base.with_name(f"{base.name}.py")):
            if file.is_file():
                return file
    return None


def _installed(top: str) -> Iterator[Path]:
    """Yield the folders that hold an importable top-level module or package."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):  # no such name, or a module that was made by hand
        return
    if spec is None:
        return
    if spec.submodule_search_locations is not None:
        yield from (Path(location).parent for location in spec.submodule_search_locations)
    elif spec.origin is not None:
        yield Path(spec.origin).parent
