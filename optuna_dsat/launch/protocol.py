"""What tuner and launchers say to each other.

A launcher may run on other machines than the tuner's: requests, updates and reports are plain values, never handles.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

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
]


@dataclass(frozen=True, kw_only=True)
class ScriptCommand:
    """The user's training script, as it would be given to torchrun."""

    script: str
    """Path of a Python file, or a module's name when ``is_module``."""
    args: tuple[str, ...] = ()
    is_module: bool = False
    cwd: str
    """Working directory the script expects."""
    config_path: str
    """The user's DeepSpeed config file; an argument that names it is pointed to the trial's own file."""
    arg_mappings: Mapping[str, str] = field(default_factory=dict)
    """Key of the DeepSpeed config -> option of the script that follows it."""


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """One launch: a configuration and how long to run it."""

    launch_id: str
    """Unique name, also the name of the run directory (``trial-0007``, ``trial-0007-retry-1``, ``profile``)."""
    purpose: str
    """``profile``, ``trial``, ``confirm`` or ``full`` (to the end, nothing measured or stopped early)."""
    command: ScriptCommand
    ds_config: Mapping[str, Any]
    """The whole DeepSpeed config of the launch, ready to train with."""
    overlay: Mapping[str, Any]
    """What is laid over whatever config the script passes to ``deepspeed.initialize``; a None removes a key."""
    slots: int
    """Ranks to start, one per GPU (or CPU rank)."""
    start_profile_step: int = 3
    """First global step (from 1) that counts; the steps before it are warm-up."""
    end_profile_step: int = 5
    """Last global step that counts; every rank leaves after it."""
    device_memory_bytes: int | None = None
    """What one rank may allocate; None for all there is."""
    timeout_s: float | None = None
    stall_s: float = 600.0
    """Longest silence of all ranks before the launch is called stalled; work of its processes counts as a sign of life
    until it trains."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables added for the launch."""


@dataclass(frozen=True, kw_only=True)
class LaunchReport:
    """What became of a launch, once all its processes are gone and its devices are free."""

    launch_id: str
    outcome: Outcome
    message: str
    """One line for people: what happened, where, and what to do if something can be done."""
    exit_code: int | None
    """Exit code of the launch command (negative: signal), None where it never ran, or the launcher ended it: also once
    all ranks had said how they ended."""
    error_excerpt: str
    """Last lines of the traceback of the rank that failed first, empty without a failure."""
    missing_bytes: int | None
    """Bytes of the allocation that failed first, where known."""
    log_path: str
    """Where the full log of the rank concerned lies, for people to open."""
    command: tuple[str, ...]
    """The launch command, without secrets."""
    host: str
    devices: tuple[int, ...]
    """Device indices used; CPU ranks count from 0."""
    pids: tuple[int, ...]
    started_at: float
    """Unix time."""
    startup_s: float
    """From start to the first boundary of a step (or to the end, where none came)."""
    measured_s: float
    """From the first step boundary to the last event of a rank: a step that fails counts."""
    exit_s: float
    """From the last event of a rank to all processes gone and devices free."""

    @property
    def held_s(self) -> float:
        """Seconds for which the devices were held. Where no step was measured, start-up runs to the very end."""
        return self.startup_s + self.measured_s + self.exit_s if self.measured_s > 0 else self.startup_s


@dataclass(frozen=True, kw_only=True)
class LaunchUpdate:
    """Something a launcher observed."""

    launch_id: str


@dataclass(frozen=True, kw_only=True)
class Observed(LaunchUpdate):
    """A rank wrote an event."""

    event: Event


@dataclass(frozen=True, kw_only=True)
class Settled(LaunchUpdate):
    """What became of the launch is known and stays so, though its processes still end and its devices are not free yet.

    Comes before ``Finished``, where it comes at all, so that the next launch can be chosen meanwhile.
    """

    report: LaunchReport
    """As in ``Finished``, but for ``exit_s``, which is not known yet."""


@dataclass(frozen=True, kw_only=True)
class Finished(LaunchUpdate):
    """The launch is over; always the last update of a launch."""

    report: LaunchReport


@dataclass(frozen=True, kw_only=True)
class Holder:
    """What keeps a launch off a slot at present."""

    device: str
    """What people call the slot, such as ``GPU 1``."""
    who: str
    """Such as ``process 4711 (python, user anna)``: the same for as long as it is the same one."""
    used_bytes: int | None = None
    """Memory of the device that it uses, None where that is not known."""
    since: float = 0.0
    """Unix time since when another tuner holds the slot for its present launch; 0 for others."""
    own: bool = False
    """Whether it is a launch of the same launcher, which ends by itself."""


class SlotsBusyError(RuntimeError):
    """A launch asked for more slots than are free now; another tuner on the machine may have been faster."""


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
        """Make ready what the coming launches have in common.

        Args:
            preload: What they import; a launcher may have it imported beforehand.
            operators: Class names of DeepSpeed's builders whose operators they may need, compiled.
        """
        ...

    def start(self, request: LaunchRequest) -> None:
        """Start a launch; where its slots are those of launches that are settled, once these have ended.

        Raises:
            SlotsBusyError: If fewer than ``request.slots`` slots are free; ``free_slots`` may have said otherwise, for
                other tuners take slots, too.
        """
        ...

    def poll(self, timeout_s: float) -> Sequence[LaunchUpdate]:
        """Return what happened since the last call, waiting up to ``timeout_s`` for something to happen."""
        ...

    def stop(self, launch_id: str, *, outcome: Outcome = Outcome.PRUNED, message: str = "") -> None:
        """End a launch at once; its ``Finished`` comes with a later ``poll``. Unknown or ended launches are ignored."""
        ...

    def close(self) -> None:
        """End everything still running."""
        ...
