"""Installs carried wheels into a folder of the state, without a network and without touching the machine's Python.

Imports the standard library alone: it runs before anything is installed.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["InstallError", "environment", "install", "missing"]


class InstallError(RuntimeError):
    """The wheels cannot be installed."""


def install(wheels: Path, site: Path) -> list[str]:
    """Install the wheels that the machine lacks into ``site``, once; return the names of those that were installed.

    What the machine has, in whatever version, is left as it is: its own packages were made for each other. DeepSpeed,
    Optuna and optuna-dsat are the exceptions, for these are what is proven.

    Raises:
        InstallError: If the folder holds no wheel, or pip fails.
    """
    found = sorted(wheels.glob("*.whl"))
    if not found:
        raise InstallError(f"There is no wheel in {wheels}: collect them with `make pack-gpu`.")
    wanted = missing(found)
    if site.is_dir() or not wanted:
        return []
    part = site.with_name(f"{site.name}.part")
    options = ("--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade", "--quiet")
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(part), *map(str, wanted)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InstallError(f"pip exited with {done.returncode}: {done.stderr.strip()[-1000:]}")
    part.rename(site)
    return [wheel.name for wheel in wanted]


_ALWAYS = frozenset({"deepspeed", "optuna", "optuna-dsat"})


def missing(wheels: Sequence[Path]) -> list[Path]:
    """Return the wheels whose distribution this Python does not have, and those that are always taken."""
    return [wheel for wheel in wheels if (name := _name(wheel)) in _ALWAYS or not _installed(name)]


def _name(wheel: Path) -> str:
    """Return the normalised name of a wheel's distribution (PEP 427, PEP 503)."""
    return re.sub(r"[-_.]+", "-", wheel.name.partition("-")[0]).lower()


def _installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def environment(root: Path, site: Path) -> dict[str, str]:
    """Return this process's environment with the checkout and then ``site`` where Python looks first."""
    rest = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    entries = [str(root), str(site.resolve()), *rest]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(entries))}
