"""Find an address of a node that others can reach. Host names are never resolved: nodes often cannot resolve them."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

__all__ = ["Doorbell", "addresses", "free_port", "interface_of", "machine_id", "reached"]

_REACH_S = 3.0
"""Longest wait for a connection."""


def machine_id() -> str:
    """Return an ID of this machine and its network namespace; equal IDs share a loopback address."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}:{Path('/proc/self/ns/net').readlink()}"
    return socket.gethostname()


def addresses() -> list[tuple[str, str]]:
    """Return (interface, IPv4 address) pairs of this machine, without loopback addresses."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    result = [
        (name, address.address)
        for name, all_ in psutil.net_if_addrs().items()
        for address in all_
        if address.family == socket.AF_INET and name in up and not address.address.startswith("127.")
    ]
    return sorted(result, key=lambda pair: pair[0].startswith(("docker", "virbr", "br-", "veth")))


def interface_of(address: str) -> str:
    """Return the interface with this address; empty if there is none."""
    for name, all_ in psutil.net_if_addrs().items():
        if any(item.address == address for item in all_):
            return name
    return ""


def free_port(address: str) -> int:
    """Return an unused port of this machine."""
    with socket.create_server((address, 0)) as server:
        return int(server.getsockname()[1])


class Doorbell:
    """Listens on addresses of this machine, so that other nodes can test whether they reach them."""

    def __init__(self, own: Sequence[str]) -> None:
        self._stack = ExitStack()
        self.open: list[tuple[str, int]] = []
        """(address, port) of each listening socket."""
        for address in own:
            with suppress(OSError):
                server = self._stack.enter_context(socket.create_server((address, 0)))
                self.open.append((address, int(server.getsockname()[1])))

    def close(self) -> None:
        """Stop listening."""
        self._stack.close()


def reached(doors: Sequence[tuple[str, int]]) -> list[tuple[str, str]]:
    """Return (address, local interface) for each of another node's addresses that accepts a connection."""
    result = []
    for address, port in doors:
        with suppress(OSError), socket.create_connection((address, port), timeout=_REACH_S) as connection:
            result.append((address, interface_of(connection.getsockname()[0])))
    return result
