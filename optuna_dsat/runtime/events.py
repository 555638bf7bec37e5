"""Events that a rank records; the format shared by training processes and the tuner.

Each rank appends JSON lines to its own file in the run directory, one event per line, flushed immediately.
Durations are in seconds, sizes in bytes, times are Unix times. Beside the standard library
this module imports only what makes texts fit to be stored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar

from optuna_dsat.runtime.files import TEXT_CHARS, shortened, storable

__all__ = [
    "STEPS_SKIPPED",
    "BatchSourcesFound",
    "EngineReady",
    "EnvironmentSet",
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


STEPS_SKIPPED = "steps_skipped"
"""Reason of ``RankFinished``: the loss scaler skipped as many steps as a launch waits for."""


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
    """The process of a rank has started, before torch and DeepSpeed are imported."""

    kind: ClassVar[str] = "rank_started"

    local_rank: int
    world_size: int
    pid: int
    host: str
    forked: bool = False
    """Whether the process was forked with torch and DeepSpeed already imported, rather than started by torchrun."""
    isolation: str = "off"
    """How the user's files are protected: ``mount``, ``python`` or ``off`` (``runtime/isolation/world.py``)."""
    isolation_note: str = ""
    """Folders that no overlay could be mounted on, and why; empty if there are none."""


@dataclass(frozen=True, kw_only=True)
class TrainerFound(Event):
    """The script trains with a trainer that has its own batch-size settings; they are set to the launch's."""

    kind: ClassVar[str] = "trainer_found"

    framework: str
    """``transformers`` or ``lightning``."""
    micro_batch: int | None
    """The script's own samples per rank and forward pass; None if not observed."""
    gradient_accumulation_steps: int | None
    """The script's own value; None if not observed."""
    options: Mapping[str, str]
    """Key of the DeepSpeed config -> command-line option of the script that sets the same value; empty if none."""


@dataclass(frozen=True, kw_only=True)
class BatchSourcesFound(Event):
    """Whole numbers that may set the batch size or ZeRO stage, noted until the first step of a profile launch."""

    kind: ClassVar[str] = "batch_sources"

    options: Mapping[str, int]
    """Option of the script's command line -> parsed value; an option that ends with ``=`` is an override of Hydra's."""
    defaults: Mapping[str, int] = field(default_factory=dict)
    """Option -> its default in the script's parser."""
    choices: Mapping[str, list[int]] = field(default_factory=dict)
    """Option that may mean a ZeRO stage -> the stages that the parser accepts, where it lists them."""
    settings: Sequence[Mapping[str, Any]] = ()
    """``file`` (relative to the working directory if it is in it), ``key`` (dotted) and ``value`` of numbers in
    settings files that the script read."""
    loaders: Sequence[Mapping[str, Any]] = ()
    """``batch_size``, ``file`` and ``line`` of what makes batches, such as data loaders; ``samples`` of one rank in an
    epoch (None if unknown); whether it ``trains``: the engine was fed while it was iterated; and the ``attribute``
    (``CLASS.NAME``) of a data set that says its batch size, empty if none does."""
    fed_at: Sequence[Mapping[str, Any]] = ()
    """``file`` and ``line`` of the user's code that led to the engine's first input, the innermost first."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentSet(Event):
    """The runtime set variables of the environment without which the script would train without DeepSpeed."""

    kind: ClassVar[str] = "environment_set"

    variables: Mapping[str, str]
    """Name -> value for the command that trains; a config file is the user's."""


@dataclass(frozen=True, kw_only=True)
class ConfigDiffers(Event):
    """The script passes another config than the user's file; told before ``deepspeed.initialize`` takes memory."""

    kind: ClassVar[str] = "config_differs"

    differences: Mapping[str, list[Any]]
    """As ``EngineReady.config_differences``."""


