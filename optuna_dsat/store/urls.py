"""Storage URLs: validation, normalization, and display without passwords."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path

from sqlalchemy import make_url
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError, SAWarning

from optuna_dsat.errors import StorageUrlError
from optuna_dsat.escape.shell import install_command
from optuna_dsat.runtime.files import open_regular, shortened, storable
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
    if storable(url) != url:
        raise StorageUrlError(
            f"The storage URL has a character that is no text, such as a byte of another encoding: {_SUPPORTED}."
        )
    shown = display_url(url)
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise StorageUrlError(f"The storage URL '{shown}' cannot be parsed: {_SUPPORTED}.") from None
    _check_texts(parsed, shown)
    if parsed.drivername in _SQLITE_DRIVERS:
        parsed = _checked_sqlite(parsed, shown)
    elif parsed.drivername in _POSTGRES_DRIVERS:
        _require_psycopg(shown)
        _check_host(parsed, shown)
        parsed = parsed.set(drivername="postgresql+psycopg")
    else:
        raise StorageUrlError(f"The storage '{shown}' is of an unsupported kind ({parsed.drivername}): {_SUPPORTED}.")
    _check_options(parsed, shown)
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


def _check_texts(url: URL, shown: str) -> None:
    """Raise ``StorageUrlError`` for NUL characters written as ``%00``: C libraries would truncate the text there."""
    texts = [url.username, url.password, url.host, url.database, *(part for pair in url.query.items() for part in pair)]
    if "\0" in "".join(part for text in texts for part in ([text] if isinstance(text, str) else text or [])):
        raise StorageUrlError(f"The storage URL '{shown}' has a NUL character (%00), which no name has.")


def _check_options(url: URL, shown: str) -> None:
    """Raise ``StorageUrlError`` for options that SQLAlchemy cannot use, ignores, or takes for part of a file's name."""
    try:
        with warnings.catch_warnings(action="error", category=SAWarning):
            [names, _options] = url.get_dialect()().create_connect_args(url)
    except (ArgumentError, SAWarning, TypeError, ValueError) as error:
        reason = hidden(str(error).partition(" (Background")[0])
        raise StorageUrlError(
            f"The storage URL '{shown}' has an option that cannot be used: {shortened(reason, 300)}."
        ) from None
    if url.get_backend_name() == "sqlite" and [*names] != [url.database]:
        raise StorageUrlError(f"The storage URL '{shown}' has options that name another file: leave them out.")


def _checked_sqlite(url: URL, shown: str) -> URL:
    if url.database in (None, "", ":memory:") or str(url.database).startswith("file:"):
        raise StorageUrlError(
            f"The storage '{shown}' is not a file: give sqlite:///FILE, or no worker could join and nothing be resumed."
        )
    path = Path(str(url.database)).absolute()
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise StorageUrlError(f"The storage '{shown}' cannot be opened: {path} is a link that leads in a circle.")
    for needed in (path.parent, target.parent):
        if not needed.is_dir():
            raise StorageUrlError(f"The storage '{shown}' cannot be opened: the directory {needed} does not exist.")
    lock = Path(f"{path}-lock")
    if lock.is_symlink() or (lock.exists() and not lock.is_file()):
        raise StorageUrlError(f"The storage '{shown}' cannot be locked: {lock} is no file; remove it.")
    if path.exists() and not path.is_dir() and not path.is_file():
        raise StorageUrlError(f"The storage '{shown}' cannot be opened: {path} is no file.")
    if path.is_dir():
        raise StorageUrlError(f"The storage '{shown}' cannot be opened: {path} is a directory.")
    for needed in (path.parent, target.parent, path, lock):
        if needed.exists() and not os.access(needed, os.W_OK):
            raise StorageUrlError(
                f"The storage '{shown}' cannot be opened: {needed} is not writable. Name another with --storage."
            )
    if path.exists() and _magic_of(path, shown) not in (_SQLITE_MAGIC, b""):
        raise StorageUrlError(f"The storage '{shown}' cannot be opened: {path} is not an SQLite database.")
    return url.set(database=str(path))


def _magic_of(path: Path, shown: str) -> bytes | None:
    """Return the first bytes of a file; None if no data is available yet, as for a kernel log in /proc."""
    try:
        with open_regular(path) as file:
            return file.read(len(_SQLITE_MAGIC))
    except OSError as error:
        raise StorageUrlError(f"The storage '{shown}' cannot be opened: {path}: {error.strerror}.") from None


def _check_host(url: URL, shown: str) -> None:
    try:
        (url.host or "").encode("idna")
    except UnicodeError:
        raise StorageUrlError(f"The storage '{shown}' cannot be opened: its host is no name of a machine.") from None


def _require_psycopg(shown: str) -> None:
    try:
        import psycopg  # noqa: F401 - only its presence matters, and only for this kind of URL
    except ImportError as error:
        raise StorageUrlError(
            f"The storage '{shown}' needs psycopg 3 ({error}): {install_command('optuna-dsat[postgres]')}."
        ) from None
