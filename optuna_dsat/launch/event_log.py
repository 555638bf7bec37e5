"""The events of a launch, read from the files of its ranks."""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path

from optuna_dsat.launch.measurement import LEAST_VARIATION
from optuna_dsat.launch.run_directory import RunDirectory
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.events import (
    STEPS_SKIPPED,
    EngineReady,
    Event,
    RankFailed,
    RankFinished,
    RankStarted,
    StepMeasured,
    decode_event,
)
from optuna_dsat.runtime.files import open_regular

_EVENT_WORDS = {
    RankStarted: "the start of the script",
    EngineReady: "the end of deepspeed.initialize",
    StepMeasured: "a step",
}
"""Type of event -> its description, for events after which a launch may stall."""


_CHUNK_BYTES = 2**20
"""Maximum bytes per read."""


class GrowingFile:
    """Reads new content of a growing file, at most ``most_bytes`` at once.

    Nothing is read while it does not exist or is not a regular file: a script may have put something else in its place.
    """

    def __init__(self, path: Path, *, most_bytes: int = _CHUNK_BYTES) -> None:
        self.path = path
        self.offset = 0
        """Bytes returned or skipped so far."""
        self._most_bytes = most_bytes
        self._partial = b""

    def read(self) -> bytes:
        """Return the bytes appended since the last call, up to the bound."""
        try:
            if self.path.stat().st_size <= self.offset:
                return b""
            with open_regular(self.path) as file:
                file.seek(self.offset)
                data = file.read(self._most_bytes) or b""
        except OSError:
            return b""
        self.offset += len(data)
        return data

    def skip_to(self, behind_bytes: int) -> int:
        """Skip all but the last bytes of the file; return the number of bytes skipped."""
        with contextlib.suppress(FileNotFoundError):
            skipped = self.path.stat().st_size - behind_bytes - self.offset
            if skipped > 0:
                self.offset += skipped
                return skipped
        return 0

    def read_lines(self) -> list[bytes]:
        """Return the complete lines appended since the last call, up to the bound, without their ends."""
        *lines, self._partial = (self._partial + self.read()).split(b"\n")
        return lines


class EventTail:
    """Reads events as a rank appends them to its file; an incomplete line is kept for the next read.

    Lines without an event, as of a killed rank's last write, are skipped.
    """

    def __init__(self, path: Path) -> None:
        self._file = GrowingFile(path)

    def read(self) -> list[Event]:
        """Return the events appended since the last call."""
        result: list[Event] = []
        before = -1
        while before < self._file.offset:
            before = self._file.offset
            decoded = (decode_event(line.decode("utf-8", errors="replace")) for line in self._file.read_lines())
            result += [event for event in decoded if event is not None]
        return result


class EventLog:
    """Events of all ranks so far."""

    def __init__(self, directory: RunDirectory, *, slots: int, started: float) -> None:
        self.events: dict[int, list[Event]] = {}
        """Rank -> its events in the order written."""
        self.ends: dict[int, RankFailed | RankFinished] = {}
        """Rank -> record of its end, for the ranks with a record."""
        self._steps: list[StepMeasured] = []
        self.last_event = started
        """Time at which events were last read; the start before the first."""
        self.first_step: float | None = None
        """Time at which the end of a step was first read; None before."""
        self._tails = {rank: EventTail(directory.events(rank)) for rank in range(slots)}

    def read(self, now: float) -> list[Event]:
        """Return the new events of all ranks, ordered by time; events of a rank stay in written order."""
        dated: list[tuple[float, Event]] = []
        for rank, tail in self._tails.items():
            read = self._to_its_end(rank, [event for event in tail.read() if event.rank == rank])
            if read:
                self.events.setdefault(rank, []).extend(read)
                dated += zip(accumulate((event.time for event in read), max), read, strict=True)  # a clock is set back
        fresh = [event for _, event in sorted(dated, key=lambda item: item[0])]
        if fresh:
            self.last_event = now
            self._steps += [event for event in fresh if isinstance(event, StepMeasured)]
            if self.first_step is None and self._steps:
                self.first_step = now
        return fresh

    def _to_its_end(self, rank: int, events: Sequence[Event]) -> list[Event]:
        """Return a rank's new events up to the record of its end; later events of its script do not count."""
        result: list[Event] = []
        for event in events if rank not in self.ends else ():
            result.append(event)
            if isinstance(event, RankFailed | RankFinished):
                self.ends[rank] = event
                break
        return result

    def _all(self) -> list[Event]:
        return [event for events in self.events.values() for event in events]

    @property
    def micro_batches(self) -> set[int | None]:
        """Sizes of the largest batch of each step so far; None for a size that was not observed."""
        return {event.observed_micro_batch for event in self._steps}

    @property
    def inputs_change(self) -> bool:
        """Whether the script changes the inputs of a sample from step to step: they grow, or double in some step.

        As by a curriculum or for training at several resolutions, alike in all ranks. Inputs that are padded to their
        longest sample differ between ranks. In a single rank they vary by chance: only growth counts.
        """
        ranks: dict[int, list[float]] = {}
        for event in self._steps:
            if event.elements and event.samples:
                ranks.setdefault(event.rank, []).append(event.elements / event.samples)
        steps = list(zip(*ranks.values(), strict=False))  # the last one may not be known of every rank
        sizes = [max(step) for step in steps]
        if not sizes or any(min(step) < max(step) for step in steps):
            return False
        change = max(sizes) / min(sizes)
        return change > 1 + LEAST_VARIATION and (sizes == sorted(sizes) or (change >= 2 and len(ranks) > 1))

    @property
    def starts(self) -> list[RankStarted]:
        """Start records of the ranks."""
        return [event for event in self._all() if isinstance(event, RankStarted)]

    @property
    def done(self) -> set[int]:
        """Ranks that have completed all profile steps, or as many as possible."""
        return {
            rank
            for rank, end in self.ends.items()
            if isinstance(end, RankFinished) and end.reason in ("profile_done", STEPS_SKIPPED)
        }

    @property
    def has_trained(self) -> bool:
        """Whether any rank has completed a step."""
        return bool(self._steps)

    @property
    def longest_step_s(self) -> float | None:
        """Duration of the longest step so far; None before the first."""
        return max((step.latency_s for step in self._steps), default=None)

    @property
    def last_step(self) -> int:
        """Number of the last counted step of any rank; 0 before the first."""
        return max((step.number for step in self._steps), default=0)

    def has_failed_with(self, *outcomes: Outcome) -> bool:
        """Return whether the end of a rank is a failure with one of ``outcomes``."""
        return any(isinstance(end, RankFailed) and end.outcome in outcomes for end in self.ends.values())

    def progress_in_words(self, *, end_profile_step: int) -> str:
        """Describe how many steps were completed."""
        if not (steps := self._steps):
            return "no step was finished"
        last = max(steps, key=lambda event: event.step)
        skipped = last.skipped_before + last.skipped
        done = f"the last step was {last.step - skipped} of {end_profile_step}"
        return f"{done}, with {skipped} more that the loss scaler skipped" if skipped else done

    def last_event_in_words(self, now: float) -> str:
        """Describe the last event and its age."""
        words = "its start"
        if events := self._all():
            last = max(events, key=lambda event: event.time)
            words = f"{_EVENT_WORDS.get(type(last), last.kind)} (rank {last.rank})"
        return f"last seen: {words} {now - self.last_event:.0f} s ago"


