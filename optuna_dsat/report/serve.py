"""Starts optuna-dashboard inside this process: no storage URL, hence no password, on any command line."""

from __future__ import annotations

from collections.abc import Callable
from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from optuna.artifacts import FileSystemArtifactStore
from optuna.storages import BaseStorage

from optuna_dsat.errors import UsageError

__all__ = ["serve"]


class _Server(ThreadingMixIn, WSGIServer):
    """One thread a request, so that a slow page holds up no other; none outlives the process."""

    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    """Does not print a line for every request."""

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


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
        storage: What to show.
        host: Address to listen on.
        port: Port to listen on; 0 for any free one.
        artifacts: Where the artifacts are.
        on_ready: Called with the port once requests are taken.

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
