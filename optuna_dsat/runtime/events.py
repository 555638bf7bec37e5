"""Events that a rank records, and their file; the format shared by training processes and the tuner.

Each rank appends JSON lines to its own file in the run directory, one event per line, flushed immediately.
Durations are in seconds, sizes in bytes, times are Unix times. Both sides have the same version of this package.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.files import TEXT_CHARS, shortened, storable

STEPS_SKIPPED = "steps_skipped"
"""Reason of ``RankFinished``: the loss scaler skipped ``MOST_SKIPPED_STEPS``, the maximum per launch."""


_KINDS: dict[str, type[Event]] = {}
"""``Event.kind`` -> class."""


@dataclass(frozen=True)
class Event:
    """Base of all events; each kind is a subclass."""

    kind: ClassVar[str]

    def __init_subclass__(cls, *, kind: str) -> None:
        cls.kind = kind
        _KINDS[kind] = cls

    rank: int
    """Global rank that wrote the event."""
    time: float
    """Unix time in seconds."""


@dataclass(frozen=True)
class RankStarted(Event, kind="rank_started"):
    """The process of a rank has started, before torch and DeepSpeed are imported."""

    local_rank: int
    world_size: int
    pid: int
    forked: bool = False
    """Whether the process was forked with torch and DeepSpeed already imported, rather than started by torchrun."""
    isolation: str = "off"
    """Protection of the user's files: ``mount``, ``python`` or ``off`` (``runtime/isolation/world.py``)."""
    isolation_note: str = ""
    """Folders on which no overlay could be mounted, with the reason; empty if all were mounted."""


@dataclass(frozen=True)
class TrainerFound(Event, kind="trainer_found"):
    """The script uses a trainer with batch-size settings, which the runtime overrides with the launch's."""

    framework: str
    """``transformers`` or ``lightning``."""
    micro_batch: int | None
    """Samples per rank and forward pass before the override; None if not observed."""
    gradient_accumulation_steps: int | None
    """Value before the override; None if not observed."""
    options: Mapping[str, str]
    """DeepSpeed config key -> the script's command-line option for the same setting."""


@dataclass(frozen=True)
class BatchSourcesFound(Event, kind="batch_sources"):
    """Integers that may set the batch size or ZeRO stage, recorded until the first step of a profile launch."""

    options: Mapping[str, int]
    """Command-line option of the script -> parsed value; an option that ends with ``=`` is a Hydra override."""
    defaults: Mapping[str, int] = field(default_factory=dict)
    """Option -> default in the script's parser."""
    choices: Mapping[str, list[int]] = field(default_factory=dict)
    """Option that may be the ZeRO stage -> stages that the parser lists as choices."""
    settings: Sequence[Mapping[str, Any]] = ()
    """Numbers in settings files that the script read: ``file`` (relative if inside the working directory), ``key``
    (dotted) and ``value``."""
    loaders: Sequence[Mapping[str, Any]] = ()
    """Data loaders: ``batch_size``, ``file`` and ``line``; ``samples`` per rank and epoch (None if unknown); and
    ``trains``, whether the engine received inputs during the iteration."""
    fed_at: Sequence[Mapping[str, Any]] = ()
    """``file`` and ``line`` of the user's frames in the call that fed the engine first, innermost first."""


@dataclass(frozen=True)
class EnvironmentSet(Event, kind="environment_set"):
    """The runtime set environment variables without which the script would not use DeepSpeed."""

    variables: Mapping[str, str]
    """Name -> value for the final training command; config paths are the user's."""


@dataclass(frozen=True)
class CheckpointLoaded(Event, kind="checkpoint_loaded"):
    """The script loaded a checkpoint into its engine."""

    folder: str
    """Folder of the checkpoint."""


@dataclass(frozen=True)
class CheckpointsOff(Event, kind="checkpoints_off"):
    """The script checkpoints activations itself, and the launch's settings have switched that off."""


