"""Rank and size of the process group, exchange of objects between ranks, and the roles of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed

from optuna_dsat.runtime.measure.engine import is_pipeline
from optuna_dsat.runtime.rank import GroupRank


class DistributedContext:
    """Rank and size of the process group, and collective exchange of picklable objects by Determined's method names."""

    def __init__(self, group: GroupRank) -> None:
        self.rank, self.size = group.rank, group.world_size
        self.local_rank, self.local_size = group.local_rank, group.local_world_size
        self.cross_rank, self.cross_size = self.rank // self.local_size, max(1, self.size // self.local_size)

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
        return self.allgather(stuff if self.rank == 0 else None)[0]

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


@dataclass(frozen=True, init=False)
class ModelParallelUnit:
    """Role of a rank; ranks with the same data-parallel rank together hold a copy of the model.

    Args:
        data_parallel_rank: Index of this rank's shard of the data, from 0.
        data_parallel_world_size: Number of shards of the data.
        should_report_metrics: Whether to include the metrics returned by this rank's ``train_batch`` and
            ``evaluate_batch``.
        should_build_data_loader: Whether this rank reads data. The name ``should_build_dataloader`` is accepted too.

    Raises:
        ValueError: If the data-parallel rank is not below the data-parallel size.
        TypeError: If none or both of the two names are given.
    """

    data_parallel_rank: int
    data_parallel_world_size: int
    should_report_metrics: bool
    should_build_data_loader: bool

    def __init__(
        self,
        data_parallel_rank: int,
        data_parallel_world_size: int,
        should_report_metrics: bool,
        should_build_data_loader: bool | None = None,
        *,
        should_build_dataloader: bool | None = None,
    ) -> None:
        given = [flag for flag in (should_build_data_loader, should_build_dataloader) if flag is not None]
        if len(given) != 1:
            raise TypeError("ModelParallelUnit takes should_build_data_loader once.")
        if not 0 <= data_parallel_rank < data_parallel_world_size:
            raise ValueError(
                f"data_parallel_rank counts from 0 to data_parallel_world_size - 1; got {data_parallel_rank} of "
                f"{data_parallel_world_size}."
            )
        self.__dict__.update(
            data_parallel_rank=data_parallel_rank,
            data_parallel_world_size=data_parallel_world_size,
            should_report_metrics=bool(should_report_metrics),
            should_build_data_loader=bool(given[0]),
        )


def make_data_parallel_mpu(distributed: DistributedContext) -> ModelParallelUnit:
    """Return the role of a rank that holds a full copy of the model."""
    return ModelParallelUnit(distributed.rank, distributed.size, True, True)


def make_deepspeed_mpu(grid: Any) -> ModelParallelUnit:
    """Return the role of a rank in a pipeline: the first and last stages read data, the last reports metrics."""
    stage, last = grid.get_pipe_parallel_rank(), grid.get_pipe_parallel_world_size() - 1
    # With tensor parallelism within stages, all ranks of a slice read the same data.
    first_of_slice = grid.get_slice_parallel_rank() == 0
    return ModelParallelUnit(
        grid.get_data_parallel_rank(),
        grid.get_data_parallel_world_size(),
        should_report_metrics=stage == last and first_of_slice,
        should_build_data_loader=stage in (0, last),
    )


def model_parallel_unit(engine: Any, distributed: DistributedContext) -> ModelParallelUnit:
    """Return this rank's role, derived from an engine.

    Every rank reads its own data and reports metrics, with two exceptions: pipelines (``make_deepspeed_mpu``), and an
    ``mpu`` passed to ``deepspeed.initialize``, with which the first rank of each model-parallel group reports.

    Raises:
        ValueError: If ranks share data and the engine does not define how.
    """
    mpu: Any = engine.mpu
    if is_pipeline(engine):
        return make_deepspeed_mpu(mpu)
    if mpu is not None:
        return ModelParallelUnit(
            mpu.get_data_parallel_rank(),
            mpu.get_data_parallel_world_size(),
            should_report_metrics=mpu.get_model_parallel_rank() == 0,
            should_build_data_loader=True,
        )
    if int(engine.dp_world_size) != distributed.size:
        raise ValueError(
            f"The engine trains {engine.dp_world_size} copies of the model on {distributed.size} ranks, and does not "
            "say which ranks share data: call context.set_mpu(ModelParallelUnit(...)) before wrap_model_engine."
        )
    return make_data_parallel_mpu(distributed)
