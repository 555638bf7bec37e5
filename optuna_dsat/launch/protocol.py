"""The interface between the tuner and launchers.

A launcher may run on a different machine than the tuner: requests, updates and reports are plain values, never handles.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from optuna_dsat.config.record import Record
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.agent.preload import Preload
from optuna_dsat.runtime.events import Event

_Event = TypeVar("_Event", bound=Event)


@dataclass(frozen=True, kw_only=True)
class Conditions(Record):
    """State of the machine while a launch measured its steps; None or empty if unknown."""

    window_s: float | None = None
    """Length of the observed time, in seconds."""
    others_cpu_s: float | None = None
    """CPU seconds used by processes outside the launch in that time."""
    cores: int | None = None
    """Cores available to the launch."""
    gpu_processes: tuple[str, ...] = ()
    """Descriptions of other processes on the launch's GPUs."""
    throttle_reasons: tuple[str, ...] = ()
    """Descriptions of NVML's reasons for clocks below the maximum, other than idleness."""
    power_w: float | None = None
    """Mean power of the launch's GPUs from the drivers' energy counters, other users of a shared GPU included."""
    isolation: str = ""
    """How the user's files were protected from the launch: ``mount``, ``python`` or ``off``; empty if unknown."""
    isolation_note: str = ""
    """Folders on which no overlay could be mounted, and why."""
    lone_save: int | None = None
    """First rank that called ``save_checkpoint`` more often than another; None if all called it equally often."""

    @property
    def others_share(self) -> float | None:
        """Share of the cores' time used by other processes; None if unknown."""
        if self.others_cpu_s is None or not self.window_s or not self.cores:
            return None
        return self.others_cpu_s / (self.window_s * self.cores)


_RANK = re.compile(r"^rank \d+: ")
"""Prefix of a message that contains the rank that failed first."""
_BELOW_ERROR = re.compile(r"\s*(?:[IW]\d{4} \d\d:|(?:[\[\]\d\s:,.-]*\W)?(?:DEBUG|INFO|WARNING)\W)")
"""Matches log lines below an error, of absl and TensorFlow (``I0000 00:00:17``), Python's logging and DeepSpeed."""
_LAUNCH_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def is_launch_id(text: str) -> bool:
    """Return whether a text can name a launch and its run directory: letters, digits, '.', '_' and '-' only."""
    return _LAUNCH_ID.fullmatch(text) is not None


@dataclass(frozen=True, kw_only=True)
class ScriptCommand(Record):
    """The user's training script, as passed to torchrun."""

    script: str
    """Path of a Python file, or a module's name when ``is_module``."""
    args: tuple[str, ...] = ()
    is_module: bool = False
    cwd: str
    """Working directory of the script."""
    config_path: str
    """The user's DeepSpeed config file. An argument with this path is replaced by the path of the trial's config."""
    arg_mappings: Mapping[str, str] = field(default_factory=dict)
    """Key of the DeepSpeed config -> script option that is set to its value."""
    data_parallel_size: int | None = None
    """Ranks that consume different samples, for an option that is the global batch; None for all."""
    batch_source: Mapping[str, Any] = field(default_factory=dict)
    """How the script derives its batch size, apart from its options: see ``runtime/adapt/batch_sources.py``."""
    python: str | None = None
    """Interpreter of the ranks; None for the one of the process that starts them."""

    @property
    def interpreter(self) -> str:
        """Path of the interpreter of the ranks."""
        return self.python or sys.executable


