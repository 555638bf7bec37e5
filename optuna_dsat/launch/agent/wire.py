"""Wire format between heads and agents: launch requests as JSON, and long lines in pieces.

An engine may join the output of many agents into a single stream, and keep only short lines whole. A message is
therefore written as lines of at most ``_PIECE`` bytes: ``NODE+piece``, and ``NODE.piece`` for the last line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from optuna_dsat.launch.protocol import LaunchRequest, ScriptCommand

_PIECE = 960
"""Message bytes per line: SLURM forwards lines of up to 1,024 bytes whole."""


def request_to_json(request: LaunchRequest) -> dict[str, Any]:
    """Return the input of ``request_from_json``."""
    return asdict(request)


def request_from_json(record: Mapping[str, Any]) -> LaunchRequest:
    """Build from the output of ``request_to_json``."""
    command = dict(record["command"])
    command["args"] = tuple(command["args"])
    writable = tuple(record.get("writable", ()))
    return LaunchRequest(**{**record, "writable": writable, "command": ScriptCommand(**command)})


def to_lines(node: int, message: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield the lines of a message from a node."""
    text = json.dumps(message).encode("ascii")
    for begin in range(0, len(text), _PIECE):
        piece = text[begin : begin + _PIECE]
        yield b"%d%s%s\n" % (node, b"." if begin + _PIECE >= len(text) else b"+", piece)


def decode_line(line: bytes) -> Mapping[str, Any] | None:
    """Return the JSON object in a line, or None."""
    try:
        result = json.loads(line)
    except ValueError:
        return None
    return result if isinstance(result, dict) else None


class Joiner:
    """Reassembles messages from the lines of all nodes; other lines are kept for the user."""

    def __init__(self) -> None:
        self.strays: list[str] = []
        """The last lines that are not messages, such as output of a node's shell."""
        self._partial = b""
        self._pieces: dict[int, list[bytes]] = {}

    def feed(self, data: bytes) -> list[tuple[int, Mapping[str, Any]]]:
        """Return the (node, message) pairs that ``data`` completes."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        result = []
        for line in lines:
            place = next((index for index, byte in enumerate(line[:12]) if byte in b"+."), -1)
            if place < 1 or not line[:place].isdigit():
                self._stray(line)
                continue
            node = int(line[:place])
            self._pieces.setdefault(node, []).append(line[place + 1 :])
            if line[place : place + 1] == b".":
                message = decode_line(b"".join(self._pieces.pop(node)))
                if message is None:
                    self._stray(line)
                else:
                    result.append((node, message))
        return result

    def _stray(self, line: bytes) -> None:
        self.strays = [*self.strays, line.decode("utf-8", errors="replace").strip()][-20:]


HEARD_S = 25.0
"""Silence of the head after which an agent ends all its launches and exits."""
