"""Removal of locks that killed builds leave in torch's folder of compiled extensions (``runtime/build_locks.py``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from optuna_dsat.runtime.build_locks import is_held, remove_if_abandoned

__all__ = ["extensions_dir", "held_locks", "remove_stale_locks"]


def extensions_dir(environ: Mapping[str, str]) -> Path:
    """Return torch's folder of compiled extensions for an environment (``torch.utils.cpp_extension``)."""
    if chosen := environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(chosen)
    cache = environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "torch_extensions"


def remove_stale_locks(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Remove build locks that nobody holds; return them.

    Args:
        environ: Environment of the launches.
    """
    return tuple(path for path in _locks(environ) if remove_if_abandoned(path))


def held_locks(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the locks of builds that go on, each in the folder of what is built.

    Args:
        environ: Environment of the launches.
    """
    return tuple(path for path in _locks(environ) if is_held(path))


def _locks(environ: Mapping[str, str]) -> tuple[Path, ...]:
    root = extensions_dir(environ)
    return (*root.glob("*/lock"), *root.glob("*/*/lock"))