# Limit on the size of a launch's logs: each keeps its beginning and its end.
#
# While the ranks write, the middle of a log is freed by a hole in the file, which changes no offsets of writers or
# readers. After the launch the hole is replaced by a line with its size. On file systems without holes
# (``fallocate``, man 2 fallocate), logs are only shortened after the launch.

START_BYTES = 2**20
"""Bytes kept of the start of a log."""
END_BYTES = 31 * 2**20
"""Bytes kept of its end. The two logs of a rank (standard output and error) keep 64 MiB in total."""
_INTERVAL_S = 1.0
_BLOCK_BYTES = 512
"""Unit of ``st_blocks`` (man 2 stat)."""
_KEEP_SIZE_AND_PUNCH_HOLE = 0x01 | 0x02
"""``FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE`` of ``linux/falloc.h``."""


def dropped_in_words(size: int) -> str:
    """Return the line that replaces ``size`` bytes of a log."""
    return f"optuna-dsat dropped {size} bytes here"


class LogLimit:
    """Limits logs to ``START_BYTES + END_BYTES``; links and files with several names, which a script made, stay."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = tuple(paths)
        self._checked_at = float("-inf")

    def check(self, now: float) -> None:
        """Free the middle of logs that are too long, at most once per second."""
        if now - self._checked_at < _INTERVAL_S:
            return
        self._checked_at = now
        for path in self._paths:
            with contextlib.suppress(OSError), _opened(path) as (log, state):
                if state.st_blocks * _BLOCK_BYTES > START_BYTES + END_BYTES:
                    _free_middle(log, state.st_size)

    def close(self) -> None:
        """Replace the middle of logs that are too long by a line; call it after their writers have ended."""
        for path in self._paths:
            with contextlib.suppress(OSError), _opened(path) as (log, state):
                if state.st_size > START_BYTES + END_BYTES:
                    _shorten(log, state.st_size)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[int, os.stat_result]]:
    """Open a log for reading and writing; ``OSError`` if it is not a regular file with a single name."""
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode) or state.st_nlink != 1:
            raise OSError(f"{path} is not a regular file with a single name")
        yield descriptor, state
    finally:
        os.close(descriptor)


def _free_middle(log: int, size: int) -> None:
    length = ctypes.c_int64(size - END_BYTES - START_BYTES)
    if length.value > 0:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.fallocate64(log, _KEEP_SIZE_AND_PUNCH_HOLE, ctypes.c_int64(START_BYTES), length)


def _shorten(log: int, size: int) -> None:
    dropped = size - START_BYTES - END_BYTES
    line = f"\n{dropped_in_words(dropped)}: a log keeps its first 1 MiB and its last 31 MiB.\n".encode()
    if dropped <= len(line):  # the copy below would never reach the end, which it would move ahead of itself
        return
    os.pwrite(log, line, START_BYTES)
    to, source = START_BYTES + len(line), size - END_BYTES
    while data := os.pread(log, 2**20, source):
        os.pwrite(log, data, to)
        to, source = to + len(data), source + len(data)
    os.ftruncate(log, to)
