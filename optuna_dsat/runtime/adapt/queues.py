"""Batches that a script's own threads or processes have read ahead, in queues that its main thread reads.

They were read while the script started: steps with them would show the model's speed where the reader is slower. As a
script may count its batches, none is dropped: they are handed over once nothing else comes.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from optuna_dsat.runtime.imports import patch
from optuna_dsat.runtime.measure.inputs import tensors_of
from optuna_dsat.runtime.user_code import is_installed

QUEUE_MODULES = ("queue", "multiprocessing.queues")
"""Modules with a class ``Queue``."""
_PATIENCE_S = 2.0
"""Seconds without a new item after which items that are held back are handed over."""
_PIPE_S = 1.0
"""Time limit for an item that a thread is still writing to the pipe of a queue."""


@dataclass
class _Held:
    """Items of a queue that are held back, the oldest first."""

    items: deque[Any] = field(default_factory=deque)
    empty_since: float | None = None
    """Time since which the queue has been found empty, of ``time.monotonic``; None if its last item was new."""


class ReadAheadQueues:
    """Holds back the batches that wait in queues after the first step."""

    def __init__(self) -> None:
        self._queues = weakref.WeakSet[Any]()
        """Queues that the script's main thread has read."""
        self._unread = weakref.WeakSet[Any]()
        """Queues whose waiting batches are held back at their next use."""
        self._held = weakref.WeakKeyDictionary[Any, _Held]()

    def hold_back(self) -> None:
        """Hold back the batches in queues that the training has read."""
        self._unread = weakref.WeakSet(self._queues)

    def watch(self, queue_class: Any) -> None:
        """Make the main thread's ``get`` of a class of queues return the newest of the batches that wait."""

        @patch(queue_class, "get")
        def get(original: Any, queue: Any, block: bool = True, timeout: float | None = None) -> Any:
            is_main = threading.current_thread() is threading.main_thread()
            if not is_main or is_installed(sys._getframe(2).f_code.co_filename):
                return original(queue, block, timeout)  # a reader thread, or a library's queue
            item = self._next(original, queue, block, timeout)
            self._queues.add(queue)
            if queue in self._unread:
                self._unread.discard(queue)
                held = self._held.setdefault(queue, _Held()).items
                for _ in range(queue.qsize()):
                    if next(tensors_of(item), None) is None:  # the end of the data
                        break
                    try:
                        newer = original(queue, True, _PIPE_S)
                    except sys.modules["queue"].Empty:
                        break
                    held.append(item)
                    item = newer
            return item

    def _next(self, original: Any, queue: Any, block: bool, timeout: float | None) -> Any:
        """Return the next item, an item held back after ``_PATIENCE_S`` without any; raises ``queue.Empty``."""
        held = self._held.get(queue)
        if held is None or not held.items:
            return original(queue, block, timeout)
        begun = time.monotonic()
        since = begun if held.empty_since is None else held.empty_since
        patience = max(0.0, since + _PATIENCE_S - begun)
        try:
            item = original(queue, block, patience if timeout is None else min(timeout, patience))
        except sys.modules["queue"].Empty:
            held.empty_since = since
            if time.monotonic() < since + _PATIENCE_S:
                raise
            return held.items.popleft()
        held.empty_since = None
        return item
