"""Paths that are made of names from elsewhere, held inside a folder."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

__all__ = ["OutsideError", "held_inside", "page_address"]


class OutsideError(ValueError):
    """A name leads out of the folder that it belongs to, by itself or by a link."""


def held_inside(folder: Path, *names: str) -> Path:
    """Return the path of a file in a folder, links followed.

    Args:
        folder: The folder; it may be reached by a link itself.
        names: Names of the folders below it, and of the file.

    Raises:
        OutsideError: If the path lies outside of the folder; names it.
    """
    try:
        root = folder.resolve()
        path = root.joinpath(*names).resolve()
    except (ValueError, OSError, RuntimeError) as error:  # a NUL character, a name too long, links in a circle
        raise OutsideError(f"{names!r} is no path: {error}") from None
    if not path.is_relative_to(root) or path == root:
        raise OutsideError(f"{'/'.join(names)} leads out of {folder}")
    return path


def page_address(host: str, port: int, *path: object) -> str:
    """Return the address of a page, such as ``http://[::1]:8080/dashboard/studies/1``.

    Args:
        host: Name or number of the host.
        port: Port.
        path: Parts of the path.
    """
    shown = f"[{host}]" if ":" in host else quote(host, safe=".-")
    return f"http://{shown}:{port}/" + "/".join(quote(str(part), safe="") for part in path)
