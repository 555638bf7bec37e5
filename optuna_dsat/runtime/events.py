"""The events a rank leaves behind: the one vocabulary shared by training processes and the tuner.

Each rank appends JSON lines to its own file in the run directory, one event a line, flushed at once.
Durations are in seconds, sizes in bytes, times are Unix times. This module imports the standard library
alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar

__all__ = [
    "EngineReady",
    "Event",
    "ModulesImported",
    "ProfileMeasured",
    "RankFailed",
    "RankFinished",
    "RankStarted",
    "StepMeasured",
    "TrainerFound",
    "decode_event",
    "encode_event",
]


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base of all events."""

    kind: ClassVar[str]

    rank: int
    """Global rank that wrote the event."""
    time: float
    """Unix time in seconds."""


@dataclass(frozen=True, kw_only=True)
class RankStarted(Event):
    """The process of a rank runs; nothing heavy is imported yet."""

    kind: ClassVar[str] = "rank_started"

    local_rank: int
    world_size: int
    pid: int
    host: str
    forked: bool = False
    """Whether the process was forked with the heavy modules imported, rather than started."""


@dataclass(frozen=True, kw_only=True)
class TrainerFound(Event):
    """A trainer that keeps batch sizes of its own runs the script's training; they follow the launch's config."""

    kind: ClassVar[str] = "trainer_found"

    framework: str
    """``transformers`` or ``lightning``."""
    micro_batch: int | None
    """Samples per rank and forward pass as the script says, None where it was not seen."""
    gradient_accumulation_steps: int | None
    """As the script says, None where it was not seen."""
    options: Mapping[str, str]
    """Key of the DeepSpeed config -> option of the script's command line that sets the same; empty where there is none.
    """


@dataclass(frozen=True, kw_only=True)
class EngineReady(Event):
    """``deepspeed.initialize`` returned: what the engine says of itself."""

    kind: ClassVar[str] = "engine_ready"

    zero_stage: int
    train_batch_size: int
    train_micro_batch_size_per_gpu: int
    gradient_accumulation_steps: int
    data_parallel_size: int
    pipeline: bool
    """Whether the engine is a pipeline engine (``engine.train_batch()`` does a whole step)."""
    params: int
    """Parameters of the model (unpartitioned count); of this rank's stage under pipeline parallelism."""
    trainable_params: int
    initialize_s: float
    """Duration of ``deepspeed.initialize``."""
    device: str
    """``cuda`` or ``cpu``."""
    torch_version: str
    deepspeed_version: str
    config_differences: Mapping[str, list[Any]] = field(default_factory=dict)
    """Where the config that the script passed differs from the user's file, the overlay apart: dotted key -> [the
    script's value, the file's], None for a missing one. Empty where the script built the engine with a config
    that the runtime never saw.
    """
    spans: Mapping[str, list[float]] = field(default_factory=dict)
    """What the launch did before: ``imports`` (from the rank's start until DeepSpeed was imported),
    ``init_distributed``, ``initialize`` -> [Unix time of its start, seconds]. ``initialize`` may hold the former.
    """
    takes_local_rank: bool = False
    """Whether the script has an option ``--local_rank``, which the ``deepspeed`` launcher alone sets."""
    host_threads: int = 0
    """Threads that torch computes with on the host, as for an offloaded optimizer; 0 from an older runtime."""


@dataclass(frozen=True, kw_only=True)
class ProfileMeasured(Event):
    """What the profile launch taught about model and hardware (one global step at micro-batch 1)."""

    kind: ClassVar[str] = "profile_measured"

    params: int
    trainable_params: int
    largest_layer_params: int
    """Parameters of the largest module that owns parameters directly (ZeRO 3 gathers it whole)."""
    param_bytes: int
    """Bytes of one element of the engine's parameters: 2 for fp16 and bf16, 4 for fp32."""
    activation_bytes_per_sample: int
    """Activations kept for backward, per sample; 0 where it could not be seen (pipeline engines on CUDA)."""
    flops_per_sample: int
    """Floating-point operations of forward and backward, per sample; 0 where torch could not count them."""
    device_memory_bytes: int
    """Memory one rank may use: the device's, the limit of ``--device-memory``, or the host's share on CPU."""
    host_memory_bytes: int
    """Physical memory of the host."""
    peak_bytes: int
    """Peak device memory of the profiled step, in the unit of ``StepMeasured.peak_allocated_bytes``."""
    device_name: str
    optimizer: str
    """Class name of the innermost optimizer, empty where there is none."""


