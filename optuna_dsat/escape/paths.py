"""Build paths and URLs from untrusted names; files are confined to a folder."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote


class OutsideError(ValueError):
    """A name leads out of its folder, directly or by a symlink."""


def held_inside(folder: Path, *names: str) -> Path:
    """Return the path of a file in a folder, with symlinks resolved.

    Raises:
        OutsideError: If the path is outside of the folder; the message contains the path.
    """
    try:
        root = folder.resolve()
        path = root.joinpath(*names).resolve()
    except (ValueError, OSError, RuntimeError) as error:  # NUL character, name too long, circular symlinks
        raise OutsideError(f"{names!r} is not a path: {error}") from None
    if not path.is_relative_to(root) or path == root:
        raise OutsideError(f"{'/'.join(names)} leads out of {folder}")
    return path


def page_address(host: str, port: int, *path: object) -> str:
    """Return the URL of a page, such as ``http://[::1]:8080/dashboard/studies/1``."""
    shown = f"[{host}]" if ":" in host else quote(host, safe=".-")
    return f"http://{shown}:{port}/" + "/".join(quote(str(part), safe="") for part in path)
