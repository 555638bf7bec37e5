"""Addresses of pages."""

from __future__ import annotations

from urllib.parse import quote

__all__ = ["page_address"]


def page_address(host: str, port: int, *path: object) -> str:
    """Return the address of a page, such as ``http://[::1]:8080/dashboard/studies/1``.

    Args:
        host: Name or number of the host.
        port: Port.
        path: Parts of the path.
    """
    shown = f"[{host}]" if ":" in host else quote(host, safe=".-")
    return f"http://{shown}:{port}/" + "/".join(quote(str(part), safe="") for part in path)