@dataclass(frozen=True, kw_only=True)
class EngineReady(Event):
    """``deepspeed.initialize`` returned an engine with these properties."""

    kind: ClassVar[str] = "engine_ready"

    zero_stage: int
    train_batch_size: int
    train_micro_batch_size_per_gpu: int
    gradient_accumulation_steps: int
    data_parallel_size: int
    pipeline: bool
    """Whether the engine is a pipeline engine (``engine.train_batch()`` runs a whole step)."""
    params: int
    """Unpartitioned parameter count of the model, or of this rank's stage under pipeline parallelism."""
    trainable_params: int
    initialize_s: float
    """Duration of ``deepspeed.initialize``."""
    device: str
    """``cuda`` or ``cpu``."""
    torch_version: str
    deepspeed_version: str
    config_differences: Mapping[str, list[Any]] = field(default_factory=dict)
    """Differences between the config that the script passed and the user's file, without the overlay: dotted key ->
    [the script's value, the file's value]; None stands for a missing key. Empty if the runtime did not observe
    the script's config.
    """
    spans: Mapping[str, list[float]] = field(default_factory=dict)
    """Startup phases -> [Unix time of start, seconds]: ``imports`` (from the rank's start until DeepSpeed was
    imported), ``init_distributed``, ``initialize``. ``initialize`` may contain ``init_distributed``.
    """
    config_option: str = ""
    """The script's option for its DeepSpeed config, if it was not given and got the launch's file by default."""
    config_in_code: bool = False
    """Whether the script read the user's config by a name of its own, whatever its arguments say."""
    takes_local_rank: bool = False
    """Whether the script has an option ``--local_rank``, which only the ``deepspeed`` launcher sets."""
    starts_ranks: bool = False
    """Whether the script starts its ranks by ``torch.multiprocessing``, and so needs no launcher."""
    joins_ranks: bool = False
    """Whether the runtime gave accelerate the backend without which each rank trains alone."""
    precision: str = ""
    """``fp16``, ``bf16`` or ``fp32``, as DeepSpeed has it; empty from an older runtime."""
    host_threads: int = 0
    """torch's intra-op threads on the host, which an offloaded optimizer uses; 0 from an older runtime."""


@dataclass(frozen=True, kw_only=True)
class ProfileMeasured(Event):
    """Model and hardware properties measured in the profile launch, per sample of one global step."""

    kind: ClassVar[str] = "profile_measured"

    params: int
    trainable_params: int
    largest_layer_params: int
    """Parameters of the largest module that owns parameters directly (ZeRO 3 gathers all of them at once)."""
    param_bytes: int
    """Bytes per element of the engine's parameters: 2 for fp16 and bf16, 4 for fp32."""
    activation_bytes_per_sample: int
    """Activations saved for backward, per sample; 0 if not measurable (pipeline engines on CUDA)."""
    flops_per_sample: int
    """Floating-point operations of forward and backward, per sample; 0 if torch could not count them."""
    device_memory_bytes: int
    """Memory available to one rank: the device's, the limit of ``--device-memory``, or a share of the host's on CPU."""
    host_memory_bytes: int
    """Physical memory of the host."""
    peak_bytes: int
    """Peak device memory of the profiled step, in the unit of ``StepMeasured.peak_allocated_bytes``."""
    device_name: str
    optimizer: str
    """Class name of the innermost optimizer; empty if there is none."""
    optimizer_tested: bool = True
    """Whether DeepSpeed lists the optimizer's class as tested with ZeRO; True without an optimizer."""


@dataclass(frozen=True, kw_only=True)
class ModulesImported(Event):
    """Modules that the script had imported at the end of a profile launch (recorded by rank 0 only)."""

    kind: ClassVar[str] = "modules_imported"

    modules: list[str]
    """Installed modules in import order, without the standard library's and the user's own."""
    operators: list[str]
    """Compiled DeepSpeed operators that were loaded."""
    environment: list[str] = field(default_factory=list)
    """Names of environment variables that the script changed; modules may read them at import."""


