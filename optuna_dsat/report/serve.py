"""Runs optuna-dashboard in this process, so that no storage URL with its password appears on a command line."""

from __future__ import annotations

from collections.abc import Callable
from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from optuna.artifacts import FileSystemArtifactStore
from optuna.storages import BaseStorage

from optuna_dsat.errors import UsageError

__all__ = ["serve"]


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
