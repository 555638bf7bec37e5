"""Stacks of silent ranks: detect whether and where all of them are stuck."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path

from optuna_dsat.runtime.agent.processes import ProcessKey
from optuna_dsat.runtime.files import open_regular
from optuna_dsat.runtime.user_code import STACK_SIGNAL, is_installed, stacks_path

_ANSWER_S = 3.0
"""Time for a rank to write its stacks, and for a node to send them."""
_MOST_BYTES = 2**20
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_COLLECTIVE = re.compile(r"/(torch/distributed/(?!run|launch|elastic)|deepspeed/comm/|deepspeed/runtime/zero/parti)")


class StackWatch:
    """Takes two stacks of every rank during a silence, half a limit apart."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._asked_at: float | None = None
        self._offsets: dict[int, int] = {}
        self._earlier: Mapping[int, str] = {}
        self._silent_since = 0.0

    def stand_still(
        self, now: float, *, silent_since: float, limit_s: float, ask: Callable[[], Collection[int]]
    ) -> bool:
        """Return whether the ranks have been silent for the limit, with equal stacks in the middle and at the end.

        ``ask`` asks the ranks for their stacks and returns all ranks, also ranks that cannot be asked and do not
        answer.
        """
        if silent_since != self._silent_since:
            self._silent_since, self._asked_at, self._earlier = silent_since, None, {}
        if now - silent_since < limit_s / 2:
            return False
        if self._asked_at is None:
            self._ask(now, ask)
            return False
        if not self._earlier:
            if now - self._asked_at >= limit_s / 2:
                self._earlier = self.taken()
                self._ask(now, ask)
            return False
        if now - self._asked_at < _ANSWER_S:
            return False
        later = self.taken()
        if len(later) == len(self._offsets) and later == self._earlier:
            return True
        self._earlier = {}  # a rank makes progress: check again after another half of the limit
        return False

    def latest(self) -> dict[int, str]:
        """Return rank -> its latest stacks, for the ranks that answered in this silence."""
        return {**self._earlier, **self.taken()}

    def taken(self) -> dict[int, str]:
        """Return rank -> stacks written after the last request, for the ranks that answered."""
        result = {}
        for rank, offset in self._offsets.items():
            with suppress(OSError), open_regular(stacks_path(self._log_dir, rank)) as file:
                file.seek(offset)
                if text := file.read(_MOST_BYTES).decode("utf-8", errors="replace"):
                    result[rank] = text
        return result

    def _ask(self, now: float, ask: Callable[[], Collection[int]]) -> None:
        sizes: dict[Path, int] = {}
        for path in self._log_dir.glob(stacks_path(self._log_dir, "*").name):
            with suppress(OSError):
                sizes[path] = path.stat().st_size
        self._asked_at = now
        self._offsets = {rank: sizes.get(stacks_path(self._log_dir, rank), 0) for rank in ask()}


def request_stacks(log_dir: Path, ranks: Mapping[int, ProcessKey]) -> None:
    """Have the ranks of this machine that can write their stacks."""
    for rank, key in ranks.items():
        # Without its file, a rank has no handler and the signal would end it.
        if key.alive and stacks_path(log_dir, rank).exists():
            with suppress(OSError):
                os.kill(key.pid, STACK_SIGNAL)


def describe_stacks(stacks: Mapping[int, str]) -> str:
    """Describe the position of each rank: line of the script, and collective in which it waits; empty if unknown."""
    return "; ".join(f"rank {rank} {place}" for rank, text in sorted(stacks.items()) if (place := _place(text)))


def _place(text: str) -> str:
    threads = [_FRAME.findall(thread) for thread in text.split("\n\n")]
    frames = next((thread for thread in threads if any(_is_script(file) for file, _, _ in thread)), [])
    script = next(((file, line) for file, line, _ in frames if _is_script(file)), None)
    if script is None:
        return ""
    where = f"at line {script[1]} of {Path(script[0]).name}"
    collective = [
        name for file, _, name in frames if _COLLECTIVE.search(file) and name not in ("wrapper", "log_wrapper")
    ]
    return f"waits in {collective[0]} {where}" if collective else f"is in {frames[0][2]} {where}"


def _is_script(file: str) -> bool:
    return not is_installed(file) and "/optuna_dsat/" not in file and not file.startswith("<")