@dataclass(frozen=True, kw_only=True)
class StepMeasured(Event):
    """One optimizer step (all its micro-batches), from the end of the previous step to its own end."""

    kind: ClassVar[str] = "step_measured"

    step: int
    """Global step, from 1, those that the loss scaler skipped included."""
    latency_s: float
    """Wall time from the previous step's boundary to this one's, device-synchronized; includes data loading."""
    forward_s: float
    """Summed over the step's micro-batches."""
    backward_s: float
    """Summed over the step's micro-batches."""
    step_s: float
    """Optimizer step, summed over the step's micro-batches."""
    samples: int
    """Samples this rank consumed in the step (leading dimension of the engine's inputs); 0 if unknown.
    Ranks that share data (pipeline stages, tensor parallelism) each count it: see ``data_parallel_size``.
    """
    observed_micro_batch: int | None
    """Largest leading dimension of the engine's inputs in one forward; None if not observed."""
    loss: float | None
    """Loss of the step's last micro-batch on this rank; None if not observed."""
    peak_allocated_bytes: int
    """CUDA: peak allocated since the engine was built. CPU: peak growth of private writable memory since
    DeepSpeed was imported, the unit of ``--device-memory`` (see ``runtime/measure/memory.py``).
    """
    peak_reserved_bytes: int
    """CUDA: peak reserved by the caching allocator; CPU: equal to ``rss_bytes``."""
    rss_bytes: int
    """Peak resident set size of the process."""
    evaluation_s: float = 0.0
    """Part of ``latency_s`` from the first to the last forward in evaluation mode or without gradients, summed over
    the intervals between the phases; 0 if there was none.
    """
    skipped: bool = False
    """Whether the loss scaler skipped the update: its gradients were not finite. Such a step does not count."""
    skipped_before: int = 0
    """Steps before this one that the loss scaler skipped."""
    elements: int = 0
    """Elements of the engine's inputs, padding included (``runtime/measure/inputs.py``); 0 if not observed."""
    elements_are_tokens: bool = False
    """Whether the inputs hold tokens, which ``elements`` then counts."""
    steps_completed: int = 0
    """Batches that the training has completed, as ``dsat_reporting_context`` was told or the engine counts them: with
    those before a checkpoint that it resumed from, and skipped ones; 0 from an older runtime."""

    @property
    def number(self) -> int:
        """Number among the steps that count, from 1; a skipped step has that of the next one."""
        return self.step - self.skipped_before


@dataclass(frozen=True, kw_only=True)
class RankFinished(Event):
    """The rank ended without an exception."""

    kind: ClassVar[str] = "rank_finished"

    reason: str
    """``profile_done`` (the last profile step completed), ``STEPS_SKIPPED``, ``script_end`` or ``exit_code_N``
    (``sys.exit(N)``)."""
    steps: int
    """Global steps completed, without those that the loss scaler skipped."""
    skipped: int = 0
    """Global steps that the loss scaler skipped."""
    allocation_failures: int = 0
    """Errors of torch on this rank that memory is exhausted, whether or not the script caught them."""


@dataclass(frozen=True, kw_only=True)
class RankFailed(Event):
    """The script ended with an uncaught exception."""

    kind: ClassVar[str] = "rank_failed"

    outcome: str
    """Value of ``optuna_dsat.outcome.Outcome`` that the exception is classified as."""
    phase: str
    """``script`` (before initialize), ``initialize``, ``forward``, ``backward``, ``step`` or ``between``."""
    error_type: str
    message: str
    traceback: str
    missing_bytes: int | None
    """Bytes of the failed allocation; None if the error does not state them."""
    steps: int
    """Global steps completed before the failure."""


_KINDS: dict[str, type[Event]] = {
    cls.kind: cls
    for cls in (
        RankStarted,
        TrainerFound,
        BatchSourcesFound,
        EnvironmentSet,
        ConfigDiffers,
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
    """Return the event of one JSON line; None if it is none that this version can read.

    Such a line is truncated, lacks a field, or is of a kind that only a newer runtime writes. Texts are made
    ``storable`` and cut to ``TEXT_CHARS``.
    """
    try:
        record: dict[str, Any] = json.loads(line)
        cls = _KINDS[record.pop("kind")]
        known = {one.name for one in fields(cls)}
        return cls(**{key: _clean(value) for key, value in record.items() if key in known})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _clean(value: Any) -> Any:
    """Return a JSON value with texts that can be stored, of bounded length."""
    if isinstance(value, str):
        return shortened(storable(value), TEXT_CHARS)
    if isinstance(value, list):
        return [_clean(item) for item in value]
    if isinstance(value, dict):
        return {storable(key): _clean(item) for key, item in value.items()}
    return value
