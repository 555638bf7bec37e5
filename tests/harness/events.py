"""Events and reports of launches, with every field filled in."""

from __future__ import annotations

from typing import Any

from optuna_dsat.launch.protocol import LaunchReport
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.events import EngineReady, StepMeasured


def step_of(rank: int = 0, step: int = 3, latency_s: float = 0.5, samples: int = 8, **changes: Any) -> StepMeasured:
    values: dict[str, Any] = {
        "rank": rank,
        "time": 0.0,
        "step": step,
        "latency_s": latency_s,
        "forward_s": 0.1,
        "backward_s": 0.2,
        "step_s": 0.05,
        "samples": samples,
        "observed_micro_batch": samples,
        "loss": 2.0,
        "peak_allocated_bytes": 100,
        "peak_reserved_bytes": 200,
        "rss_bytes": 300,
    }
    return StepMeasured(**{**values, **changes})


def engine(world_size: int = 2, **changes: Any) -> EngineReady:
    values: dict[str, Any] = {
        "rank": 0,
        "time": 0.0,
        "zero_stage": 2,
        "train_batch_size": 8 * world_size,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 1,
        "data_parallel_size": world_size,
        "pipeline": False,
        "device": "cpu",
    }
    return EngineReady(**{**values, **changes})


def report_of(**changes: Any) -> LaunchReport:
    values: dict[str, Any] = {
        "launch_id": "trial-0000",
        "outcome": Outcome.OUT_OF_MEMORY,
        "message": "rank 0: out of memory",
        "exit_code": 1,
        "error_excerpt": "",
        "missing_bytes": 5 * 2**30,
        "log_path": "",
        "command": ("torchrun", "train.py"),
        "host": "node",
        "devices": (0, 1),
        "pids": (11, 12),
        "started_at": 1000.5,
        "startup_s": 1.5,
        "measured_s": 0.0,
        "exit_s": 0.25,
    }
    return LaunchReport(**{**values, **changes})