@dataclass(frozen=True, kw_only=True)
class ModulesImported(Event):
    """What the script had imported at the end of a profile launch (one rank says it for all)."""

    kind: ClassVar[str] = "modules_imported"

    modules: list[str]
    """Installed modules in the order of their import; the standard library's and the user's own are left out."""
    operators: list[str]
    """Compiled operators of DeepSpeed that were loaded."""
    environment: list[str] = field(default_factory=list)
    """Names of the environment variables that the script changed for modules to read at their import."""


@dataclass(frozen=True, kw_only=True)
class StepMeasured(Event):
    """One optimizer step (all its micro-batches), from the end of the step before to its own end."""

    kind: ClassVar[str] = "step_measured"

    step: int
    """Global step, from 1."""
    latency_s: float
    """Wall time from the previous step's boundary to this one's, device-synchronised: all of it, data too."""
    forward_s: float
    """Summed over the step's micro-batches."""
    backward_s: float
    """Summed over the step's micro-batches."""
    step_s: float
    """Optimizer step, summed over the step's micro-batches."""
    samples: int
    """Samples this rank consumed in the step (leading dimension of what the engine was fed), 0 if unknown.
    Ranks that share data (pipeline stages, tensor parallelism) each count it: see ``data_parallel_size``.
    """
    observed_micro_batch: int | None
    """Largest leading dimension the engine was fed in one forward, None where it could not be seen."""
    loss: float | None
    """Loss of the step's last micro-batch on this rank, None where it could not be seen."""
    peak_allocated_bytes: int
    """CUDA: peak allocated since the engine was built. CPU: peak growth of private writable memory since
    DeepSpeed was imported, the unit of ``--device-memory`` (see ``runtime/device_memory.py``).
    """
    peak_reserved_bytes: int
    """CUDA: peak reserved by the caching allocator; CPU: equal to ``rss_bytes``."""
    rss_bytes: int
    """Peak resident set size of the process."""


@dataclass(frozen=True, kw_only=True)
class RankFinished(Event):
    """The rank left on its own terms."""

    kind: ClassVar[str] = "rank_finished"

    reason: str
    """``profile_done`` (the profile steps are done), ``script_end`` or ``exit_code_N`` (``sys.exit(N)``)."""
    steps: int
    """Global steps completed."""


@dataclass(frozen=True, kw_only=True)
class RankFailed(Event):
    """An exception reached the top of the script."""

    kind: ClassVar[str] = "rank_failed"

    outcome: str
    """Value of ``optuna_dsat.outcome.Outcome`` that this rank's exception speaks for."""
    phase: str
    """``script`` (before initialize), ``initialize``, ``forward``, ``backward``, ``step`` or ``between``."""
    error_type: str
    message: str
    traceback: str
    missing_bytes: int | None
    """Bytes of the allocation that failed, where the error tells."""
    steps: int
    """Global steps completed before."""


_KINDS: dict[str, type[Event]] = {
    cls.kind: cls
    for cls in (
        RankStarted,
        TrainerFound,
        EngineReady,
        ProfileMeasured,
        ModulesImported,
        StepMeasured,
        RankFinished,
        RankFailed,
    )
}


def encode_event(event: Event) -> str:
    """Return the event as one JSON line, without the line break."""
    return json.dumps({"kind": event.kind, **asdict(event)}, separators=(",", ":"))


def decode_event(line: str) -> Event | None:
    """Return the event of one JSON line, None for one cut short or of an unknown kind (a newer runtime's)."""
    try:
        record: dict[str, Any] = json.loads(line)
        cls = _KINDS[record.pop("kind")]
        known = {f.name for f in fields(cls)}
        return cls(**{key: value for key, value in record.items() if key in known})
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
