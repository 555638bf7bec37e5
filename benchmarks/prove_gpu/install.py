"""Installs carried wheels into a folder of the state, without a network and without touching the machine's Python.

Imports the standard library alone: it runs before anything is installed.
"""

from __future__ import annotations

import email
import importlib.metadata
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

__all__ = ["InstallError", "environment", "install", "missing"]


class InstallError(RuntimeError):
    """The wheels cannot be installed."""


def install(wheels: Path, site: Path) -> list[str]:
    """Install the wheels that the machine lacks into ``site``, once; return the names of those that were installed.

    What the machine has is left as it is, for its own packages were made for each other, unless it is too old for what
    is installed. DeepSpeed, Optuna and optuna-dsat are installed in any case: they are what is proven.

    Raises:
        InstallError: If the folder holds no wheel, or pip fails.
    """
    result = sorted(wheels.glob("*.whl"))
    if not result:
        raise InstallError(f"There is no wheel in {wheels}: collect them with `make pack-gpu`.")
    wanted = missing(result)
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
_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*\(?(?P<versions>[^;)]*)")
_BOUND = re.compile(r"(?P<operator>>=|==)\s*(?P<version>[0-9][0-9.]*)")


def missing(wheels: Sequence[Path]) -> list[Path]:
    """Return the wheels whose distribution this Python does not have, or not as new as the others need it."""
    named = {_normal(wheel.name.partition("-")[0]): wheel for wheel in wheels}
    wanted = [name for name in named if name in _ALWAYS or _version(name) is None]
    for name in wanted:  # grows: what is installed has needs of its own
        for needed, versions in _requirements(named[name]):
            if needed in named and needed not in wanted and not _suffices(_version(needed) or "0", versions):
                wanted.append(needed)
    return [wheel for name, wheel in named.items() if name in wanted]


def _normal(name: str) -> str:
    """Return the normalised name of a distribution (PEP 503); wheels' file names have underscores (PEP 427)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _requirements(wheel: Path) -> list[tuple[str, str]]:
    """Return what a wheel needs, without its extras: names and version specifiers."""
    with zipfile.ZipFile(wheel) as archive:
        path = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_string(archive.read(path).decode("utf-8"))
    lines = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    result = [match for line in lines if (match := _REQUIREMENT.match(line))]
    return [(_normal(match["name"]), match["versions"]) for match in result]


def _suffices(version: str, specifiers: str) -> bool:
    """Return whether a version is as new as ``>=`` says, and the one that ``==`` says; no other bounds are read."""
    own = _numbers(version.partition("+")[0])
    for bound in _BOUND.finditer(specifiers):
        other = _numbers(bound["version"])
        width = max(len(own), len(other))
        have, needed = (numbers + (0,) * (width - len(numbers)) for numbers in (own, other))
        if have < needed or (bound["operator"] == "==" and have != needed):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a release; what follows them (``rc1``, ``.post2``) does not count."""
    release = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in release[0].split(".")) if release else ()


def environment(root: Path, site: Path) -> dict[str, str]:
    """Return this process's environment with the checkout and then ``site`` where Python looks first."""
    rest = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    entries = [str(root), str(site.resolve()), *rest]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(entries))}
