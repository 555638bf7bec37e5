"""What stands in for data, weights and devices that are not at hand; never for DeepSpeed, launcher, parser or loop.

The runner's ``sitecustomize`` calls ``install`` as an interpreter starts, in the tuner and in every rank. Each module
of this folder has a mapping ``AFTER``: module name -> what is done to that module once it has been imported. They use
nothing of the project, and import what they need inside their functions.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import pkgutil
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

__all__ = ["install"]

Patch = Callable[[ModuleType], None]


def install() -> None:
    """Apply every stand-in to the modules that are imported already, and to the others as they are imported."""
    patches: dict[str, list[Patch]] = {}
    for result in pkgutil.iter_modules(__path__, f"{__name__}."):
        after: dict[str, Patch] = getattr(importlib.import_module(result.name), "AFTER", {})
        for module, patch in after.items():
            patches.setdefault(module, []).append(patch)
    sys.meta_path.insert(0, _Finder(patches))
    for name in patches.keys() & sys.modules.keys():
        for patch in patches[name]:
            patch(sys.modules[name])


class _Finder:
    """Finds modules as the other finders do, and has patches applied to those that it has some for."""

    def __init__(self, patches: dict[str, list[Patch]]) -> None:
        self._patches = patches
        self._searching: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._patches or name in self._searching:
            return None
        self._searching.add(name)
        try:
            result = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
            spec = next((item for item in result if item is not None), None)
        finally:
            self._searching.discard(name)
        if spec is not None and spec.loader is not None:
            _patch_after(spec.loader, self._patches[name])
        return spec


def _patch_after(loader: object, patches: list[Patch]) -> None:
    execute = loader.exec_module  # type: ignore[attr-defined]

    def run(module: ModuleType) -> None:
        execute(module)
        for patch in patches:
            patch(module)

    loader.exec_module = run  # type: ignore[attr-defined]
