"""Check that the control service of a Ray cluster (GCS) is alive.

Ray itself cannot be asked: its calls wait without limit for a service that is gone, and cannot be interrupted. The
service speaks gRPC, so it answers an HTTP/2 connection preface (RFC 9113, 3.4).
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

__all__ = ["ControlWatch", "control_address", "greet"]

_SILENT_S = 30.0
"""Time without an answer after which the service counts as gone. Actors continue without it, but after 60 s Ray ends
the driver process in the middle of its work (``gcs_rpc_server_reconnect_timeout_s``)."""
_LOOK_S = 3.0
"""Interval between greetings."""
_ANSWER_S = 3.0
"""Longest wait for an answer."""
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""HTTP/2 connection preface of a client, with an empty SETTINGS frame."""


class ControlWatch:
    """Watches a control service at ``HOST:PORT`` in a background thread."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._answered_at = time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ray control", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> str:
        """Message that the service is gone; empty while it answers."""
        silent = time.monotonic() - self._answered_at > _SILENT_S
        return f"Ray's control service (GCS) has given no answer for {_SILENT_S:g} s" if silent else ""

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_S):
            with suppress(OSError):
                greet(self._address)
                self._answered_at = time.monotonic()


def control_address() -> str:
    """Return the address of the control service of this driver's cluster."""
    import ray

    return str(ray.get_runtime_context().gcs_address)


def greet(address: str) -> None:
    """Wait up to ``_ANSWER_S`` for a control service to answer; a TLS service answers by closing the connection.

    Raises:
        OSError: If it does not answer.
        ValueError: If the address is invalid.
    """
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S)
    with connection, suppress(ConnectionError):
        connection.sendall(_GREETING)
        connection.recv(1)
