"""Launches on this machine through torchrun."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from optuna_dsat.launch.agent.command import device_environment, write_run_directory
from optuna_dsat.launch.agent.run import DeviceReturn, spawn
from optuna_dsat.launch.classify import classify
from optuna_dsat.launch.facts import StopReason
from optuna_dsat.launch.folder_changes import FolderWatch
from optuna_dsat.launch.isolation import why_no_overlay
from optuna_dsat.launch.launch import FailedFork, RunningLaunch
from optuna_dsat.launch.machine.devices import Devices, Nvml
from optuna_dsat.launch.machine.journal import LeftoverWatch, TunerNotes, remove_noted
from optuna_dsat.launch.machine.operators import (
    COMMUNICATION,
    BuildWatch,
    compile_operators,
    operator_name,
    remove_stale_locks,
)
from optuna_dsat.launch.machine.processes import kernel_oom_kills, kill_leftovers, new_mark
from optuna_dsat.launch.machine.slots import SlotLease, SlotPool
from optuna_dsat.launch.protocol import (
    Finished,
    Holder,
    LaunchReport,
    LaunchRequest,
    LaunchUpdate,
    Observed,
    Preload,
    Settled,
    SlotsBusyError,
)
from optuna_dsat.launch.reports import complete_report, isolation_notice, report_of, report_of_unstarted, write_report
from optuna_dsat.launch.run_directory import RunDirectory
from optuna_dsat.launch.warm.forking import Forking
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.isolation.world import NEW_CACHES

__all__ = ["StartQueue", "TorchrunLauncher"]


class StartQueue:
    """Requests in the order of their arrival, each with its run directory written."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[LaunchRequest, RunDirectory]] = {}
        self._stopped: list[LaunchReport] = []

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the waiting launches."""
        return tuple(self._waiting)

    @property
    def slots(self) -> int:
        """Slots that the waiting launches need."""
        return sum(request.slots for request, _ in self._waiting.values())

    def add(self, request: LaunchRequest, directory: RunDirectory) -> None:
        """Append a launch."""
        self._waiting[request.launch_id] = (request, directory)

    def take_startable(self, pool: SlotPool) -> Iterator[tuple[SlotLease, LaunchRequest, RunDirectory]]:
        """Remove and yield launches with the slots taken for them, until too few slots are free."""
        for request, directory in list(self._waiting.values()):
            try:
                lease = pool.take(request.slots)
            except SlotsBusyError:
                return
            del self._waiting[request.launch_id]
            yield lease, request, directory

    def stop(self, launch_id: str, *, outcome: Outcome, message: str) -> None:
        """Remove a launch if it waits; its report is among those of ``take_stopped``."""
        if launch_id in self._waiting:
            request, directory = self._waiting.pop(launch_id)
            self._stopped.append(report_of_unstarted(request, directory, outcome, message))

    def take_stopped(self) -> list[LaunchReport]:
        """Return the reports of launches stopped since the last call."""
        stopped, self._stopped = self._stopped, []
        return stopped

    def clear(self) -> None:
        """Forget all waiting launches."""
        self._waiting.clear()


_POLL_PAUSE_S = 0.02
"""Pause between two reads of the event files."""


class TorchrunLauncher:
    """Starts launches on this machine, each ``torchrun`` in a session of its own, and follows their event files.

    Implements the ``Launcher`` protocol. ``start`` must be called from a thread that lives as long as the launches: the
    kernel ends a launch with the thread that started it, and so with a tuner that is killed.

    Args:
        output_dir: Folder of the run directories, one per launch.
        devices: The devices to use; GPUs in use by other processes are not taken.
        max_slots: Most slots in use at a time; None for all.
        nvml: NVML to ask about GPUs; None for the machine's.
        base_env: Environment that launches inherit from; None for this process's own.
        warm: Whether launches are forked from a process that has the heavy modules imported
        (``launch/warm/server.py``), as
            long as that works.
        on_notice: Called with each new notice for the user.
        on_phase: Called with what takes long and is no launch, and with nothing once it is over.

    Raises:
        UsageError: If ``max_slots`` is less than 1.
        DeviceError: If there are GPUs but NVML does not answer.
    """

    def __init__(
        self,
        output_dir: Path | str,
        *,
        devices: Devices,
        max_slots: int | None = None,
        nvml: Nvml | None = None,
        base_env: Mapping[str, str] | None = None,
        warm: bool = False,
        on_notice: Callable[[str], None] = lambda _: None,
        on_phase: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._output_dir = Path(output_dir)
        self._notify = _each_once(on_notice)
        self._pool = SlotPool(devices, max_slots=max_slots, nvml=nvml, on_notice=self._notify)
        self._base_env = dict(os.environ if base_env is None else base_env)
        self._running: dict[str, RunningLaunch] = {}
        self._longest_start_s: float | None = None
        """Longest time from the start of a launch to its first step; None before one trained."""
        self._queue = StartQueue()
        self._changes = FolderWatch(self._output_dir)
        """Finds what a profile launch without overlays changes of the user's files."""
        self._device_return = DeviceReturn(self._pool)
        self._notes = TunerNotes(self._output_dir)
        self._leftovers = LeftoverWatch(self._base_env, on_notice=self._notify)
        self._on_phase = on_phase
        self._operators: Sequence[str] = ()
        self._forking = Forking(self._output_dir / "warm.log", enabled=warm, on_notice=self._notify, on_phase=on_phase)
        self._builds = BuildWatch(self._base_env, on_phase=on_phase)

    @property
    def free_slots(self) -> int:
        """Slots that a launch could take now, or as soon as launches that are settled have ended."""
        self._device_return.recheck()
        return max(0, self._pool.free + _settled_slots(self._running.values()) - self._queue.slots)

    @property
    def total_slots(self) -> int:
        """Slots this launcher manages, busy or free."""
        return self._pool.total

    @property
    def waiting(self) -> Collection[str]:
        """Names of the launches that ``start`` took and that have no slots yet."""
        return self._queue.names

    def holders(self) -> Sequence[Holder]:
        """Return what holds the slots that are not free, measured now, in the order of the slots."""
        return self._pool.holders()

    def run_directory(self, launch_id: str) -> RunDirectory:
        """Return the directory of a launch."""
        return RunDirectory(self._output_dir.resolve() / launch_id)

    def prepare(self, preload: Preload, *, operators: Sequence[str] = ()) -> None:
        """Set what is imported before a fork, and the operators that are compiled before the next launch.

        Args:
            preload: What launches import.
            operators: Class names of DeepSpeed's builders whose operators they may need.
        """
        self._operators = operators
        self._forking.prepare(preload)

    def _build_operators(self) -> None:
        """Compile what is wanted and not compiled yet: with the first launch, as that takes a process with torch."""
        wanted, self._operators = self._operators, ()
        if not wanted:
            return
        environ = device_environment(self._base_env, kind=self._pool.kind)
        for name, why in compile_operators(wanted, environ, on_phase=self._on_phase).items():
            means = "gloo alone is used" if name == COMMUNICATION else "what needs it will fail, too"
            self._notify(f"DeepSpeed's {operator_name(name)} cannot be built here, and {means}: {why}.")

    def start(self, request: LaunchRequest) -> None:
        """Start a launch; where its slots are those of launches that are settled, once these have ended.

        Raises:
            SlotsBusyError: If fewer than ``request.slots`` slots are free.
            ValueError: If the purpose is ``full`` (see ``run_full``) or the name is in use.
            OutputError: If the run directory cannot be written.
        """
        if request.purpose == "full":
            raise ValueError("A full run is in the foreground and is not followed: call run_full().")
        if request.launch_id in self._running or request.launch_id in self._queue.names:
            raise ValueError(f"launch_id is unique; {request.launch_id!r} is running.")
        self._build_operators()
        if _settled_slots(self._running.values()) and self._pool.free < request.slots <= self.free_slots:
            self._queue.add(request, self._write_run_directory(request))
            return
        self._start_on(self._pool.take(request.slots), request)

    def _write_run_directory(self, request: LaunchRequest) -> RunDirectory:
        return write_run_directory(request, self._output_dir, leavings=self._notes.begin())

    def _start_on(self, lease: SlotLease, request: LaunchRequest, directory: RunDirectory | None = None) -> None:
        try:
            directory = self._write_run_directory(request) if directory is None else directory
            self._spawn(request, directory, lease, forking=self._forking)
        except BaseException:
            self._pool.give_back(lease)
            raise

    def _spawn(
        self, request: LaunchRequest, directory: RunDirectory, lease: SlotLease, *, forking: Forking | None
    ) -> RunningLaunch:
        """Start the processes of a launch; interrupted, it leaves none of them, nor what they left."""
        mark = new_mark()
        if request.purpose == "profile" and request.isolation != "off":
            mounts = request.isolation == "auto" and not why_no_overlay(directory.root)
            if not mounts:
                self._changes.begin(request)
        try:
            launch = spawn(
                request, directory, lease, pool=self._pool, base_env=self._base_env, forking=forking, mark=mark
            )
            launch.longest_start_s = self._longest_start_s
            self._running[request.launch_id] = launch
        except BaseException:
            kill_leftovers(mark)
            if directory.leavings is not None:
                remove_noted(directory.leavings)
            raise
        return launch

    def poll(self, timeout_s: float) -> Sequence[LaunchUpdate]:
        """Return what happened since the last call, waiting up to ``timeout_s`` for something to happen.

        Raises:
            DeviceError: If nothing runs and the devices of an ended launch are still not free.
            OutputError: If a launch failed because the disk is full; it has no outcome then, and can be repeated.
        """
        deadline = time.monotonic() + timeout_s
        self._leftovers.check()
        while True:
            updates = self._advance()
            (self._builds.check if self._running else self._builds.end)()
            if updates or (now := time.monotonic()) >= deadline:
                return updates
            if not self._running:
                self._device_return.check()
            time.sleep(min(_POLL_PAUSE_S, deadline - now))

    def _advance(self) -> list[LaunchUpdate]:
        updates: list[LaunchUpdate] = []
        for launch in list(self._running.values()):
            name = launch.request.launch_id
            updates += [Observed(launch_id=name, event=event) for event in launch.advance(time.monotonic())]
            if launch.settled and launch.settled_as is None and not self._forking.may_repeat(launch):
                launch.settled_as = self._settled_report(launch)
                updates.append(Settled(launch_id=name, report=launch.settled_as))
            if launch.gone_at is not None and (report := self._conclude(launch, launch.gone_at)) is not None:
                updates.append(Finished(launch_id=name, report=report))
        for lease, request, directory in self._queue.take_startable(self._pool):
            self._start_on(lease, request, directory)
        updates += [Finished(launch_id=report.launch_id, report=report) for report in self._queue.take_stopped()]
        return updates

    def _settled_report(self, launch: RunningLaunch) -> LaunchReport:
        facts = launch.facts(kernel_oom_kills())
        self._forking.learn_from(launch)
        self._notify(isolation_notice(launch))
        return report_of(launch, facts, classify(facts), note="", exit_s=0.0)

    def _conclude(self, launch: RunningLaunch, gone_at: float) -> LaunchReport | None:
        """Return the report of a launch without processes; None if its devices are not free or it is repeated."""
        now = time.monotonic()
        note = self._device_return.release(launch, gone_at=gone_at)
        if note is None:
            return None
        del self._running[launch.request.launch_id]
        if launch.first_step is not None:
            self._longest_start_s = max(self._longest_start_s or 0.0, launch.first_step - launch.started)
        remove_stale_locks(self._base_env)
        exit_s = now - launch.last_event
        self._changes.check(launch)
        if launch.settled_as is not None:
            return complete_report(launch.settled_as, launch.directory, note=note, exit_s=exit_s)
        facts = launch.facts(kernel_oom_kills())
        verdict = classify(facts)
        if (failed := self._forking.suspect(launch, verdict)) is not None and self._repeat_plainly(launch, failed):
            return None
        self._notify(isolation_notice(launch))
        report = report_of(launch, facts, verdict, note=note, exit_s=exit_s)
        write_report(report, launch.directory, facts=facts, output_dir=self._output_dir)
        return report

    def _repeat_plainly(self, launch: RunningLaunch, failed: FailedFork) -> bool:
        """Start a launch again by plain torchrun; return whether its slots were free."""
        try:
            lease = self._pool.take(launch.request.slots)
        except SlotsBusyError:
            return False
        directory = self._write_run_directory(launch.request)
        self._spawn(launch.request, directory, lease, forking=None).repeats = failed
        return True

    def stop(self, launch_id: str, *, outcome: Outcome = Outcome.PRUNED, message: str = "") -> None:
        """End a launch at once; its ``Finished`` comes with a later ``poll``. Unknown or ended launches are ignored."""
        self._queue.stop(launch_id, outcome=outcome, message=message)
        launch = self._running.get(launch_id)
        if launch is not None:
            launch.end(StopReason(outcome=outcome, message=message))

    def close(self) -> None:
        """End everything still running, and wait until its processes are gone.

        Raises:
            TimeoutError: If processes outlive SIGKILL, which only an uninterruptible wait in the kernel explains.
        """
        for launch in self._running.values():
            launch.end(StopReason(outcome=Outcome.LOST, message="the tuner ended"))
        for launch in self._running.values():
            launch.finish()
            launch.clean_up()
            self._pool.give_back(launch.lease)
        self._device_return.close()
        self._running.clear()
        self._queue.clear()
        self._forking.close()
        self._notes.close()
        _remove_empty(self._output_dir / NEW_CACHES)
        self._leftovers.look()  # a tuner beside this one may have been killed just now, and nobody may start another


def _settled_slots(launches: Iterable[RunningLaunch]) -> int:
    """Return the slots that are free as soon as the processes of settled launches have ended."""
    return sum(launch.request.slots for launch in launches if launch.settled_as is not None)


def _remove_empty(folder: Path) -> None:
    """Remove the empty folders in a folder, and the folder if nothing is left."""
    with contextlib.suppress(OSError):
        for entry in (*folder.iterdir(), folder):
            with contextlib.suppress(OSError):
                entry.rmdir()


def _each_once(notify: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that passes each text on the first time only."""
    notified: set[str] = set()

    def notify_once(text: str) -> None:
        if text and text not in notified:
            notified.add(text)
            notify(text)

    return notify_once
