"""The launcher: which launches wait, run, are settled or over, and their reports, wherever they run."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from optuna_dsat.config.differences import live_changes
from optuna_dsat.config.ds_config import GRADIENT_ACCUMULATION, MICRO_BATCH
from optuna_dsat.launch.classify import classify
from optuna_dsat.launch.isolation import describe_isolation
from optuna_dsat.launch.launch import Launch, WaitingLaunch
from optuna_dsat.launch.machine.devices import Devices
from optuna_dsat.launch.machine.nvml import Nvml
from optuna_dsat.launch.machine.slots import SlotPool
from optuna_dsat.launch.places.here import Here
from optuna_dsat.launch.protocol import (
    Finished,
    Holder,
    LaunchFacts,
    LaunchReport,
    LaunchRequest,
    LaunchUpdate,
    Observed,
    ScriptCommand,
    Settled,
    SlotsBusyError,
    SlotsTakenError,
    Verdict,
)
from optuna_dsat.launch.reports import complete_report, report_of, report_of_unstarted, write_report
from optuna_dsat.launch.run_directory import RunDirectory
from optuna_dsat.launch.warm.forking import Forking
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.agent.preload import Preload
from optuna_dsat.runtime.measure.live import NotLiveError

_NOT_OF_THE_CONFIGURATION = frozenset(
    {
        Outcome.COMMUNICATION_ERROR,
        Outcome.INVALID_CONFIG,
        Outcome.OUT_OF_DATA,
        Outcome.SCRIPT_ERROR,
        Outcome.STALLED,
    }
)
"""Outcomes of a continued launch that say nothing of its configuration."""

_BY_CHANCE = frozenset({Outcome.COMMUNICATION_ERROR, Outcome.STALLED})
"""Outcomes that, after steps with its settings, do not show that a script does not follow settings."""

_OF_BATCHES = re.compile("batch|tensors")
"""Matches failures that a micro-batch explains better than accumulation steps."""

_POLL_PAUSE_S = 0.02
"""Longest pause between two looks at the launches."""


class Places(Protocol):
    """The slots for launches: of this machine (``places/here.py``), or of nodes (``places/cluster.py``)."""

    @property
    def total_slots(self) -> int:
        """Slots, busy or free."""

    @property
    def free_slots(self) -> int:
        """Slots that no launch occupies."""

    def holders(self) -> Sequence[Holder]:
        """Return what occupies the slots that are not free, measured now."""

    def prepare(self, operators: Sequence[str]) -> None:
        """Set the operators that launches need compiled."""

    def admit(self, request: LaunchRequest) -> None:
        """Check that a launch fits, and prepare for the first one.

        Raises:
            ValueError: If it never fits.
        """

    def write(self, request: LaunchRequest) -> RunDirectory:
        """Write the run directory of a launch.

        Raises:
            OutputError: If it cannot be written.
        """

    def begin(self, waiting: WaitingLaunch) -> Launch:
        """Take slots and start a launch in them; its run directory is written if it is not yet.

        Raises:
            SlotsBusyError: If too few slots are free.
            OutputError: If the run directory cannot be written.
        """

    def continue_with(self, request: LaunchRequest, launch: Launch, changes: Mapping[str, Any]) -> Launch:
        """Have the ranks of a launch that wait for an order measure another trial.

        ``changes`` maps config keys to values.

        Raises:
            OutputError: If the run directory cannot be written.
            ScriptFailedError: If the launch changed the user's files.
        """

    def advance(self, pause_s: float) -> None:
        """Receive news about places and launches; wait up to ``pause_s`` seconds for some.

        Raises:
            DeviceError: If no slots will become free.
        """

    def tend(self, waiting: int) -> None:
        """Adapt to the number of launches that still wait for slots.

        Raises:
            DeviceError: If slots are not available for too long.
        """

    def ended(self, launch: Launch, *, note: str) -> None:
        """Forget a launch whose processes are gone; a note means that its devices are not free.

        Raises:
            ScriptFailedError: If it changed the user's files.
        """

    def close(self) -> None:
        """End everything, and give all slots back."""


class TorchrunLauncher:
    """Starts launches, each a ``torchrun``, and follows their event files (a ``Launcher``)."""

    def __init__(
        self, output_dir: Path | str, places: Places, *, forking: Forking, on_notice: Callable[[str], None]
    ) -> None:
        self._output_dir = Path(output_dir)
        self._places = places
        self._forking = forking
        self._notify = each_once(on_notice)
        self._running: dict[str, Launch] = {}
        self._waiting: dict[str, WaitingLaunch] = {}
        """Launches without slots in the order of their arrival, with their run directories."""
        self._parked: dict[str, Launch] = {}
        """Launches that are reported and whose ranks wait for another trial, or will after their last step."""
        self._ordered: dict[str, tuple[LaunchRequest, Mapping[str, Any]]] = {}
        """Parked launch -> the trial that its ranks measure next, and its changes."""
        self._unreported_s = 0.0
        """Seconds in which parked launches ended: part of the next report."""
        self._continues = True
        """Whether launches continue others; not once the script has shown that it follows nothing."""
        self._not_followed: set[str] = set()
        """Keys of the config that the script has shown not to follow in a running engine."""
        self._unstarted: list[LaunchReport] = []
        """Reports of launches that were stopped while they waited."""
        self._longest_start_s: float | None = None
        """Longest time from the start of a launch to its first step; None before one trained."""

    @property
    def free_slots(self) -> int:
        """Slots that a launch could take now, or as soon as launches that are settled have ended."""
        settled = sum(launch.request.slots for launch in self._running.values() if launch.settled_as is not None)
        settled += sum(launch.request.slots for name, launch in self._parked.items() if name not in self._ordered)
        waiting = sum(waiting.request.slots for waiting in self._waiting.values())
        return max(0, self._places.free_slots + settled - waiting)

    @property
    def total_slots(self) -> int:
        """Slots this launcher manages, busy or free."""
        return self._places.total_slots

    @property
    def waiting(self) -> Collection[str]:
        """Names of the launches that ``start`` took and that have no slots yet."""
        return (*self._waiting, *(request.launch_id for request, _ in self._ordered.values()))

    def holders(self) -> Sequence[Holder]:
        """Return what holds the slots that are not free, measured now, in the order of the slots."""
        return self._places.holders()

    def run_directory(self, launch_id: str) -> RunDirectory:
        """Return the directory of a launch."""
        return RunDirectory(self._output_dir.resolve() / launch_id)

    def prepare(self, preload: Preload, *, operators: Sequence[str] = ()) -> None:
        """Set the modules to import before a fork, and the operators that are compiled before the next launch."""
        self._places.prepare(operators)
        self._forking.prepare(preload)

    def start(self, request: LaunchRequest) -> None:
        """Start a launch; without free slots, as soon as there are some.

        Raises:
            SlotsBusyError: If fewer than ``request.slots`` slots are free.
            ValueError: If it never fits.
            OutputError: If the run directory cannot be written.
        """
        request = replace(request, continues=request.continues and self._continues)
        self._places.admit(request)
        if self._continue(request):
            return
        try:
            self._begin(WaitingLaunch(request=request))
        except SlotsTakenError:
            raise
        except SlotsBusyError:
            if request.slots > self.free_slots:
                raise
            self._waiting[request.launch_id] = WaitingLaunch(request=request, directory=self._places.write(request))

    def _continue(self, request: LaunchRequest) -> bool:
        """Have ranks that wait for a trial measure this one; return whether any do, else have them all leave."""
        for name, launch in self._parked.items():
            changes = _changes_for(launch, request)
            if (
                changes is not None
                and not self._not_followed & changes.keys()
                and name not in self._ordered
                and launch.may_continue
            ):
                self._ordered[name] = request, changes
                return True
        self._dismiss()
        return False

    def _begin(self, waiting: WaitingLaunch) -> None:
        launch = self._places.begin(waiting)
        launch.longest_start_s = self._longest_start_s
        self._running[waiting.request.launch_id] = launch

    def poll(self, timeout_s: float) -> Sequence[LaunchUpdate]:
        """Return what happened since the last call, waiting up to ``timeout_s`` for something to happen.

        Raises:
            ClusterError: If nodes do not meet the study's requirements, or the cluster refuses a place.
            DeviceError: If no slots will become free, or not for too long.
            OutputError: If a launch failed because the disk is full; it has no outcome then, and can be repeated.
        """
        deadline = time.monotonic() + timeout_s
        pause_s = 0.0
        self._dismiss()
        while True:
            self._places.advance(pause_s)
            updates = self._advance()
            if updates or (now := time.monotonic()) >= deadline:
                return updates
            pause_s = min(_POLL_PAUSE_S, deadline - now)

    def _advance(self) -> list[LaunchUpdate]:
        updates: list[LaunchUpdate] = []
        for name, launch in list(self._running.items()):
            now = time.monotonic()
            updates += [Observed(launch_id=name, event=event) for event in launch.advance(now)]
            if launch.settled and launch.settled_as is None and not self._forking.may_repeat(launch):
                launch.settled_as = self._settled_report(launch)
                if launch.may_continue and not launch.log.has_failed_with(Outcome.OUT_OF_MEMORY):
                    updates.append(Finished(launch_id=name, report=self._park(launch)))
                    continue
                updates.append(Settled(launch_id=name, report=launch.settled_as))
            if launch.gone_at is not None and (note := launch.processes.release(now)) is not None:
                report = self._conclude(launch, note)
                if report is not None:
                    updates.append(Finished(launch_id=name, report=report))
        for name, launch in list(self._parked.items()):
            self._follow_parked(name, launch)
        self._start_waiting()
        self._places.tend(len(self._waiting))
        unstarted, self._unstarted = self._unstarted, []
        return [*updates, *(Finished(launch_id=report.launch_id, report=report) for report in unstarted)]

    def _park(self, launch: Launch) -> LaunchReport:
        """Report a launch whose ranks may measure another trial, and keep it until they do or have left."""
        name = launch.request.launch_id
        self._parked[name] = self._running.pop(name)
        self._note_start(launch)
        settled = launch.settled_as or self._settled_report(launch)
        exit_s, self._unreported_s = self._unreported_s, 0.0
        return complete_report(settled, launch.directory, note="", exit_s=exit_s)

    def _dismiss(self) -> None:
        """Have parked launches leave for which no trial was started since they were reported."""
        for name, launch in self._parked.items():
            if name not in self._ordered and launch.may_continue:
                launch.leave()

    def _follow_parked(self, name: str, launch: Launch) -> None:
        now = time.monotonic()
        launch.advance(now)
        ordered = self._ordered.get(name)
        if ordered is not None and launch.waits:
            request, changes = ordered
            continued = self._places.continue_with(request, launch, changes)
            del self._parked[name], self._ordered[name]
            continued.longest_start_s = self._longest_start_s
            self._running[request.launch_id] = continued
        elif launch.gone_at is not None and (note := launch.processes.release(now)) is not None:
            del self._parked[name]
            self._places.ended(launch, note=note)
            self._unreported_s += launch.left_s(now)
            if ordered is not None:  # its ranks died before they had the order
                del self._ordered[name]
                self._waiting[ordered[0].launch_id] = WaitingLaunch(request=ordered[0])

    def _start_waiting(self) -> None:
        while self._waiting:
            name = next(iter(self._waiting))
            waiting = self._waiting.pop(name)
            try:
                self._begin(waiting)
            except SlotsBusyError:
                self._waiting = {name: waiting, **self._waiting}
                return

    def _settled_report(self, launch: Launch) -> LaunchReport:
        facts = launch.facts()
        self._forking.learn_from(launch)
        return self._report(launch, facts, classify(facts), note="", exit_s=0.0)

    def _report(
        self, launch: Launch, facts: LaunchFacts, verdict: Verdict, *, note: str, exit_s: float
    ) -> LaunchReport:
        if launch.request.isolation != "off":
            self._notify(describe_isolation(launch.conditions))
        report = report_of(launch, facts, verdict, note=note, exit_s=exit_s)
        if not launch.root or report.outcome not in _NOT_OF_THE_CONFIGURATION:
            return report
        if not (report.outcome in _BY_CHANCE and launch.log.last_step):
            changes = {} if report.outcome is Outcome.OUT_OF_DATA else launch.changes  # of any setting
            self._learn_limit(changes, re.sub(rf"^{NotLiveError.__name__}[^:]*: ", "", report.cause))
        return replace(report, afresh=True)

    def _conclude(self, launch: Launch, note: str) -> LaunchReport | None:
        """Return the report of a launch that is over; None if it is repeated by plain torchrun."""
        name = launch.request.launch_id
        del self._running[name]
        exit_s = time.monotonic() - launch.log.last_event
        exit_s, self._unreported_s = exit_s + self._unreported_s, 0.0
        self._note_start(launch)
        self._places.ended(launch, note=note)
        if launch.settled_as is not None:
            return complete_report(launch.settled_as, launch.directory, note=note, exit_s=exit_s)
        facts = launch.facts()
        verdict = classify(facts)
        if (failed := self._forking.suspect(launch, verdict)) is not None:
            request = replace(launch.request, continues=False)  # its end shows whether the fork was the cause
            again = WaitingLaunch(request=request, directory=self._places.write(request), repeats=failed)
            self._waiting = {name: again, **self._waiting}
            return None
        report = self._report(launch, facts, verdict, note=note, exit_s=exit_s)
        write_report(report, launch.directory, facts=facts, output_dir=self._output_dir)
        return report

    def _learn_limit(self, changes: Mapping[str, Any], why: str) -> None:
        """Stop changing the setting in running engines that most likely made a continued launch fail."""
        keys = (MICRO_BATCH, GRADIENT_ACCUMULATION) if _OF_BATCHES.search(why) else (GRADIENT_ACCUMULATION, MICRO_BATCH)
        named = (key for key in changes if key.rpartition(".")[2] in why)
        key = next((key for key in (*named, *keys) if key in changes), None)
        what = "" if key is None else f" with another {key}"
        if key is None:
            self._continues = False
        else:
            self._not_followed.add(key)
        self._notify(f"Trials{what} are launched one by one, as one in a running engine failed: {why}.")

    def _note_start(self, launch: Launch) -> None:
        if launch.log.first_step is not None and not launch.root:
            self._longest_start_s = max(self._longest_start_s or 0.0, launch.log.first_step - launch.started)

    def stop(self, launch_id: str, *, outcome: Outcome = Outcome.PRUNED, message: str = "") -> None:
        """End a launch at once; its ``Finished`` comes with a later ``poll``. Unknown or ended launches are ignored."""
        name = next((name for name, (request, _) in self._ordered.items() if request.launch_id == launch_id), "")
        if launch_id in self.waiting:
            request = self._ordered.pop(name)[0] if name else self._waiting.pop(launch_id).request
            self._unstarted.append(report_of_unstarted(request, self.run_directory(launch_id), outcome, message))
        elif (launch := self._running.get(launch_id)) is not None:
            launch.end(Verdict(outcome=outcome, message=message))

    def close(self) -> None:
        """End everything still running, and wait until its processes on this machine are gone."""
        self._places.close()
        for launch in (*self._running.values(), *self._parked.values()):
            launch.shorten_logs()
        for held in (self._running, self._waiting, self._parked, self._ordered):
            held.clear()


def local_launcher(
    output_dir: Path | str,
    *,
    devices: Devices,
    max_slots: int | None = None,
    nvml: Nvml | None = None,
    base_env: Mapping[str, str] | None = None,
    warm: bool = False,
    own_files: Collection[str] = (),
    on_notice: Callable[[str], None] = lambda _: None,
    on_phase: Callable[[str], None] = lambda _: None,
) -> TorchrunLauncher:
    """Return a launcher for this machine.

    ``start`` must be called from a thread that lives as long as the launches: the kernel ends a launch with the thread
    that started it, and so with a tuner that is killed. With ``warm``, launches are forked from a process that has the
    heavy modules imported, as long as that works. ``own_files`` are absolute paths of files that the tuner writes
    outside of ``output_dir``, such as its database. ``on_phase`` gets the name of a long activity other than a launch,
    and nothing once it is over.

    Raises:
        UsageError: If ``max_slots`` is less than 1.
        DeviceError: If there are GPUs but NVML does not answer.
    """
    notify = each_once(on_notice)
    forking = Forking(Path(output_dir) / "warm.log", enabled=warm, on_notice=notify, on_phase=on_phase)
    here = Here(
        Path(output_dir),
        pool=SlotPool(devices, max_slots=max_slots, nvml=nvml, on_notice=notify),
        forking=forking,
        base_env=dict(os.environ if base_env is None else base_env),
        own_files=own_files,
        on_notice=notify,
        on_phase=on_phase,
    )
    return TorchrunLauncher(output_dir, here, forking=forking, on_notice=notify)


def _changes_for(launch: Launch, request: LaunchRequest) -> Mapping[str, Any] | None:
    """Return the changes of a running engine that a trial needs; None if it needs another launch.

    It does for another engine, and where the next steps have other inputs than the first steps of a launch.
    """
    running = launch.request
    if request.purpose != "trial" or not request.continues:
        return None
    same = ("slots", "device_memory_bytes", "env", "isolation", "writable")
    if any(getattr(running, name) != getattr(request, name) for name in same):
        return None
    if _without_batch(running.command) != _without_batch(request.command):
        return None
    changes = live_changes(running.ds_config, request.ds_config)
    if changes is None or launch.log.inputs_change:
        return None
    if request.command.batch_source.get("kind") == "held":  # the script makes its batches whatever the config says
        fed = launch.log.micro_batches
        if len(fed) > 1 or (MICRO_BATCH in changes and fed != {changes[MICRO_BATCH]}):
            return None
    return changes


def _without_batch(command: ScriptCommand) -> ScriptCommand:
    """Return a command without the source of the batch size: a running engine's data loader is changed instead."""
    return replace(command, arg_mappings={}, batch_source={"rows": command.batch_source.get("rows")})


def each_once(notify: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that passes each text on the first time only."""
    notified: set[str] = set()

    def notify_once(text: str) -> None:
        if text and text not in notified:
            notified.add(text)
            notify(text)

    return notify_once
