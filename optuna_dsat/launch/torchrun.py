"""Launches on this machine through torchrun."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from optuna_dsat.launch.agents import Agent
from optuna_dsat.launch.build_locks import remove_stale_locks
from optuna_dsat.launch.classify import LaunchFacts, StopReason, Verdict, classify
from optuna_dsat.launch.command import device_environment
from optuna_dsat.launch.devices import DeviceError, Devices, Nvml
from optuna_dsat.launch.operators import compile_operators
from optuna_dsat.launch.preload import Preload
from optuna_dsat.launch.processes import kernel_oom_kills, kill_leftovers, new_mark
from optuna_dsat.launch.protocol import (
    Finished,
    Holder,
    LaunchReport,
    LaunchRequest,
    LaunchUpdate,
    Observed,
    Settled,
    SlotsBusyError,
)
from optuna_dsat.launch.reports import report_of, report_of_unstarted
from optuna_dsat.launch.run_directory import OutputError, RunDirectory
from optuna_dsat.launch.run_files import Prepared, prepare, write_run_directory
from optuna_dsat.launch.running import FailedFork, RunningLaunch
from optuna_dsat.launch.slots import SlotLease, SlotPool
from optuna_dsat.launch.warm import WarmAgent, WarmLaunches, WarmOrder, WarmUnavailableError
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.events import RankFailed
from optuna_dsat.runtime.rank_process import EXIT_EVENTS_LOST

__all__ = ["TorchrunLauncher"]

_LOOK_S = 0.02
"""Pause between two looks at the event files."""

_FREE_DEADLINE_S = 60.0
"""After the last process is gone, a GPU's memory must be back within this time."""

_FULL_DISK_BYTES = 2**20
"""With less than this left, a rank that died without a record is taken to have found the disk full."""

_PERHAPS_BY_FORKING = frozenset(
    {
        Outcome.COMMUNICATION_ERROR,
        Outcome.INVALID_CONFIG,  # what fails within deepspeed.initialize, CUDA's refusal of a fork among it
        Outcome.SCRIPT_ERROR,
        Outcome.STALLED,
        Outcome.TIMEOUT,
    }
)
"""Outcomes of a forked launch that may have another cause than the script, as long as none has trained yet."""


