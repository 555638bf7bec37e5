"""Roles of ranks under model parallelism: sharing data, building data loaders, reporting metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from optuna_dsat.integrations.deepspeed_trial.distributed import DistributedContext
from optuna_dsat.runtime.measure.engine import is_pipeline

__all__ = ["ModelParallelUnit", "make_data_parallel_mpu", "make_deepspeed_mpu", "model_parallel_unit"]


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
        object.__setattr__(self, "data_parallel_rank", data_parallel_rank)
        object.__setattr__(self, "data_parallel_world_size", data_parallel_world_size)
        object.__setattr__(self, "should_report_metrics", bool(should_report_metrics))
        object.__setattr__(self, "should_build_data_loader", bool(given[0]))


def make_data_parallel_mpu(distributed: DistributedContext) -> ModelParallelUnit:
    """Return the role of a rank that holds a full copy of the model."""
    return ModelParallelUnit(
        distributed.get_rank(), distributed.get_size(), should_report_metrics=True, should_build_data_loader=True
    )


def make_deepspeed_mpu(grid: Any) -> ModelParallelUnit:
    """Return the role of a rank in a pipeline: the first and last stages read data, the last reports metrics.

    Args:
        grid: ``engine.mpu`` of a pipeline engine, a ``PipelineParallelGrid``.
    """
    stage, last = grid.get_pipe_parallel_rank(), grid.get_pipe_parallel_world_size() - 1
    # With tensor parallelism within stages, all ranks of a slice read the same data.
    first_of_slice = grid.get_slice_parallel_rank() == 0
    return ModelParallelUnit(
        grid.get_data_parallel_rank(),
        grid.get_data_parallel_world_size(),
        should_report_metrics=stage == last and first_of_slice,
        should_build_data_loader=stage in (0, last),
    )


def model_parallel_unit(engine: Any, *, rank: int, world_size: int) -> ModelParallelUnit:
    """Return this rank's role, derived from an engine.

    Every rank reads its own data and reports metrics, with two exceptions. In a pipeline, the first and last stages
    read data and the last reports. With an ``mpu`` passed to ``deepspeed.initialize``, the first rank of each
    model-parallel group reports.

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
    if int(engine.dp_world_size) != world_size:
        raise ValueError(
            f"The engine trains {engine.dp_world_size} copies of the model on {world_size} ranks, and does not say "
            "which ranks share data: call context.set_mpu(ModelParallelUnit(...)) before wrap_model_engine."
        )
    return ModelParallelUnit(rank, world_size, should_report_metrics=True, should_build_data_loader=True)
