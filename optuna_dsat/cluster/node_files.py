"""Files of one launch on a node, passed on to the head as they grow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from optuna_dsat.launch.event_log import LINE_BYTES
from optuna_dsat.launch.run_directory import RunDirectory

__all__ = ["GrowingFile", "LaunchFiles"]

_MOST_AT_ONCE = 2**18
"""Bytes of one file that are passed on in one look."""
_MOST_OF_A_LOG = 8 * 2**20
"""Bytes of one log that are passed on at all."""


class GrowingFile:
    """Reads what is appended to a file.

    Args:
        path: The file; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sent_bytes = 0
        """Bytes returned so far."""
        self._partial = b""

    def read(self) -> bytes:
        """Return what was appended since the last call, up to a bound."""
        try:
            if self.path.stat().st_size <= self.sent_bytes:
                return b""
            with self.path.open("rb") as file:
                file.seek(self.sent_bytes)
                data = file.read(_MOST_AT_ONCE)
        except FileNotFoundError:
            return b""
        self.sent_bytes += len(data)
        return data

    def read_lines(self) -> list[bytes]:
        """Return the complete lines appended since the last call, without their ends.

        One that does not end is returned once it is too long for an event: the head ends such a launch.
        """
        *lines, self._partial = (self._partial + self.read()).split(b"\n")
        if len(self._partial) > LINE_BYTES:
            lines.append(self._partial)
            self._partial = b""
        return lines


class LaunchFiles:
    """Event files and logs of the ranks of one node, and the log of its torchrun.

    Args:
        directory: The run directory on the node.
        ranks: Global numbers of the node's ranks.
        node: Number of the node.
    """

    def __init__(self, directory: RunDirectory, *, ranks: Sequence[int], node: int) -> None:
        self._events = {rank: GrowingFile(directory.events(rank)) for rank in ranks}
        logs = {path.name: path for rank in ranks for path in (directory.stdout(rank), directory.stderr(rank))}
        own = directory.agent_log
        logs[own.name if node == 0 else f"{own.stem}.node{node}{own.suffix}"] = own
        self._logs = {name: GrowingFile(path) for name, path in logs.items()}

    def event_lines(self) -> Iterator[tuple[int, list[str]]]:
        """Yield (rank, lines) for each rank that wrote events since the last call."""
        for rank, file in self._events.items():
            if lines := [line.decode("utf-8", errors="replace") for line in file.read_lines()]:
                yield rank, lines

    def log_texts(self) -> Iterator[tuple[str, str]]:
        """Yield (name of the file, text) for each log that grew since the last call; very long logs end early."""
        for name, file in self._logs.items():
            if file.sent_bytes < _MOST_OF_A_LOG and (data := file.read()):
                yield name, data.decode("utf-8", errors="replace")