class TorchrunLauncher:
    """Starts launches on this machine, each ``torchrun`` in a session of its own, and follows its event files.

    Implements the ``Launcher`` protocol. ``start`` must be called from a thread that lives as long as the launches: the
    kernel ends a launch with the thread that started it, and so with a tuner that is killed.

    Args:
        output_dir: Where the run directories go, one per launch.
        devices: The devices to use; GPUs that other processes use are left alone.
        max_slots: Use no more than this many of them at a time; None for all.
        nvml: NVML to ask about GPUs; None for the machine's.
        base_env: Environment that launches inherit from; None for this process's own.
        warm: Whether launches are forked from a process that has the heavy modules imported (``launch/warm.py``), as
            long as that works.
        on_notice: Told what people should know of how launches run.

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
    ) -> None:
        self._output_dir = Path(output_dir)
        self._pool = SlotPool(devices, max_slots=max_slots, nvml=nvml, on_notice=self._notice)
        self._base_env = dict(os.environ if base_env is None else base_env)
        self._running: dict[str, RunningLaunch] = {}
        self._withheld: list[RunningLaunch] = []
        self._waiting: dict[str, tuple[LaunchRequest, RunDirectory]] = {}
        """Launches that start when those that are settled have ended."""
        self._unstarted: list[LaunchReport] = []
        """Of launches that were stopped before they had started."""
        self._warm = WarmLaunches(self._output_dir / "warm.log")
        self._forks = warm
        """Whether launches are forked, as long as that works."""
        self._on_notice = on_notice
        self._noticed: set[str] = set()

    @property
    def free_slots(self) -> int:
        """Slots that a launch could take now, or as soon as launches that are settled have ended."""
        self._recheck_withheld()
        waiting = sum(request.slots for request, _ in self._waiting.values())
        return max(0, self._pool.free + self._ending_slots() - waiting)

    def _ending_slots(self) -> int:
        return sum(launch.request.slots for launch in self._running.values() if launch.settled_as is not None)

    @property
    def total_slots(self) -> int:
        """Slots this launcher manages, busy or free."""
        return self._pool.total

    @property
    def waiting(self) -> Collection[str]:
        """Names of the launches that ``start`` took and that have no slots yet."""
        return tuple(self._waiting)

    def holders(self) -> Sequence[Holder]:
        """Return what holds the slots that are not free, measured now, in the order of the slots."""
        return self._pool.holders()

    def run_directory(self, launch_id: str) -> RunDirectory:
        """Return the directory of a launch."""
        return RunDirectory(self._output_dir.resolve() / launch_id)

    def start(self, request: LaunchRequest) -> None:
        """Start a launch; where its slots are those of launches that are settled, once these have ended.

        Raises:
            SlotsBusyError: If fewer than ``request.slots`` slots are free.
            ValueError: If the purpose is ``full`` (see ``run_full``) or the name is in use.
            OutputError: If the run directory cannot be written.
        """
        if request.purpose == "full":
            raise ValueError("A full run is in the foreground and is not followed: call run_full().")
        if request.launch_id in self._running or request.launch_id in self._waiting:
            raise ValueError(f"launch_id is unique; {request.launch_id!r} is running.")
        if self._ending_slots() and self._pool.free < request.slots <= self.free_slots:
            self._waiting[request.launch_id] = (request, write_run_directory(request, self._output_dir))
            return
        self._start_on(self._pool.take(request.slots), request)

    def _start_on(self, lease: SlotLease, request: LaunchRequest, directory: RunDirectory | None = None) -> None:
        try:
            directory = write_run_directory(request, self._output_dir) if directory is None else directory
            self._running[request.launch_id] = self._spawn(request, directory, lease)
        except BaseException:
            self._pool.give_back(lease)
            raise

    def _start_waiting(self) -> None:
        """Start launches that waited for others to end, as far as slots are free."""
        for request, directory in list(self._waiting.values()):
            try:
                lease = self._pool.take(request.slots)
            except SlotsBusyError:
                return
            del self._waiting[request.launch_id]
            self._start_on(lease, request, directory)

    def prepare(self, preload: Preload, *, operators: Sequence[str] = ()) -> None:
        """Make ready what launches have in common: operators are compiled, and forked launches find modules imported.

        Args:
            preload: What launches import.
            operators: Class names of DeepSpeed's builders whose operators they may need.
        """
        if operators:
            self._notice(f"Compiling DeepSpeed's operators where that is still to do: {', '.join(operators)} ...")
            environ = device_environment(self._base_env, kind=self._pool.kind)
            for name, why in compile_operators(operators, environ).items():
                self._notice(f"DeepSpeed's {name} fails here, and so will what needs it: {why}.")
        if self._forks:
            with self._plain_instead():
                self._warm.prepare(preload)

    def _spawn(
        self, request: LaunchRequest, directory: RunDirectory, lease: SlotLease, *, plain: bool = False
    ) -> RunningLaunch:
        mark = new_mark()
        prepared = prepare(request, directory, lease, pool=self._pool, base_env=self._base_env, mark=mark)
        remove_stale_locks(self._base_env)
        oom_kills = kernel_oom_kills()
        agent = None if plain else self._fork(request, prepared, mark)
        # An agent that waits for the imports has not begun; time counts from here.
        started, started_unix = time.monotonic(), time.time()
        return RunningLaunch(
            request=request,
            directory=prepared.directory,
            lease=lease,
            mark=mark,
            agent=_start_torchrun(request, prepared) if agent is None else agent,
            preloaded=None if agent is None else agent.preload,
            command=prepared.shown,
            started=started,
            started_unix=started_unix,
            oom_kills_before=oom_kills,
        )

    def _fork(self, request: LaunchRequest, prepared: Prepared, mark: str) -> WarmAgent | None:
        """Return the agent of a forked launch, None where torchrun is to be started plainly."""
        if not self._forks:
            return None
        with self._plain_instead():
            return self._warm.start(
                WarmOrder(
                    launch_id=request.launch_id,
                    mark=mark,
                    arguments=prepared.arguments,
                    environ=prepared.environ,
                    cwd=request.command.cwd,
                    directory=prepared.directory,
                )
            )
        return None

    @contextlib.contextmanager
    def _plain_instead(self) -> Iterator[None]:
        """Go on with plain torchrun where nothing can be forked, and say so once."""
        try:
            yield
        except WarmUnavailableError as error:
            self._notice(f"Launches run by plain torchrun, which takes seconds longer for each: {error}.")

    def _notice(self, text: str) -> None:
        if text not in self._noticed:
            self._noticed.add(text)
            self._on_notice(text)

    def poll(self, timeout_s: float) -> Sequence[LaunchUpdate]:
        """Return what happened since the last call, waiting up to ``timeout_s`` for something to happen.

        Raises:
            DeviceError: If nothing runs and the devices of an ended launch are still not free.
            OutputError: If a launch failed because the disk is full; it has no outcome then, and can be repeated.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            updates = self._look()
            if updates or (now := time.monotonic()) >= deadline:
                return updates
            if not self._running:
                self._complain_of_withheld()
            time.sleep(min(_LOOK_S, deadline - now))

    def _look(self) -> list[LaunchUpdate]:
        updates: list[LaunchUpdate] = []
        for launch in list(self._running.values()):
            name = launch.request.launch_id
            updates += [Observed(launch_id=name, event=event) for event in launch.advance(time.monotonic())]
            if launch.settled and launch.settled_as is None and not self._is_on_trial(launch):
                launch.settled_as = self._settle(launch)
                updates.append(Settled(launch_id=name, report=launch.settled_as))
            if launch.gone_at is not None and (report := self._conclude(launch, launch.gone_at)) is not None:
                updates.append(Finished(launch_id=name, report=report))
        if self._waiting:
            self._start_waiting()
        updates += [Finished(launch_id=report.launch_id, report=report) for report in self._unstarted]
        self._unstarted.clear()
        return updates

    def _is_on_trial(self, launch: RunningLaunch) -> bool:
        """Whether a launch's end may yet show that launches cannot be forked here."""
        return launch.repeats is not None or (self._is_unproven(launch) and not launch.has_trained)

    def _is_unproven(self, launch: RunningLaunch) -> bool:
        """Whether a launch was forked, and none with the same modules imported has trained yet."""
        return self._forks and launch.preloaded is not None and not self._warm.has_proven(launch.preloaded)

    def _note_forked(self, launch: RunningLaunch) -> None:
        """Learn from a launch that was to be forked."""
        if launch.preloaded is None or not self._forks:
            return
        if not launch.is_forked:
            self._stop_forking(
                "Something imported before a fork initialises CUDA in torchrun's agent, which no fork survives: all "
                "launches run by plain torchrun, which takes seconds longer for each."
            )
        elif launch.has_trained:
            self._warm.prove(launch.preloaded)

    def _settle(self, launch: RunningLaunch) -> LaunchReport:
        facts = launch.facts(kernel_oom_kills())
        self._note_forked(launch)
        return report_of(launch, facts, classify(facts), note="", exit_s=0.0)

    def _conclude(self, launch: RunningLaunch, gone_at: float) -> LaunchReport | None:
        """Return the report of a launch whose processes are gone, None while its devices are not free."""
        now = time.monotonic()
        note = ""
        if not self._pool.is_free(launch.lease, launch.known):
            if now - gone_at < _FREE_DEADLINE_S:
                return None
            note = f" (not free after {_FREE_DEADLINE_S:g} s: {self._pool.describe_use(launch.lease)})"
            self._withheld.append(launch)
        else:
            self._pool.give_back(launch.lease)
        del self._running[launch.request.launch_id]
        remove_stale_locks(self._base_env, made_after=launch.started_unix)
        if launch.settled_as is not None:
            report = replace(
                launch.settled_as, message=launch.settled_as.message + note, exit_s=now - launch.last_event
            )
            with contextlib.suppress(OutputError):  # what was measured is in it; the next launch meets the same disk
                launch.directory.write_report(report)
            return report
        facts = launch.facts(kernel_oom_kills())
        verdict = classify(facts)
        if (failed := self._suspect(launch, verdict)) is not None and self._repeat_plainly(launch, failed):
            return None
        report = report_of(launch, facts, verdict, note=note, exit_s=now - launch.last_event)
        try:
            launch.directory.write_report(report)
        except OutputError:
            if _unrecorded(facts, verdict):
                raise
            return report  # what was measured is in it; the next launch meets the same disk
        if _unrecorded(facts, verdict) and self._output_is_full(facts):
            raise OutputError(
                f"No space left in {self._output_dir}: a launch could not write what it measured. "
                "Free some space, then resume."
            )
        return report

    def _suspect(self, launch: RunningLaunch, verdict: Verdict) -> FailedFork | None:
        """Return a launch that may have failed because it was forked: it never trained, and no other has yet."""
        self._note_forked(launch)
        if launch.repeats is not None and launch.has_trained and self._forks:
            self._give_up_forking(launch.repeats)
        if launch.preloaded is None or not self._is_unproven(launch) or launch.has_trained:
            return None
        if verdict.outcome not in _PERHAPS_BY_FORKING:
            return None
        return FailedFork(preloaded=launch.preloaded, message=verdict.message)

    def _give_up_forking(self, failed: FailedFork) -> None:
        """Go back to what is known to work: fewer modules imported before a fork, or plain torchrun."""
        if failed.preloaded != self._warm.preload:
            return  # launches side by side failed alike: the first has led back
        why = failed.message
        if self._warm.retreat():
            self._notice(
                "A launch failed when forked with all that your script imports ready, and trains by plain torchrun: "
                f"each imports that for itself from here on, as the profile launch did. Forked, it ended with: {why}"
            )
            return
        self._stop_forking(
            "The first launch failed when forked from a warm process and trains by plain torchrun: all run plainly, "
            f"which takes seconds longer for each. Forked, it ended with: {why}"
        )

    def _stop_forking(self, notice: str) -> None:
        self._warm.retire()
        self._forks = False
        self._notice(notice)

    def _repeat_plainly(self, launch: RunningLaunch, failed: FailedFork) -> bool:
        """Start a launch again by plain torchrun; return whether a slot was free for it."""
        try:
            lease = self._pool.take(launch.request.slots)
        except SlotsBusyError:
            return False
        again = self._spawn(launch.request, write_run_directory(launch.request, self._output_dir), lease, plain=True)
        again.repeats = failed
        self._running[launch.request.launch_id] = again
        return True

    def _output_is_full(self, facts: LaunchFacts) -> bool:
        lost = EXIT_EVENTS_LOST in facts.exit_codes.values()
        return lost or shutil.disk_usage(self._output_dir).free < _FULL_DISK_BYTES

    def _recheck_withheld(self) -> None:
        for launch in list(self._withheld):
            if self._pool.is_free(launch.lease, launch.known):
                self._withheld.remove(launch)
                self._pool.give_back(launch.lease)

    def _complain_of_withheld(self) -> None:
        self._recheck_withheld()
        if self._withheld:
            launch = self._withheld[0]
            raise DeviceError(
                f"The devices of {launch.request.launch_id} are not free although all its processes are gone "
                f"({self._pool.describe_use(launch.lease)}). See what holds them with nvidia-smi, then resume."
            )

    def stop(self, launch_id: str, *, outcome: Outcome = Outcome.PRUNED, message: str = "") -> None:
        """End a launch at once; its ``Finished`` comes with a later ``poll``. Unknown or ended launches are ignored."""
        launch = self._running.get(launch_id)
        if launch_id in self._waiting:
            request, directory = self._waiting.pop(launch_id)
            self._unstarted.append(report_of_unstarted(request, directory, outcome, message))
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
            kill_leftovers(launch.mark)
            launch.agent.wait()
            self._pool.give_back(launch.lease)
        for launch in self._withheld:
            self._pool.give_back(launch.lease)
        self._running.clear()
        self._waiting.clear()
        self._withheld.clear()
        self._warm.close()


def _start_torchrun(request: LaunchRequest, prepared: Prepared) -> Agent:
    with prepared.directory.agent_log.open("wb") as log:
        return subprocess.Popen(
            prepared.argv,
            cwd=request.command.cwd,
            env=prepared.environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _unrecorded(facts: LaunchFacts, verdict: Verdict) -> bool:
    """Whether a launch failed and no rank could say why."""
    recorded = any(isinstance(event, RankFailed) for events in facts.events.values() for event in events)
    return verdict.outcome is Outcome.SCRIPT_ERROR and not recorded
