"""The live page over HTTP, a read-only WSGI application, with optuna-dashboard if asked for, and their server.

The page answers only requests for this machine's names, which prevents DNS rebinding: a foreign page could otherwise
read it through a domain that resolves to this machine. Configs and logs of launches are served by checked names.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import socket
import stat
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from optuna.trial import FrozenTrial

from optuna_dsat.errors import DsatError, UnreadableStudyError, UsageError
from optuna_dsat.escape.terminal import one_line
from optuna_dsat.report.dashboard.live import LiveStudy
from optuna_dsat.report.launch_files import LIVE_FILES, file_of
from optuna_dsat.report.template import PLOTLY, asset
from optuna_dsat.secrecy.references import hidden_text
from optuna_dsat.secrecy.shapes import hidden_data
from optuna_dsat.store import Store
from optuna_dsat.store.retry import RetryingStorage
from optuna_dsat.study.stored import read_stored

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; img-src data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    ("Content-Security-Policy", _POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cache-Control", "no-store"),
)
_HTML, _TEXT = "text/html; charset=utf-8", "text/plain; charset=utf-8"
_SCRIPT, _JSON = "text/javascript; charset=utf-8", "application/json"
_OURS = frozenset({"", "now", "study", "assets", LIVE_FILES})
"""First parts of the paths of the live page."""

_Answer = tuple[HTTPStatus, str, bytes]
"""Status, media type and content."""


def live_app(study: LiveStudy) -> WSGIApplication:
    """Return the application that serves the live page of a study."""

    def app(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        if _changes(environ):
            return _reply(start, _refused(HTTPStatus.METHOD_NOT_ALLOWED, "This page is only read."))
        try:
            answer = _answer(study, _path(environ))
        except DsatError as error:
            answer = _refused(HTTPStatus.SERVICE_UNAVAILABLE, hidden_text(str(error)))
        return _reply(start, answer, with_content=environ["REQUEST_METHOD"] == "GET")

    return app


def beside(ours: WSGIApplication, other: WSGIApplication) -> WSGIApplication:
    """Return an application that serves the live page and forwards all other paths to another application."""

    def app(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        return (ours if _path(environ)[0] in _OURS else other)(environ, start)

    return app


def guarded(app: WSGIApplication, *, host: str) -> WSGIApplication:
    """Return an application that answers only requests for this machine's names and for numeric addresses.

    Modifying requests from pages of other origins are rejected.
    """
    names = {"localhost", host.lower()}
    if not is_loopback(host):
        names |= {socket.gethostname().lower(), socket.getfqdn().lower()}

    def checked(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        if not _is_known(environ.get("HTTP_HOST", ""), names):
            return _reply(start, _refused(HTTPStatus.FORBIDDEN, "This is not a name of this machine."))
        if _changes(environ) and environ.get("HTTP_SEC_FETCH_SITE", "none") not in ("none", "same-origin"):
            return _reply(start, _refused(HTTPStatus.FORBIDDEN, "Pages of elsewhere change nothing here."))
        return app(environ, start)

    return checked


def _changes(environ: WSGIEnvironment) -> bool:
    return environ.get("REQUEST_METHOD") not in ("GET", "HEAD")


def is_loopback(host: str) -> bool:
    """Return whether an address is one of this machine that no other can reach."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_known(given: str, names: set[str]) -> bool:
    try:
        host = urlsplit(f"//{given}").hostname or ""
        if host in names:
            return True
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _path(environ: WSGIEnvironment) -> list[str]:
    return str(environ.get("PATH_INFO", "/")).split("/")[1:] or [""]


def _answer(study: LiveStudy, path: list[str]) -> _Answer:
    match path:
        case [""]:
            return HTTPStatus.OK, _HTML, study.page().encode()
        case ["now"]:
            return _versioned(*study.now())
        case ["study"]:
            return _versioned(*study.study())
        case ["assets", name] if name in _ASSETS:
            return HTTPStatus.OK, _SCRIPT, asset(_ASSETS[name]).encode()
        case [first, launch_id, name] if first == LIVE_FILES:
            return _file(study, launch_id, name)
    return _refused(HTTPStatus.NOT_FOUND, "There is no such page.")


def _versioned(version: str, html: str) -> _Answer:
    return HTTPStatus.OK, _JSON, json.dumps({"version": version, "html": html}).encode()


