"""Which address of a node the others reach; names of nodes are never resolved, since they often mean nothing there."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

__all__ = ["Doorbell", "addresses", "free_port", "interface_of", "machine_id", "reached"]

_REACH_S = 3.0
"""Longest wait for an address to answer."""


def machine_id() -> str:
    """Return what tells machines apart, and network namespaces of one: equal ones share their loopback address."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}:{Path('/proc/self/ns/net').readlink()}"
    return socket.gethostname()


def addresses() -> list[tuple[str, str]]:
    """Return (interface, IPv4 address) of this machine, without those that only it reaches."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found = [
        (name, one.address)
        for name, all_ in psutil.net_if_addrs().items()
        for one in all_
        if one.family == socket.AF_INET and name in up and not one.address.startswith("127.")
    ]
    return sorted(found, key=lambda pair: pair[0].startswith(("docker", "virbr", "br-", "veth")))


def interface_of(address: str) -> str:
    """Return the interface that has an address of this machine; empty if none has."""
    for name, all_ in psutil.net_if_addrs().items():
        if any(one.address == address for one in all_):
            return name
    return ""


def free_port(address: str) -> int:
    """Return a port of this machine that nobody uses now."""
    with socket.create_server((address, 0)) as server:
        return int(server.getsockname()[1])


class Doorbell:
    """Listens on addresses of this machine, so that others can try which of them they reach."""

    def __init__(self, own: Sequence[str]) -> None:
        self._stack = ExitStack()
        self.open: list[tuple[str, int]] = []
        """(address, port) of each that is listened on."""
        for address in own:
            with suppress(OSError):
                server = self._stack.enter_context(socket.create_server((address, 0)))
                self.open.append((address, int(server.getsockname()[1])))

    def close(self) -> None:
        """Listen no longer."""
        self._stack.close()


def reached(doors: Sequence[tuple[str, int]]) -> list[tuple[str, str]]:
    """Return (address, own interface towards it) of each of another node's addresses that answers from here."""
    found = []
    for address, port in doors:
        with suppress(OSError), socket.create_connection((address, port), timeout=_REACH_S) as connection:
            found.append((address, interface_of(connection.getsockname()[0])))
    return found
