"""Which ranks hold the same data, build the loaders and report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from optuna_dsat.runtime.meter import is_pipeline

__all__ = ["ModelParallelUnit", "unit_of"]


@dataclass(frozen=True, init=False)
class ModelParallelUnit:
    """What a rank is to its model: with the ranks of one data-parallel rank it holds one copy.

    Args:
        data_parallel_rank: Which share of the data is this rank's, from 0.
        data_parallel_world_size: Shares of the data.
        should_report_metrics: Whether what ``train_batch`` and ``evaluate_batch`` return here counts.
        should_build_data_loader: Whether this rank reads data. The name ``should_build_dataloader`` is taken too.

    Raises:
        ValueError: If the rank is none of the world's.
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


def unit_of(engine: Any, *, rank: int, world_size: int) -> ModelParallelUnit:
    """Return what an engine says of its model parallelism.

    Every rank has data of its own and reports, unless the model is a pipeline (first and last stage read data, the last
    reports) or ``deepspeed.initialize`` was given an ``mpu`` (the first rank of each model-parallel group reports).

    Raises:
        ValueError: If ranks share data in a way that the engine does not tell.
    """
    mpu: Any = engine.mpu
    if is_pipeline(engine):
        # With tensor parallelism inside the stages, each rank of a slice reads the same data.
        first_of_slice = mpu.get_slice_parallel_rank() == 0
        return ModelParallelUnit(
            mpu.get_data_parallel_rank(),
            mpu.get_data_parallel_world_size(),
            should_report_metrics=engine.is_last_stage() and first_of_slice,
            should_build_data_loader=engine.is_first_stage() or engine.is_last_stage(),
        )
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
