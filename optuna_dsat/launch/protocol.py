"""The interface between tuner and launchers.

A launcher may run on other machines than the tuner: requests, updates and reports are plain values, never handles.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from optuna_dsat.config.record import Record
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.events import Event, ModulesImported

__all__ = [
    "BASE_MODULES",
    "Conditions",
    "Finished",
    "Holder",
    "LaunchReport",
    "LaunchRequest",
    "LaunchUpdate",
    "Launcher",
    "Observed",
    "Preload",
    "Rendezvous",
    "ScriptCommand",
    "Settled",
    "SlotsBusyError",
    "dropped_in_words",
    "is_launch_id",
]


@dataclass(frozen=True, kw_only=True)
class Conditions(Record):
    """Facts on the machine while a launch measured its steps; None and empty stand for what is not known."""

    window_s: float | None = None
    """Length of the time that the facts are about, in seconds."""
    others_cpu_s: float | None = None
    """CPU seconds that processes which are not the launch's used in that time."""
    cores: int | None = None
    """Cores that the launch might use."""
    gpu_processes: tuple[str, ...] = ()
    """Other processes on the launch's GPUs, each in words."""
    throttle_reasons: tuple[str, ...] = ()
    """NVML's reasons for clocks below the highest, other than idleness, each in words."""
    isolation: str = ""
    """How the user's files were protected from the launch: ``mount``, ``python`` or ``off``; empty if unknown."""
    isolation_note: str = ""
    """Folders that no overlay could be mounted on, and why."""

    @property
    def others_share(self) -> float | None:
        """Share of the cores' time that other processes took; None if unknown."""
        if self.others_cpu_s is None or not self.window_s or not self.cores:
            return None
        return self.others_cpu_s / (self.window_s * self.cores)


BASE_MODULES = (
    "numpy",
    "torch",
    "torch.distributed.run",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "torch._dynamo",
    "deepspeed",
    "deepspeed.runtime.zero.muon.original_muon",
)
"""Modules that every launch needs. NumPy is first, so that the threads of its OpenBLAS can be counted."""


@dataclass(frozen=True, kw_only=True)
class Preload(Record):
    """Modules to import before ranks are forked."""

    modules: tuple[str, ...] = BASE_MODULES
    """In the order of import. One that cannot be imported is skipped: the rank that needs it reports the error."""
    operators: tuple[str, ...] = ()
    """Names of compiled operators of DeepSpeed (``deepspeed_shm_comm``)."""
    left_out: tuple[str, ...] = ()
    """Packages that are not imported, nor modules that import them."""
    environment: tuple[str, ...] = ()
    """Environment variables that the script changes, which no import may read before that."""

    @classmethod
    def learned(cls, imported: ModulesImported) -> Preload:
        """Return ``BASE_MODULES`` and the modules that a profile launch imported."""
        return cls(
            modules=(*BASE_MODULES, *imported.modules),
            operators=tuple(imported.operators),
            environment=tuple(imported.environment),
        )

    def changed(self, *, added: Sequence[str], left_out: Sequence[str]) -> Preload:
        """Return a copy with modules added and packages left out."""
        return replace(self, modules=(*self.modules, *added), left_out=(*self.left_out, *left_out))

    @classmethod
    def from_json(cls, record: Mapping[str, Sequence[str]]) -> Preload:
        """Build from what ``to_json`` returned; imports nothing, which the warm process would pass on to launches."""
        return cls(**{name: tuple(names) for name, names in record.items()})


_RANK = re.compile(r"^rank \d+: ")
"""Prefix of a message that names the rank which failed first."""
_LAUNCH_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_DROPPED = re.compile(r" \(\d+ lines? of events .*\)$")
"""End of a message that names dropped lines, as ``dropped_in_words`` writes it."""


def is_launch_id(text: str) -> bool:
    """Return whether a text can name a launch and its run directory: letters, digits, '.', '_' and '-' only."""
    return _LAUNCH_ID.fullmatch(text) is not None


