"""Whether the control service of a Ray cluster (GCS) lives.

Nothing of Ray can be asked for that: its calls wait without a limit for a service that is gone, and what waits so
cannot be ended. The service speaks gRPC, so it answers a greeting of HTTP/2 (RFC 9113, 3.4).
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

__all__ = ["ControlWatch", "control_address", "greet"]

_SILENT_S = 30.0
"""Time without an answer after which it counts as gone. Actors go on without it, but after 60 s Ray ends the process of
a driver, in the middle of whatever it does (``gcs_rpc_server_reconnect_timeout_s``)."""
_LOOK_S = 3.0
"""Time between two greetings."""
_ANSWER_S = 3.0
"""Longest wait for an answer."""
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""Connection preface of a client, with an empty SETTINGS frame."""


class ControlWatch:
    """Watches a control service, in a thread of its own.

    Args:
        address: ``HOST:PORT``.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._answered_at = time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ray control", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> str:
        """That it is gone, in words; empty as long as it answers."""
        silent = time.monotonic() - self._answered_at > _SILENT_S
        return f"Ray's control service (GCS) has given no answer for {_SILENT_S:g} s" if silent else ""

    def close(self) -> None:
        """Watch no longer."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_S):
            with suppress(OSError):
                greet(self._address)
                self._answered_at = time.monotonic()


def control_address() -> str:
    """Return the address of the control service of the cluster that this process is a driver of."""
    import ray

    return str(ray.get_runtime_context().gcs_address)


def greet(address: str) -> None:
    """Wait a moment for a control service to answer; one that wants TLS answers by an end.

    Raises:
        OSError: If it does not.
        ValueError: If that is no address.
    """
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S)
    with connection, suppress(ConnectionError):
        connection.sendall(_GREETING)
        connection.recv(1)
