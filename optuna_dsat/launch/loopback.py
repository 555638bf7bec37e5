"""Ports of a launch: on one machine they are open to this machine alone, else on the address of node 0 alone.

torch's store, which the agent makes for the rendezvous and the ranks share, listens on every address of the machine
whatever the endpoint says. Gloo and NCCL take the address that the host's name means.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

__all__ = ["LOOPBACK", "LOOPBACK_ENVIRONMENT", "store_on_loopback"]

LOOPBACK = "127.0.0.1"
LOOPBACK_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Variables of a launch that spans no second machine; what the user has set is kept."""


@contextlib.contextmanager
def store_on_loopback() -> Iterator[None]:
    """Within this context, torchrun makes its stores on sockets that are bound to the address that is asked for.

    Those are the rendezvous' own, and the one that it makes for the ranks: on the loopback address for a launch on one
    machine, else on that of node 0. A version of torch that makes them elsewhere is left as it is.
    """
    from torch.distributed.elastic.rendezvous import (
        c10d_rendezvous_backend,
        dynamic_rendezvous,
        static_tcp_rendezvous,
    )

    backend: Any = c10d_rendezvous_backend
    static: Any = static_tcp_rendezvous
    handler: Any = dynamic_rendezvous.DynamicRendezvousHandler
    own, for_ranks = getattr(backend, "TCPStore", None), getattr(handler, "_create_tcp_store_server", None)
    if own is None or for_ranks is None:
        yield
        return

    def store(host: str, port: int, *arguments: Any, is_master: bool = False, **options: Any) -> Any:
        if not is_master or host != LOOPBACK:
            return own(host, port, *arguments, is_master=is_master, **options)
        listening = socket.create_server((LOOPBACK, port))
        chosen = listening.getsockname()[1]
        return own(host, chosen, *arguments, is_master=True, master_listen_fd=listening.detach(), **options)

    def static_store(host: str, port: int, *arguments: Any, **options: Any) -> Any:
        is_master = arguments[1] if len(arguments) > 1 else options.get("is_master")
        if not is_master:
            return own(host, port, *arguments, **options)
        listening = socket.create_server((host, port))
        return own(host, port, *arguments, master_listen_fd=listening.detach(), **options)

    own_static = getattr(static, "TCPStore", None)
    backend.TCPStore = store
    static.TCPStore = static_store
    handler._create_tcp_store_server = lambda _self, host, port: store(host, port, is_master=True, multi_tenant=True)
    try:
        yield
    finally:
        backend.TCPStore, handler._create_tcp_store_server = own, for_ranks
        static.TCPStore = own_static