def dropped_in_words(lines: int) -> str:
    """Return the end of a message on lines of events that could not be read; empty if there are none."""
    return f" ({lines} line{'s' * (lines > 1)} of events could not be read and were dropped)" if lines else ""


@dataclass(frozen=True, kw_only=True)
class ScriptCommand:
    """The user's training script as torchrun takes it."""

    script: str
    """Path of a Python file, or a module's name when ``is_module``."""
    args: tuple[str, ...] = ()
    is_module: bool = False
    cwd: str
    """Working directory of the script."""
    config_path: str
    """The user's DeepSpeed config file; an argument that names it is replaced by the path of the trial's own."""
    arg_mappings: Mapping[str, str] = field(default_factory=dict)
    """Key of the DeepSpeed config -> option of the script that is set to its value."""
    batch_source: Mapping[str, Any] = field(default_factory=dict)
    """What the script's batch size follows by, apart from its options: see ``runtime/adapt/batch_sources.py``."""


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """One launch: a configuration and the steps to run it for."""

    launch_id: str
    """Unique name, also the name of the run directory (``trial-0007``, ``trial-0007-retry-1``, ``profile``)."""
    purpose: str
    """``profile``, ``trial``, ``confirm`` or ``full`` (to the end, nothing measured or stopped early)."""
    command: ScriptCommand
    ds_config: Mapping[str, Any]
    """The whole DeepSpeed config of the launch, ready to train with."""
    overlay: Mapping[str, Any]
    """Laid over whatever config the script passes to ``deepspeed.initialize``; None removes a key."""
    slots: int
    """Ranks to start, one per GPU (or CPU rank)."""
    start_profile_step: int = 3
    """First global step (from 1) that counts; the steps before it are warm-up."""
    end_profile_step: int = 5
    """Last global step that counts; every rank leaves after it."""
    device_memory_bytes: int | None = None
    """What one rank may allocate; None for all there is."""
    timeout_s: float | None = None
    """Longest duration of the launch; None for no limit."""
    stall_s: float = 600.0
    """Longest time without an event from any rank before the launch counts as stalled; until it trains, CPU time and
    I/O of its processes extend it."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables added for the launch."""
    isolation: str = "off"
    """How the user's files are protected: ``auto``, ``python`` or ``off`` (``runtime/isolation/world.py``)."""
    writable: tuple[str, ...] = ()
    """Files and folders that the launch may change all the same."""


@dataclass(frozen=True, kw_only=True)
class LaunchReport(Record):
    """Result of a launch whose processes are gone and whose devices are free."""

    launch_id: str
    outcome: Outcome
    message: str
    """One line for the user: what happened, where, and the remedy if there is one."""
    exit_code: int | None
    """Exit code of the launch command (negative: signal); None if it never ran or the launcher ended it, as it does
    once all ranks have recorded their end."""
    error_excerpt: str
    """Last lines of the traceback of the rank that failed first; empty without a failure."""
    missing_bytes: int | None
    """Bytes of the allocation that failed first; None if unknown."""
    log_path: str
    """Path of the full log of the rank concerned, for the user to open."""
    command: tuple[str, ...]
    """The launch command, without secrets."""
    host: str
    devices: tuple[int, ...]
    """Device indices used; CPU ranks count from 0."""
    pids: tuple[int, ...]
    started_at: float
    """Unix time."""
    startup_s: float
    """From the start to the first step boundary, to the end if there is none."""
    measured_s: float
    """From the first step boundary to the last event of a rank, including a step that failed."""
    exit_s: float
    """From the last event of a rank until all processes are gone and the devices free."""
    conditions: Conditions = field(default_factory=Conditions)
    """What went on beside it while its steps were measured; empty where that was not looked at."""

    @property
    def cause(self) -> str:
        """The message without rank that failed first and dropped lines, which may differ from launch to launch."""
        return _DROPPED.sub("", _RANK.sub("", self.message))

    @property
    def failed(self) -> bool:
        """Whether it was neither measured nor pruned."""
        return self.outcome not in (Outcome.MEASURED, Outcome.PRUNED)

    @property
    def failure_in_words(self) -> str:
        """The cause, and the last line of the error where the cause does not say it."""
        last = _RANK.sub("", self.error_excerpt.strip().rpartition("\n")[2].strip())
        return self.cause if last in self.cause else f"{self.cause} ({last})"

    @property
    def held_s(self) -> float:
        """Seconds for which the devices were held; ``startup_s`` covers them all if no step was measured."""
        return self.startup_s + self.measured_s + self.exit_s if self.measured_s > 0 else self.startup_s


