"""Queues that a script's threads and processes fill: no counted step has a batch that was read before it."""

from __future__ import annotations

import multiprocessing
import multiprocessing.queues
import queue
import sys
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from optuna_dsat.runtime.adapt import queues
from optuna_dsat.runtime.adapt.queues import QUEUE_MODULES, ReadAheadQueues


@pytest.fixture(params=[queue.Queue, multiprocessing.Queue], ids=["thread", "process"])
def batches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a queue, read once before the first step."""
    made = ReadAheadQueues()
    for name in QUEUE_MODULES:
        queue_class = sys.modules[name].Queue
        monkeypatch.setattr(queue_class, "get", queue_class.get)
        made.watch(queue_class)
    result = request.param()
    result.put(torch.zeros(600).numpy())
    assert result.get()[0] == 0
    made.hold_back()
    return result


def put(batches: Any, *items: Any) -> None:
    for item in items:
        batches.put(item if isinstance(item, str) else torch.full((600,), item).numpy())
    while items and batches.empty():
        time.sleep(0.01)
    time.sleep(0.1)  # a thread feeds the pipe


def numbers(items: Sequence[Any]) -> list[Any]:
    return [item if isinstance(item, str) else int(item[0]) for item in items]


@pytest.mark.parametrize(
    ("waiting", "seen"),
    [([*range(40)], [39, 50]), ([1, "end"], ["end", 50]), (["a", "b"], ["a", "b"])],
    ids=["more batches than a pipe has pages", "the end of the data", "no batches"],
)
def test_what_was_read_before_the_first_step_is_not_what_steps_are_measured_with(
    batches: Any, waiting: Sequence[Any], seen: Sequence[Any]
) -> None:
    """A slow reader with a deep queue had 14.9 times the speed of the user's config, but reads twice as fast only."""
    put(batches, *waiting)
    result = [batches.get()]
    put(batches, 50)
    assert numbers([*result, batches.get()]) == seen


def test_a_script_that_counts_its_batches_gets_them_all(batches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with rollouts: so many are asked for, and so many waited for."""
    monkeypatch.setattr(queues, "_PATIENCE_S", 0.5)
    put(batches, 1, 2, 3, 4)
    assert numbers([batches.get()]) == [4]
    began = time.monotonic()
    with pytest.raises(queue.Empty):
        batches.get(timeout=0.1)
    with pytest.raises(queue.Empty):
        batches.get(block=False)
    assert numbers([batches.get() for _ in range(3)]) == [1, 2, 3]
    assert 0.4 < time.monotonic() - began < 5
    put(batches, 5)
    assert numbers([batches.get()]) == [5]
    with pytest.raises(queue.Empty):
        batches.get(timeout=0.01)
