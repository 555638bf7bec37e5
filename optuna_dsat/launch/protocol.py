"""The interface between tuner and launchers.

A launcher may run on other machines than the tuner: requests, updates and reports are plain values, never handles.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from optuna_dsat.launch.conditions import Conditions
from optuna_dsat.launch.preload import Preload
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.events import Event

__all__ = [
    "Finished",
    "Holder",
    "LaunchReport",
    "LaunchRequest",
    "LaunchUpdate",
    "Launcher",
    "Observed",
    "ScriptCommand",
    "Settled",
    "SlotsBusyError",
    "dropped_in_words",
    "is_launch_id",
]

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
    """What the script's batch size follows by, apart from its options: see ``optuna_dsat.runtime.batch_sources``."""


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
    """How the user's files are protected from the launch: ``auto``, ``python`` or ``off`` (``runtime/world.py``)."""
    writable: tuple[str, ...] = ()
    """Files and folders that the launch may change all the same."""


@dataclass(frozen=True, kw_only=True)
class LaunchReport:
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