def _file(study: LiveStudy, launch_id: str, name: str) -> _Answer:
    """Return a launch's config or the end of one of its logs, without secrets."""
    folder = study.view.folder
    path = None if folder is None else file_of(folder, launch_id, name)
    try:
        if path is None:
            return _refused(HTTPStatus.NOT_FOUND, "There is no such file.")
        content = tail(path)
        if path.suffix == ".json":
            data: Mapping[str, Any] = hidden_data(json.loads(content))
            content = (json.dumps(data, indent=2) + "\n").encode()
        else:
            content = _log_without_secrets(content)
    except (OSError, ValueError, RecursionError):
        return _refused(HTTPStatus.NOT_FOUND, "The file cannot be read.")
    return HTTPStatus.OK, _TEXT, content


_LOG_LIMIT_BYTES = 256 * 1024
"""Longer logs are cut to their end."""


def tail(path: Path, limit_bytes: int = _LOG_LIMIT_BYTES) -> bytes:
    """Return the end of a file from the start of a line, after a line with the omitted size, or all of it.

    Raises:
        OSError: If it cannot be read, is a link or is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "no regular file", str(path))
        size = status.st_size
        if size <= limit_bytes:
            return file.read()
        file.seek(size - limit_bytes)
        kept = file.read(limit_bytes)
    kept = kept[kept.find(b"\n") + 1 :]
    return f"[the first {size - len(kept)} bytes are left out; the whole log: {path}]\n".encode() + kept


def _log_without_secrets(content: bytes) -> bytes:
    """Return the end of a log as served to others; binary content is unchanged."""
    if b"\0" in content:
        return content
    return hidden_text(content.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")


_ASSETS = {"plotly.js": PLOTLY, "report.js": "report.js", "live.js": "live.js"}


def _refused(status: HTTPStatus, why: str) -> _Answer:
    return status, _TEXT, f"{one_line(why)}\n".encode()


def _reply(start: StartResponse, answer: _Answer, *, with_content: bool = True) -> list[bytes]:
    status, kind, content = answer
    headers = [("Content-Type", kind), ("Content-Length", str(len(content))), *_HEADERS]
    start(f"{status.value} {status.phrase}", headers)
    return [content] if with_content else []


_PATIENCE_S = 60
"""Seconds without a request after which a connection is closed."""


class ResultStorage(RetryingStorage):
    """A storage whose best trial of a study is optuna-dsat's result: rounds may have refuted the best value."""

    def __init__(self, store: Store) -> None:
        super().__init__(store.storage, database=store.url)
        self._store = store

    def get_best_trial(self, study_id: int) -> FrozenTrial:
        """Return the trial of the result; Optuna's best trial for a study that optuna-dsat did not create."""
        name = self.get_study_name_from_id(study_id)
        best = None
        if self._store.find_study(name) is not None:
            with suppress(UnreadableStudyError):  # a study of a newer version: use Optuna's best trial
                best = read_stored(self._store, name).best
        return super().get_best_trial(study_id) if best is None else best.trial


class _Server(ThreadingMixIn, WSGIServer):
    """Serves each request in a separate daemon thread."""

    daemon_threads = True


class _Server6(_Server):
    """Likewise, on an IPv6 address."""

    address_family = socket.AF_INET6


class _Quiet(WSGIRequestHandler):
    """Logs no requests."""

    timeout = _PATIENCE_S

    def log_message(self, format: str, *args: object) -> None:
        """Discard the message."""


def optuna_app(store: Store) -> WSGIApplication:
    """Return optuna-dashboard."""
    from optuna_dashboard import wsgi

    app: WSGIApplication = wsgi(ResultStorage(store))
    return app


def serve(app: WSGIApplication, *, host: str, port: int, on_ready: Callable[[int], None]) -> None:
    """Serve an application until interrupted; ``on_ready`` gets the port, a free one for port 0.

    Raises:
        UsageError: If the server cannot listen on the address.
    """
    kind = _Server6 if ":" in host else _Server
    try:
        server = make_server(host, port, app, server_class=kind, handler_class=_Quiet)
    except OSError as error:
        raise UsageError(
            f"Cannot listen on {host}:{port}: {error.strerror or error}. Choose another --port or --host."
        ) from error
    with server:
        on_ready(server.server_port)
        server.serve_forever()
