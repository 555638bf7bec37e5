"""Rank and size of the process group, and exchange of objects between ranks, with Determined's method names."""

from __future__ import annotations

from typing import Any

import torch.distributed

from optuna_dsat.runtime.rank import World

__all__ = ["DistributedContext"]


class DistributedContext:
    """Rank and size of the process group; gathers and broadcasts picklable objects.

    A launch runs on a single machine, so the ``_local`` variants reach the same ranks as the others. Every rank must
    call collective methods.

    Args:
        world: Rank and size, read from the environment.
    """

    def __init__(self, world: World) -> None:
        self.rank, self.size = world.rank, world.size
        self.local_rank, self.local_size = world.local_rank, world.local_size
        self.cross_rank, self.cross_size = world.rank // world.local_size, max(1, world.size // world.local_size)

    def get_rank(self) -> int:
        """Return the global rank, from 0."""
        return self.rank

    def get_size(self) -> int:
        """Return the number of ranks."""
        return self.size

    def get_local_rank(self) -> int:
        """Return the rank on this host, from 0."""
        return self.local_rank

    def get_local_size(self) -> int:
        """Return the number of ranks on this host."""
        return self.local_size

    def get_num_agents(self) -> int:
        """Return the number of hosts."""
        return self.cross_size

    def allgather(self, stuff: Any) -> list[Any]:
        """Return the objects of all ranks, ordered by rank; collective."""
        if self.size == 1:
            return [stuff]
        values: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(values, stuff)
        return values

    def gather(self, stuff: Any) -> list[Any] | None:
        """Return the objects of all ranks on rank 0, ordered by rank, and None on the others; collective."""
        values = self.allgather(stuff)
        return values if self.rank == 0 else None

    def broadcast(self, stuff: Any) -> Any:
        """Return the object of rank 0; collective."""
        if self.size == 1:
            return stuff
        values = [stuff if self.rank == 0 else None]
        torch.distributed.broadcast_object_list(values, src=0)
        return values[0]

    def allgather_local(self, stuff: Any) -> list[Any]:
        """Return the objects of this host's ranks, ordered by rank; collective."""
        first = self.rank - self.local_rank
        return self.allgather(stuff)[first : first + self.local_size]

    def gather_local(self, stuff: Any) -> list[Any] | None:
        """Return the objects of this host's ranks on its first rank, and None on the others; collective."""
        values = self.allgather_local(stuff)
        return values if self.local_rank == 0 else None

    def broadcast_local(self, stuff: Any = None) -> Any:
        """Return the object of this host's first rank; collective."""
        return self.allgather_local(stuff if self.local_rank == 0 else None)[0]