@dataclass(frozen=True)
class ConfigDiffers(Event, kind="config_differs"):
    """The script's config differs from the user's file; reported before ``deepspeed.initialize`` allocates memory."""

    differences: Mapping[str, list[Any]]
    """As ``EngineReady.config_differences``."""


@dataclass(frozen=True)
class EngineReady(Event, kind="engine_ready"):
    """``deepspeed.initialize`` returned an engine with these properties."""

    zero_stage: int
    train_batch_size: int
    train_micro_batch_size_per_gpu: int
    gradient_accumulation_steps: int
    data_parallel_size: int
    """Ranks whose samples DeepSpeed's global batch counts."""
    pipeline: bool
    """Whether the engine is a pipeline engine, whose ``train_batch()`` runs a whole step."""
    device: str
    """``cuda`` or ``cpu``."""
    config_differences: Mapping[str, list[Any]] = field(default_factory=dict)
    """Differences between the config that the script passed and the user's file, without the overlay: dotted key ->
    [the script's value, the file's value], with None for a missing key. Empty if the runtime did not observe the
    script's config.
    """
    spans: Mapping[str, list[float]] = field(default_factory=dict)
    """Startup phases -> [Unix time of start, seconds]: ``imports`` (from the rank's start until DeepSpeed was
    imported), ``init_distributed``, ``initialize``. ``initialize`` may contain ``init_distributed``.
    """
    config_option: str = ""
    """The script's option for its DeepSpeed config, if it was omitted and the runtime set it to the launch's file."""
    config_in_code: bool = False
    """Whether the script did not open its arguments' config: it has a config in code, or a hard-coded path."""
    takes_local_rank: str = ""
    """The script's option ``--local_rank`` or ``--local-rank``, which torchrun does not set; empty without any."""
    starts_ranks: bool = False
    """Whether the script spawns its ranks with ``torch.multiprocessing`` and needs no launcher."""
    joins_ranks: bool = False
    """Whether the runtime set accelerate's backend; without a backend, each rank would train alone."""
    precision: str = ""
    """``fp16``, ``bf16`` or ``fp32``, as reported by DeepSpeed; empty if unknown."""
    bf16_argument: str = ""
    """Argument of accelerate or Fabric that must agree with a config in bf16; empty without any."""
    counted_times: int = 1
    """Ranks that share each sample although the global batch counts it for each: those of AutoTP."""
    host_threads: int = 0
    """torch's intra-op threads on the host, which an offloaded optimizer uses; 0 if unknown."""


@dataclass(frozen=True)
class ModelFacts:
    """Properties of a model and its hardware, per sample of one global step."""

    params: int
    """Unpartitioned parameters of the model, or of the rank's stage under pipeline parallelism."""
    trainable_params: int
    largest_layer_params: int
    """Parameters of the largest module, without its submodules (ZeRO 3 gathers all of them at once)."""
    param_bytes: int
    """Bytes per element of the engine's parameters: 2 for fp16 and bf16, 4 for fp32."""
    activation_bytes_per_sample: int
    """Activations saved for backward, per sample; of pipeline engines on CUDA, those of repeated blocks only."""
    flops_per_sample: int
    """Floating-point operations of forward and backward, per sample; 0 if torch could not count them."""
    device_memory_bytes: int
    """Memory available to a rank: the device's, the limit of ``--device-memory``, or a share of the host's on CPU."""
    host_memory_bytes: int
    """Physical memory of the host."""
    peak_bytes: int
    """Peak device memory of the profiled step, in the unit of ``StepMeasured.peak_allocated_bytes``."""
    device_name: str = ""
    optimizer: str = ""
    """Class name of the innermost optimizer; empty without an optimizer."""
    optimizer_tested: bool = True
    """Whether DeepSpeed lists the optimizer's class as tested with ZeRO; True without an optimizer."""
    needs_zero: bool = False
    """Whether the script calls ``loss.backward()`` itself, and its DeepSpeed refuses that at ZeRO 0."""
    blocks: int = 0
    """Repeated blocks whose activations can be checkpointed; 0 for none, or without a measurement."""
    block_bytes_per_sample: int = 0
    """Activations saved within these blocks, per sample."""
    block_input_bytes_per_sample: int = 0
    """Inputs of these blocks, per sample: the part that stays when they are checkpointed."""
    block_share: float = 0.0
    """Share of the forward pass's FLOPs within these blocks."""
    no_checkpointing: str = ""
    """Why activations cannot be checkpointed; empty if they can, or without a measurement."""
    no_compiling: str = ""
    """Why the search does not compile the model; empty if it may."""
    leaf_classes: tuple[str, ...] = ()
    """Classes of modules that route samples among their parts, and are no leaves of ZeRO 3 yet."""
    leaf_params: int = 0
    """Parameters of the largest of these modules."""
    numa_nodes: int = 1
    """NUMA nodes of the host with cores."""


