"""Runs optuna-dashboard in this process, so that no storage URL with its password appears on a command line."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from optuna.artifacts import FileSystemArtifactStore
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial

from optuna_dsat.errors import UnreadableStudyError, UsageError
from optuna_dsat.store import Store
from optuna_dsat.store.retrying_storage import RetryingStorage
from optuna_dsat.study.stored import read_stored

__all__ = ["ResultStorage", "serve"]


class ResultStorage(RetryingStorage):
    """A storage whose best trial of a study is the one that optuna-dsat hands over; no value is changed.

    Optuna takes the best value of the search, which rounds may have refuted.

    Args:
        store: The database.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(store.storage, database=store.url)
        self._store = store

    def get_best_trial(self, study_id: int) -> FrozenTrial:
        """Return the trial that is handed over; Optuna's own for a study that optuna-dsat did not make."""
        name = self.get_study_name_from_id(study_id)
        best = None
        if self._store.find_study(name) is not None:
            with suppress(UnreadableStudyError):  # one of a newer version: Optuna's own
                best = read_stored(self._store, name).best
        return super().get_best_trial(study_id) if best is None else best.trial


class _Server(ThreadingMixIn, WSGIServer):
    """Serves each request in a thread of its own, which ends with the process."""

    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    """Logs no requests."""

    def log_message(self, format: str, *args: object) -> None:
        """Discard the message."""


def serve(
    storage: BaseStorage,
    *,
    host: str,
    port: int,
    artifacts: FileSystemArtifactStore | None,
    on_ready: Callable[[int], None],
) -> None:
    """Serve optuna-dashboard until interrupted.

    Args:
        storage: The storage to show.
        host: Address to listen on.
        port: Port to listen on; 0 for any free one.
        artifacts: Where the artifacts are; None to offer none.
        on_ready: Called with the port once the server listens.

    Raises:
        UsageError: If the address cannot be listened on.
    """
    from optuna_dashboard import wsgi

    app = wsgi(storage, artifact_store=artifacts)
    try:
        server = make_server(host, port, app, server_class=_Server, handler_class=_Quiet)
    except OSError as error:
        raise UsageError(
            f"Cannot listen on {host}:{port}: {error.strerror or error}. Choose another --port or --host."
        ) from error
    with server:
        on_ready(server.server_port)
        server.serve_forever()