@dataclass(frozen=True, kw_only=True)
class LaunchRequest(Record):
    """A launch: a configuration and the steps to run."""

    launch_id: str
    """Unique name, also the name of the run directory (``trial-0007``, ``trial-0007-retry-1``, ``profile``)."""
    purpose: str
    """``profile``, ``trial``, ``confirm`` or ``full`` (to the end; not measured, not stopped early)."""
    command: ScriptCommand
    ds_config: Mapping[str, Any]
    """The complete DeepSpeed config of the launch, ready to train with."""
    in_file: Mapping[str, Any] = field(default_factory=dict)
    """Batch sizes of the user's file that the script reads instead. DeepSpeed gets the overlay's values."""
    overlay: Mapping[str, Any]
    """Overrides the config that the script passes to ``deepspeed.initialize``; None removes a key."""
    slots: int
    """Ranks to start; each uses a GPU (or is a CPU rank)."""
    start_profile_step: int = 3
    """First global step (from 1) that counts; the steps before it are warm-up."""
    end_profile_step: int = 5
    """Last global step that counts; every rank exits after it."""
    device_memory_bytes: int | None = None
    """Memory that a rank may allocate; None for all."""
    timeout_s: float | None = None
    """Time limit of the launch; None for no limit."""
    stall_s: float = 600.0
    """Longest time without an event from any rank before the launch counts as stalled. Before the first step, CPU time
    and I/O of its processes extend it."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables added for the launch."""
    isolation: str = "off"
    """How the user's files are protected: ``auto``, ``python`` or ``off`` (``runtime/isolation/world.py``)."""
    writable: tuple[str, ...] = ()
    """Files and folders that the launch may change nevertheless."""
    prepared: str = ""
    """Folder of files that the launch sees at their places (``runtime/isolation/prepared.py``); empty for none."""
    continues: bool = False
    """Whether its ranks may measure a further trial after the last step, and ranks of another launch this one."""
    swap_bytes: int = 0
    """Bytes that its ranks on a node write to NVMe; 0 if unknown."""
    locked_bytes: int = 0
    """Bytes that each rank page-locks for that; 0 if unknown."""


@dataclass(frozen=True, kw_only=True)
class LaunchReport(Record):
    """Result of a launch whose processes are gone and whose devices are free."""

    launch_id: str
    outcome: Outcome
    message: str
    """Message for the user in a single line: what happened, where, and the remedy if known."""
    exit_code: int | None = None
    """Exit code of the launch command (negative: signal). None if it never ran or the launcher ended it, which it does
    once all ranks have recorded their end."""
    error_excerpt: str = ""
    """Last lines of the traceback of the rank that failed first; empty without a failure."""
    missing_bytes: int | None = None
    """Size of the allocation that failed first; None if unknown."""
    log_path: str
    """Path of the full log of the relevant rank, for the user."""
    command: tuple[str, ...] = ()
    """The launch command, without secrets."""
    host: str
    devices: tuple[int, ...] = ()
    """Device indices used; CPU ranks count from 0."""
    pids: tuple[int, ...] = ()
    started_at: float
    """Unix time."""
    startup_s: float = 0.0
    """From the start to the first step boundary, or to the end if no step was measured."""
    measured_s: float = 0.0
    """From the first step boundary to the last event of a rank, including a failed step."""
    exit_s: float = 0.0
    """From the last event of a rank until all processes are gone and the devices are free."""
    conditions: Conditions = field(default_factory=Conditions)
    """Other activity while its steps were measured; empty if not observed."""
    root: str = ""
    """The launch that started its processes, if it continued another; empty if it started its own."""
    afresh: bool = False
    """Whether it failed as a continued launch, which says nothing of its configuration: launched afresh."""

    @property
    def cause(self) -> str:
        """The message without the rank that failed first, which may differ between launches."""
        return _RANK.sub("", self.message)

    @property
    def failed(self) -> bool:
        """Whether it was neither measured nor pruned."""
        return self.outcome not in (Outcome.MEASURED, Outcome.PRUNED)

    @property
    def failure_in_words(self) -> str:
        """The cause, with the last line of the error, which is no log line below an error, unless already included."""
        lines = [line.strip() for line in self.error_excerpt.splitlines() if not _BELOW_ERROR.match(line)]
        last = _RANK.sub("", next(filter(None, reversed(lines)), ""))
        return self.cause if all(part in self.cause for part in last.split(": ", 1)) else f"{self.cause} ({last})"

    @property
    def held_s(self) -> float:
        """Seconds for which the devices were held; equals ``startup_s`` if no step was measured."""
        return self.startup_s + self.measured_s + self.exit_s if self.measured_s > 0 else self.startup_s


@dataclass(frozen=True, kw_only=True)
class LaunchUpdate:
    """An update from a launcher; see the subclasses."""

    launch_id: str


@dataclass(frozen=True, kw_only=True)
class Observed(LaunchUpdate):
    """A rank wrote an event."""

    event: Event


@dataclass(frozen=True, kw_only=True)
class Settled(LaunchUpdate):
    """The outcome of the launch is final, but its processes may still run and its devices may not be free yet.

    Optional; precedes ``Finished``, so that the next launch can be chosen meanwhile.
    """

    report: LaunchReport
    """As in ``Finished``, except ``exit_s``, which is not known yet."""