@dataclass(frozen=True)
class ProfileMeasured(ModelFacts, Event, kind="profile_measured"):
    """Model and hardware as measured by a rank in the profile launch."""


@dataclass(frozen=True)
class ModulesImported(Event, kind="modules_imported"):
    """Modules that the script had imported at the end of a profile launch (recorded by rank 0 only)."""

    modules: list[str]
    """Installed modules in import order, without the standard library and the user's modules."""
    operators: list[str]
    """Compiled DeepSpeed operators that were loaded."""
    environment: list[str] = field(default_factory=list)
    """Names of environment variables that the script changed; modules may read them at import."""


@dataclass(frozen=True)
class StepMeasured(Event, kind="step_measured"):
    """An optimizer step with all its micro-batches, measured from the end of the previous step."""

    step: int
    """Global step, from 1, including steps that the loss scaler skipped."""
    latency_s: float
    """Wall time since the previous step was recorded, device-synchronized; includes data loading."""
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
    """Largest leading dimension of the engine's inputs in a forward pass; None if not observed."""
    loss: float | None
    """Loss of the step's last micro-batch on this rank; None if not observed."""
    peak_allocated_bytes: int
    """CUDA: peak allocated since the engine was built. CPU: peak growth of private writable memory since
    DeepSpeed was imported, as limited by ``--device-memory`` (see ``runtime/measure/memory.py``).
    """
    peak_reserved_bytes: int
    """CUDA: peak reserved by the caching allocator; CPU: equal to ``rss_bytes``."""
    rss_bytes: int
    """Peak resident set size of the process."""
    evaluation_s: float = 0.0
    """Part of ``latency_s`` from the first to the last forward in evaluation mode or without gradients, summed over
    the intervals between the phases; 0 without evaluation.
    """
    skipped: bool = False
    """Whether the loss scaler skipped the update due to non-finite gradients. Skipped steps do not count."""
    skipped_before: int = 0
    """Number of earlier steps that the loss scaler skipped."""
    elements: int = 0
    """Elements of the engine's inputs, padding included (``runtime/measure/inputs.py``); 0 if not observed."""
    elements_are_tokens: bool = False
    """Whether the inputs contain tokens, so that ``elements`` is a token count."""
    steps_completed: int = 0
    """Batches that the training has completed, including batches before a resumed checkpoint and skipped steps. Passed
    to ``dsat_reporting_context``, else counted by the engine."""
    is_ambiguous: bool = False
    """Whether the second dimension of its inputs may have the samples instead, by the known batch sizes."""
    caught: int = 0
    """Out-of-memory errors of the trial before the end of the step, all of which the script caught."""

    @property
    def number(self) -> int:
        """Number among the counted steps, from 1; a skipped step has the number of the next counted step."""
        return self.step - self.skipped_before


