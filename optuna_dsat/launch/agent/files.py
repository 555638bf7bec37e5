"""Messages between a head and its agents, and the files of a launch that a node forwards to the head.

An engine may join the output of many agents into a single stream, and keep only short lines whole. A message is
therefore written as lines of at most ``_PIECE`` bytes: ``NODE+piece``, and ``NODE.piece`` for the last line.

Events and logs are forwarded as they grow; also if node and head share a file system, since network file systems show
changes late. What trackers write is removed with the node's files.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from optuna_dsat.launch.event_log import START_BYTES, GrowingFile, LogLimit, dropped_in_words
from optuna_dsat.launch.run_directory import RunDirectory
from optuna_dsat.runtime.user_code import stacks_path

HEARD_S = 25.0
"""Silence of the head after which an agent ends all its launches and exits."""
_PIECE = 960
"""Message bytes per line: SLURM forwards lines of up to 1,024 bytes whole."""


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


_MOST_AT_ONCE = 2**18
"""Maximum bytes of a file forwarded at a time."""
_MOST_BEHIND = 8 * 2**20
"""Maximum unsent bytes of a log, before a part is skipped."""


class LaunchFiles:
    """Event files and logs of the ranks on a node, and the log of its torchrun."""

    def __init__(self, directory: RunDirectory, *, ranks: Sequence[int], node: int) -> None:
        self._events = {rank: GrowingFile(directory.events(rank), most_bytes=_MOST_AT_ONCE) for rank in ranks}
        logs = {path.name: path for rank in ranks for path in (directory.stdout(rank), directory.stderr(rank))}
        log = directory.agent_log
        logs |= {path.name: path for path in (stacks_path(directory.log_dir, rank) for rank in ranks)}
        logs[log.name if node == 0 else f"{log.stem}.node{node}{log.suffix}"] = log
        self._logs = {name: GrowingFile(path, most_bytes=_MOST_AT_ONCE) for name, path in logs.items()}
        self._limit = LogLimit(logs.values())

    def event_lines(self) -> Iterator[tuple[int, list[str]]]:
        """Yield (rank, lines) for each rank that wrote events since the last call."""
        for rank, file in self._events.items():
            if lines := [line.decode("utf-8", errors="replace") for line in file.read_lines()]:
                yield rank, lines

    def log_texts(self, *, last: bool = False) -> Iterator[tuple[str, str]]:
        """Yield (file name, text) for each log that grew since the last call; text written too fast is skipped."""
        for name, file in self._logs.items():
            behind = _MOST_AT_ONCE if last else _MOST_BEHIND
            skipped = file.skip_to(behind) if file.offset >= START_BYTES or last else 0
            line = f"\n{dropped_in_words(skipped)}\n" if skipped else ""
            if data := file.read():
                yield name, line + data.decode("utf-8", errors="replace")
        self._limit.check(time.monotonic())


def append_events(directory: RunDirectory, message: Mapping[str, Any], *, ahead_s: float) -> None:
    """Append a rank's lines to its event file, with times converted to the head's clock."""
    lines = [str(line) for line in message["lines"]]
    if ahead_s:
        lines = [_moved(line, by_s=-ahead_s) for line in lines]
    with directory.events(int(message["rank"])).open("a", encoding="utf-8") as file:
        file.write("".join(f"{line}\n" for line in lines))


def _moved(line: str, *, by_s: float) -> str:
    with suppress(ValueError, TypeError, KeyError):
        record = json.loads(line)
        record["time"] = record["time"] + by_s
        return json.dumps(record)
    return line


def append_log(directory: RunDirectory, message: Mapping[str, Any]) -> None:
    """Append to a log."""
    with (directory.log_dir / Path(message["file"]).name).open("a", encoding="utf-8") as file:
        file.write(message["text"])
