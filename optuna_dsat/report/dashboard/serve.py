"""Serves pages from this process, so that no storage URL with its password appears on a command line."""

from __future__ import annotations

import io
import socket
from collections.abc import Callable
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, BinaryIO
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from optuna.artifacts import FileSystemArtifactStore
from optuna.trial import FrozenTrial

from optuna_dsat.errors import UnreadableStudyError, UsageError
from optuna_dsat.report.dashboard.artifacts import log_without_secrets
from optuna_dsat.store import Store
from optuna_dsat.store.retry import RetryingStorage
from optuna_dsat.study.stored import read_stored

if TYPE_CHECKING:
    from wsgiref.types import WSGIApplication

_PATIENCE_S = 60
"""Seconds without a request after which a connection is closed."""


class ResultStorage(RetryingStorage):
    """A storage whose best trial of a study is optuna-dsat's result; values are unchanged.

    Optuna would choose the best value of the search, which rounds may have refuted.
    """

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


class ServedArtifacts(FileSystemArtifactStore):
    """A folder of artifacts whose logs are served without secrets printed by a script; files are unchanged."""

    def open_reader(self, artifact_id: str) -> BinaryIO:
        """Return the content of an artifact."""
        with super().open_reader(artifact_id) as file:
            return io.BytesIO(log_without_secrets(file.read()))


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


def optuna_app(store: Store, artifacts: FileSystemArtifactStore | None) -> WSGIApplication:
    """Return optuna-dashboard.

    ``artifacts`` is the store of the artifacts; None to offer none.
    """
    from optuna_dashboard import wsgi

    served = None if artifacts is None else ServedArtifacts(artifacts._base_path)
    app: WSGIApplication = wsgi(ResultStorage(store), artifact_store=served)
    return app


def serve(app: WSGIApplication, *, host: str, port: int, on_ready: Callable[[int], None]) -> None:
    """Serve an application until interrupted.

    Args:
        app: The application.
        host: Address to listen on.
        port: Port to listen on; 0 for any free port.
        on_ready: Called with the port once the server listens.

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
