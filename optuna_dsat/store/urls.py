"""Storage URLs: validation, normalization, and display without passwords."""

from __future__ import annotations

import os
import re
from pathlib import Path

from sqlalchemy import make_url
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError

from optuna_dsat.errors import StorageUrlError
from optuna_dsat.escape.shell import install_command
from optuna_dsat.secrecy.names import is_secret_name
from optuna_dsat.secrecy.shapes import hidden

_POSTGRES_DRIVERS = frozenset({"postgres", "postgresql", "postgresql+psycopg", "postgresql+psycopg2"})
_SQLITE_DRIVERS = frozenset({"sqlite", "sqlite+pysqlite"})
_SQLITE_MAGIC = b"SQLite format 3\0"
"""First bytes of every SQLite database (https://www.sqlite.org/fileformat.html)."""
_SUPPORTED = "sqlite:///FILE and postgresql://USER@HOST:PORT/DATABASE are supported"


def display_url(url: str | URL) -> str:
    """Return the URL with passwords masked, for display."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        shown = re.sub(r"(://[^:/@]*):.*@", r"\1:***@", str(url))
        return hidden(re.sub(r"(?i)([?&][^=&]*pass[^=&]*=)[^&]*", r"\1***", shown))
    secret = [key for key in parsed.query if "pass" in key.lower() or is_secret_name(key)]
    return parsed.update_query_dict(dict.fromkeys(secret, "***")).render_as_string(hide_password=True)


def parse_url(url: str) -> URL:
    """Parse a storage URL; normalize it to ``postgresql+psycopg://`` or the absolute path of an SQLite file.

    Raises:
        StorageUrlError: If it cannot be parsed, the kind of database is not supported, or the file cannot be opened.
    """
    shown = display_url(url)
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise StorageUrlError(f"The storage URL '{shown}' cannot be parsed: {_SUPPORTED}.") from None
    if parsed.drivername in _SQLITE_DRIVERS:
        parsed = _checked_sqlite(parsed, shown)
    elif parsed.drivername in _POSTGRES_DRIVERS:
        _require_psycopg(shown)
        parsed = parsed.set(drivername="postgresql+psycopg")
        try:
            parsed.get_dialect()().create_connect_args(parsed)
        except ArgumentError as error:
            raise StorageUrlError(f"The storage '{shown}' has an option that cannot be used: {error}.") from None
    else:
        raise StorageUrlError(f"The storage '{shown}' is of an unsupported kind ({parsed.drivername}): {_SUPPORTED}.")
    if set("{}") & {*parsed.render_as_string(hide_password=False), *(parsed.database or "")}:
        raise StorageUrlError(
            f"The storage URL '{shown}' contains a brace, which Optuna takes for a placeholder: "
            f"choose a name without braces."
        )
    return parsed


def database_exists(url: str) -> bool:
    """Return whether an SQLite file exists; True for databases on a server, which are not checked."""
    parsed = parse_url(url)
    return parsed.get_backend_name() != "sqlite" or Path(str(parsed.database)).exists()


def database_files(url: str) -> tuple[str, ...]:
    """Return the files that a database in SQLite may have, as absolute paths; empty for a database on a server."""
    parsed = parse_url(url)
    if parsed.get_backend_name() != "sqlite":
        return ()
    return tuple(f"{parsed.database}{suffix}" for suffix in ("", "-lock", "-wal", "-shm", "-journal"))


def _checked_sqlite(url: URL, shown: str) -> URL:
    if url.database in (None, "", ":memory:") or str(url.database).startswith("file:"):
        raise StorageUrlError(
            f"The storage '{shown}' is not a file: give sqlite:///FILE, or no worker could join and nothing be resumed."
        )
    if url.query:
        raise StorageUrlError(f"The storage '{shown}' has options, and a file in SQLite takes none: leave them out.")
    path = Path(str(url.database)).absolute()
    if not path.parent.is_dir():
        raise StorageUrlError(f"The storage '{shown}' cannot be opened: the directory {path.parent} does not exist.")
    if path.exists() and not path.is_file():
        raise StorageUrlError(f"The storage '{shown}' cannot be opened: {path} is not a file.")
    for needed in (path.parent, path, Path(f"{path}-lock")):
        if needed.exists() and not os.access(needed, os.W_OK):
            raise StorageUrlError(
                f"The storage '{shown}' cannot be opened: {needed} is not writable. Name another with --storage."
            )
    if path.exists():
        with path.open("rb") as file:
            if file.read(len(_SQLITE_MAGIC)) not in (_SQLITE_MAGIC, b""):
                raise StorageUrlError(f"The storage '{shown}' cannot be opened: {path} is not an SQLite database.")
    return url.set(database=str(path))


def _require_psycopg(shown: str) -> None:
    try:
        import psycopg  # noqa: F401 - only its presence matters, and only for this kind of URL
    except ImportError as error:
        raise StorageUrlError(
            f"The storage '{shown}' needs psycopg 3 ({error}): {install_command('optuna-dsat[postgres]')}."
        ) from None