@dataclass(frozen=True, kw_only=True)
class Finished(LaunchUpdate):
    """The launch has ended. This is its last update."""

    report: LaunchReport


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A process or tuner that occupies a slot."""

    device: str
    """Name of the slot for the user, such as ``GPU 1``."""
    who: str
    """Description such as ``process 4711 (python, user anna)``, constant while the holder is the same."""
    used_bytes: int | None = None
    """Device memory in use; None if unknown."""
    since: float = 0.0
    """Unix time at which another tuner took the slot for its current launch; 0 for other holders."""
    own: bool = False
    """Whether it is a launch of the same launcher."""


class SlotsBusyError(RuntimeError):
    """A launch asked for more slots than are free."""


class SlotsTakenError(SlotsBusyError):
    """Another tuner on the machine was faster."""


class Launcher(Protocol):
    """Starts and follows launches. All methods are called from a single thread."""

    @property
    def free_slots(self) -> int:
        """Slots available to a launch now, or as soon as settled launches have ended."""

    @property
    def total_slots(self) -> int:
        """Slots managed by this launcher, busy or free."""

    @property
    def waiting(self) -> Collection[str]:
        """IDs of the started launches that have no slots yet."""

    def holders(self) -> Sequence[Holder]:
        """Measure and return the holders of the slots that are not free, in the order of the slots."""

    def prepare(self, preload: Preload, *, operators: Sequence[str] = ()) -> None:
        """Set the modules to import before a fork, and the operators of DeepSpeed to compile before the next launch."""

    def start(self, request: LaunchRequest) -> None:
        """Start a launch. If its slots belong to settled launches, it starts once these have ended.

        Raises:
            SlotsBusyError: If fewer than ``request.slots`` slots are free; other tuners may have taken some since
                ``free_slots`` was read.
        """

    def poll(self, timeout_s: float) -> Sequence[LaunchUpdate]:
        """Return the updates since the last call; wait up to ``timeout_s`` seconds for updates."""

    def stop(self, launch_id: str, *, outcome: Outcome = Outcome.PRUNED, message: str = "") -> None:
        """End a launch at once; a later ``poll`` returns its ``Finished``. Unknown or ended launches are ignored."""

    def close(self) -> None:
        """End all running launches."""


@dataclass(frozen=True, kw_only=True)
class Rendezvous(Record):
    """A node's part of a launch on several nodes, or on a single node of a cluster."""

    nodes: int
    node_rank: int
    """Number of this node, from 0; its ranks follow the ranks of lower-numbered nodes."""
    address: str
    """Address of node 0, as reached by the other nodes."""
    port: int
    interface: str = ""
    """Network interface of this node for connections to the others; empty to let the libraries choose."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Outcome of a launch with its message and details."""

    outcome: Outcome
    message: str
    error_excerpt: str = ""
    missing_bytes: int | None = None
    rank: int = 0
    """Rank with the most informative log."""


@dataclass(frozen=True, kw_only=True)
class EndFacts:
    """Facts of a launch's processes, known once all of them are gone."""

    exit_codes: Mapping[int, int] = field(default_factory=dict)
    """Rank -> exit code (negative: signal) of the ranks that torchrun saw fail and the launcher did not kill."""
    agent_exit_code: int | None = None
    """Exit code of torchrun (negative: signal); None if the launcher ended it."""
    oom_kills: int | None = None
    """Processes that the kernel killed for lack of memory during the launch; None if unknown."""
    shared_memory_free: int | None = None
    """Free bytes in shared memory; None if unknown."""


@dataclass(frozen=True, kw_only=True)
class LaunchFacts(EndFacts):
    """Observations of an ended launch."""

    slots: int
    end_profile_step: int
    start_profile_step: int
    micro_batch: int | None
    """Configured ``train_micro_batch_size_per_gpu``; None if not configured."""
    events: Mapping[int, Sequence[Event]]
    """Rank -> events in the order written."""
    stop: Verdict | None = None
    """None if the launcher did not end the launch."""
    config_path: str = "ds_config.json"
    """Path of the user's DeepSpeed config, for the remedy in messages."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Dotted key -> value of the launch's config."""

    def of(self, kind: type[_Event]) -> list[_Event]:
        """Return the events of a kind, of all ranks."""
        return [event for events in self.events.values() for event in events if isinstance(event, kind)]
