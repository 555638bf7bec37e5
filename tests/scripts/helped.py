"""Trains on batches that processes of its own make, those of ``HELPERS`` in turn: ``helped.py CONFIG``.

Each batch tells by which process it was made, and the step is made only if that was not this one.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

Batch = tuple[Tensor, Tensor]


class Numbers(Dataset[Batch]):
    """Random numbers, with the number of the process that made them."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Batch:
        return torch.randn(16), torch.tensor(os.getpid())


def loaded(context: str, *, workers: int = 1, persistent: bool = False) -> Iterator[Batch]:
    """Yield batches of a loader's workers, for several epochs."""
    loader = DataLoader(
        Numbers(),
        batch_size=4,
        num_workers=workers,
        multiprocessing_context=context,
        persistent_workers=persistent,
    )
    while True:
        yield from loader


def make(_: int) -> Batch:
    """Return one batch."""
    numbers, makers = zip(*(Numbers()[0] for _ in range(4)), strict=True)
    return torch.stack(numbers), torch.stack(makers)


def feed(queue: torch.multiprocessing.Queue[Batch]) -> None:
    """Put batches until this process is ended."""
    while True:
        queue.put(make(0))


def queued(context: str) -> Iterator[Batch]:
    """Yield what a process of one's own puts into a queue."""
    multiprocessing: Any = torch.multiprocessing.get_context(context)
    queue = multiprocessing.Queue(2)
    multiprocessing.Process(target=feed, args=(queue,), daemon=True).start()
    while True:
        yield queue.get(timeout=60)


def pooled(context: str) -> Iterator[Batch]:
    """Yield what a pool of processes returns."""
    with torch.multiprocessing.get_context(context).Pool(2) as pool:
        while True:
            yield from pool.imap(make, range(8))


def piped() -> Iterator[Batch]:
    """Yield what forked children write into the last of many pipes; each must be whole in the child."""
    while True:
        pipes = [os.pipe() for _ in range(24)]
        if (pid := os.fork()) == 0:
            for _, end in pipes:
                os.write(end, str(os.getpid()).encode())
            os._exit(0)
        for end, other in pipes:
            os.close(other)
            assert os.read(end, 20) == str(pid).encode()
            os.close(end)
        os.waitpid(pid, 0)
        yield torch.randn(4, 16), torch.full((4,), pid)


HELPERS: dict[str, Callable[[], Iterator[Batch]]] = {
    "loader, forked": lambda: loaded("fork", workers=2),
    "loader, fork server": lambda: loaded("forkserver", persistent=True),
    "queue, spawned": lambda: queued("spawn"),
    "pool": lambda: pooled("fork"),
    "pipes": piped,
}


def main() -> None:
    helpers = [make_batches() for make_batches in HELPERS.values()]
    for helper in helpers:
        next(helper)  # before DeepSpeed opens anything
    model = torch.nn.Linear(16, 1)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=sys.argv[1])
    for helper in itertools.islice(itertools.cycle(helpers), 100):
        numbers, makers = next(helper)
        assert os.getpid() not in makers.tolist()
        loss = engine(numbers).square().mean()
        engine.backward(loss)
        engine.step()


if __name__ == "__main__":
    main()