@dataclass(frozen=True, kw_only=True)
class LaunchUpdate:
    """An update from a launcher; one of the subclasses."""

    launch_id: str


@dataclass(frozen=True, kw_only=True)
class Observed(LaunchUpdate):
    """A rank wrote an event."""

    event: Event


@dataclass(frozen=True, kw_only=True)
class Settled(LaunchUpdate):
    """The outcome of the launch is final, though its processes have not ended or its devices are not free yet.

    Optional; precedes ``Finished``, so that the next launch can be chosen meanwhile.
    """

    report: LaunchReport
    """As in ``Finished``, except ``exit_s``, which is not known yet."""


@dataclass(frozen=True, kw_only=True)
class Finished(LaunchUpdate):
    """The launch is over; its last update."""

    report: LaunchReport


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A process or tuner that occupies a slot."""

    device: str
    """Name of the slot for the user, such as ``GPU 1``."""
    who: str
    """Description such as ``process 4711 (python, user anna)``, constant while the holder is the same."""
    used_bytes: int | None = None
    """Device memory that it uses; None if unknown."""
    since: float = 0.0
    """Unix time at which another tuner took the slot for its present launch; 0 for other holders."""
    own: bool = False
    """Whether it is a launch of the same launcher."""


class SlotsBusyError(RuntimeError):
    """A launch asked for more slots than are free; another tuner on the machine may have been faster."""


class Launcher(Protocol):
    """Starts launches and follows them. All methods are called from one thread."""

    @property
    def free_slots(self) -> int:
        """Slots that a launch could take now, or as soon as launches that are settled have ended."""
        ...

    @property
    def total_slots(self) -> int:
        """Slots this launcher manages, busy or free."""
        ...

    @property
    def waiting(self) -> Collection[str]:
        """Names of the launches that ``start`` took and that have no slots yet."""
        ...

    def holders(self) -> Sequence[Holder]:
        """Return what holds the slots that are not free, measured now, in the order of the slots."""
        ...

    def prepare(self, preload: Preload, *, operators: Sequence[str] = ()) -> None:
        """Prepare what later launches share.

        Args:
            preload: Modules that they import; a launcher may import them once, before a fork.
            operators: Class names of DeepSpeed's builders whose operators are compiled before the next launch.
        """
        ...

    def start(self, request: LaunchRequest) -> None:
        """Start a launch; where its slots are those of launches that are settled, once these have ended.

        Raises:
            SlotsBusyError: If fewer than ``request.slots`` slots are free; other tuners may have taken some since
                ``free_slots`` was read.
        """
        ...

    def poll(self, timeout_s: float) -> Sequence[LaunchUpdate]:
        """Return the updates since the last call; wait up to ``timeout_s`` seconds for one."""
        ...

    def stop(self, launch_id: str, *, outcome: Outcome = Outcome.PRUNED, message: str = "") -> None:
        """End a launch at once; its ``Finished`` comes with a later ``poll``. Unknown or ended launches are ignored."""
        ...

    def close(self) -> None:
        """End everything still running."""
        ...


@dataclass(frozen=True, kw_only=True)
class Rendezvous(Record):
    """The part of one node in a launch that spans several, or that runs on a node of a cluster alone."""

    nodes: int
    node_rank: int
    """Number of this node, from 0; its ranks follow those of the nodes before it."""
    address: str
    """Address of node 0, as the other nodes reach it."""
    port: int
    interface: str = ""
    """Network interface of this node on which the others are reached; empty for the libraries' own choice."""
