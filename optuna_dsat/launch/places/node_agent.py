"""Run the agent of a node, connected by its standard input and output.

Started as ``python -m optuna_dsat.launch.places.node_agent [NODE NAME]``.

Commands are lines of JSON on standard input; commands to other nodes (``to``) are ignored. Messages are written to
standard output (``launch/agent/files.py``). The agent exits at the end of its input.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from optuna_dsat.launch.agent.agent import NodeAgent
from optuna_dsat.launch.agent.files import decode_line, to_lines
from optuna_dsat.signals import ENDING

_PAUSE_S = 0.02
"""Interval between checks of the launches."""
_MOST_UNSENT = 2**22
"""Bytes waiting for the head above which launches are not read any further."""


def _number_and_name(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[int, str]:
    """Return this node's number in its allocation and its name, from the command line or from SLURM."""
    if argv:
        return int(argv[0]), argv[1]
    return int(environ.get("SLURM_PROCID", "0")), environ.get("SLURMD_NODENAME") or socket.gethostname()


def _serve(agent: NodeAgent, node: int, *, news_to: int, signals: Mapping[int, object]) -> None:
    """Forward commands and messages until the agent or its head leaves, or a signal arrives. Writes never block.

    ``signals`` are the received signals. They are checked between commands, so that no command is interrupted.

    Raises:
        BrokenPipeError: If the head has stopped reading.
    """
    os.set_blocking(news_to, False)
    partial = unsent = b""
    while not agent.leaving and not signals:
        if select.select([0], [], [], _PAUSE_S)[0]:
            data = os.read(0, 1 << 20)
            if not data:
                return
            *lines, partial = (partial + data).split(b"\n")
            for order in filter(None, map(decode_line, lines)):
                if order.get("to") in (None, node):
                    agent.take(order)
        for message in agent.advance() if len(unsent) < _MOST_UNSENT else ():
            unsent += b"".join(to_lines(node, message))
        unsent = _written(news_to, unsent)


def _written(descriptor: int, data: bytes) -> bytes:
    """Write as much as the descriptor accepts; return the rest."""
    with suppress(BlockingIOError):
        while data:
            data = data[os.write(descriptor, data) :]
    return data


def _told_to_end() -> Mapping[int, object]:
    """Install handlers for the signals that end this process; return a mapping filled with the first of each.

    The handler is in C: a burst of signals would interrupt a Python function until the recursion limit.
    """
    parts: dict[int, object] = {}
    for number in ENDING:
        signal.signal(number, parts.setdefault)
    return parts


def main() -> int:
    """Serve a head; return the exit code."""
    parts = _told_to_end()
    news_to = os.dup(1)
    os.dup2(2, 1)  # output printed by imports must not reach the message channel
    node, name = _number_and_name(sys.argv[1:], os.environ)
    agent = NodeAgent(node=node, name=name)
    try:
        with suppress(BrokenPipeError):
            _serve(agent, node, news_to=news_to, signals=parts)
    finally:
        for number in ENDING:  # SLURM sends several, and Python restores the default while it exits
            signal.signal(number, signal.SIG_IGN)
        agent.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