@dataclass(frozen=True)
class RankFinished(Event, kind="rank_finished"):
    """The rank ended without an exception."""

    reason: str
    """``profile_done`` (the last profile step completed), ``STEPS_SKIPPED``, ``out_of_memory`` (the script caught it as
    often), ``script_end`` or ``exit_code_N`` (``sys.exit(N)``)."""
    steps: int
    """Global steps completed, without steps that the loss scaler skipped."""
    skipped: int = 0
    """Global steps that the loss scaler skipped."""
    allocation_failures: int = 0
    """Out-of-memory errors of torch on this rank, including errors that the script caught."""
    host_allocation_failures: int = 0
    """The same of the host's memory, where the device is a GPU."""
    saves: int = 0
    """Calls of ``save_checkpoint`` that a trial skipped."""


@dataclass(frozen=True)
class RankFailed(Event, kind="rank_failed"):
    """The script ended with an uncaught exception."""

    outcome: Outcome
    """Classification of the exception."""
    phase: str
    """``script`` (before initialize), ``initialize``, ``forward``, ``backward``, ``step`` or ``between``."""
    error_type: str
    message: str
    traceback: str
    missing_bytes: int | None
    """Bytes of the failed allocation; None if the error does not state them."""
    steps: int
    """Global steps completed before the failure."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "outcome", Outcome(self.outcome))  # from its value in a file


def encode_event(event: Event) -> str:
    """Return the event as one JSON line, without the line break."""
    return json.dumps({"kind": event.kind, **asdict(event)}, separators=(",", ":"))


def decode_event(line: str) -> Event | None:
    """Return the event of a JSON line; None for a line that cannot be read, such as a truncated one.

    Texts are made ``storable`` and shortened to ``TEXT_CHARS``.
    """
    try:
        record: dict[str, Any] = json.loads(line)
        cls = _KINDS[record.pop("kind")]
        return cls(**{key: _clean(value) for key, value in record.items()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return shortened(storable(value), TEXT_CHARS)
    if isinstance(value, list):
        return [_clean(item) for item in value]
    if isinstance(value, dict):
        return {storable(key): _clean(item) for key, item in value.items()}
    return value


class EventWriteError(OSError):
    """An event could not be written (disk full, directory removed), so the launch cannot be recorded."""


def events_path(events_dir: str | Path, rank: int) -> Path:
    """Return the path of a rank's event file."""
    return Path(events_dir) / f"rank{rank}.jsonl"


class EventWriter:
    """Appends one JSON line per event; a line left incomplete by an error is terminated before the next.

    Scripts that close all open files, as daemons do, also close the event file. It is then reopened; another file that
    got its descriptor number in the meantime is not written to.

    Raises:
        EventWriteError: If the file cannot be opened.
    """

    _fd = -1
    _file: tuple[int, int] | None = None

    def __init__(self, path: Path) -> None:
        self.begin(path)

    def begin(self, path: Path) -> None:
        """Write to another file from here on."""
        self._path = path
        self._torn = False
        if self._file is not None and _identity(self._fd) == self._file:
            os.close(self._fd)
        try:
            self._open()
        except OSError as error:
            raise self._failure(error) from error

    def _open(self) -> None:
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._file = _identity(self._fd)

    def write(self, event: Event) -> None:
        """Append an event, unbuffered.

        Raises:
            EventWriteError: If it could not be written completely.
        """
        line = f"{encode_event(event)}\n".encode()
        data = memoryview(b"\n" + line if self._torn else line)
        self._torn = True
        try:
            if _identity(self._fd) != self._file:
                self._open()
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            raise self._failure(error) from error
        self._torn = False

    def _failure(self, error: OSError) -> EventWriteError:
        return EventWriteError(
            error.errno,
            f"optuna-dsat cannot record this rank's events ({error.strerror}). "
            "Free space there or choose another --output-dir",
            str(self._path),
        )


def _identity(descriptor: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_dev, status.st_ino
