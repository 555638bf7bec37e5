"""The live page over HTTP: a read-only WSGI application.

It answers only requests for this machine's names, which prevents DNS rebinding: a foreign page could otherwise read it
through a domain that resolves to this machine. It serves configs and logs of the study's launches by checked names.
"""

from __future__ import annotations

import ipaddress
import json
import socket
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from optuna_dsat.errors import DsatError
from optuna_dsat.escape.terminal import one_line
from optuna_dsat.report.dashboard.artifacts import log_without_secrets, tail
from optuna_dsat.report.dashboard.live import LiveStudy
from optuna_dsat.report.launch_files import LIVE_FILES, file_of
from optuna_dsat.report.template import PLOTLY, asset
from optuna_dsat.secrecy.references import hidden_text
from optuna_dsat.secrecy.shapes import hidden_data

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
    if not _is_loopback(host):
        names |= {socket.gethostname().lower(), socket.getfqdn().lower()}

    def checked(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        if not _is_known(environ.get("HTTP_HOST", ""), names):
            return _reply(start, _refused(HTTPStatus.FORBIDDEN, "This is no name of this machine."))
        if _changes(environ) and environ.get("HTTP_SEC_FETCH_SITE", "none") not in ("none", "same-origin"):
            return _reply(start, _refused(HTTPStatus.FORBIDDEN, "Pages of elsewhere change nothing here."))
        return app(environ, start)

    return checked


def _changes(environ: WSGIEnvironment) -> bool:
    return environ.get("REQUEST_METHOD") not in ("GET", "HEAD")


def _is_loopback(host: str) -> bool:
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
            return HTTPStatus.OK, _SCRIPT, _ASSETS[name]()
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
            content = log_without_secrets(content)
    except (OSError, ValueError, RecursionError):
        return _refused(HTTPStatus.NOT_FOUND, "The file cannot be read.")
    return HTTPStatus.OK, _TEXT, content


_ASSETS: Mapping[str, Callable[[], bytes]] = {
    "plotly.js": lambda: asset(PLOTLY).encode(),
    "report.js": lambda: asset("report.js").encode(),
    "live.js": lambda: asset("live.js").encode(),
}


def _refused(status: HTTPStatus, why: str) -> _Answer:
    return status, _TEXT, f"{one_line(why)}\n".encode()


def _reply(start: StartResponse, answer: _Answer, *, with_content: bool = True) -> list[bytes]:
    status, kind, content = answer
    headers = [("Content-Type", kind), ("Content-Length", str(len(content))), *_HEADERS]
    start(f"{status.value} {status.phrase}", headers)
    return [content] if with_content else []
