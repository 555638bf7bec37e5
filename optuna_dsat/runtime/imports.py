"""Modules that the script has imported by the end of a profile launch; the warm launcher preloads them."""

from __future__ import annotations

import site
import sys
import sysconfig
from pathlib import Path

__all__ = ["imported_modules", "installed_folders", "loaded_operators"]


def imported_modules() -> list[str]:
    """Return the installed modules that this process has imported, in import order.

    Excludes the standard library's, which other modules import and which are cheap, and the user's own, which every
    launch imports itself.
    """
    folders = installed_folders()
    found = []
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        origin = getattr(spec, "origin", None)
        if spec is not None and spec.name == name and isinstance(origin, str) and origin.startswith(folders):
            found.append(name)
    return found


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
