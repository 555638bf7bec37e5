"""One launch in flight: its events, its limits and its termination."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from optuna_dsat.config.ds_config import MICRO_BATCH, flatten
from optuna_dsat.launch.agent.command import write_run_directory
from optuna_dsat.launch.event_log import EventLog, LogLimit
from optuna_dsat.launch.machine.host import MAX_STALL_LIMITS, ActivityMonitor, ProcessUsage
from optuna_dsat.launch.protocol import Conditions, EndFacts, LaunchFacts, LaunchReport, LaunchRequest, Verdict
from optuna_dsat.launch.run_directory import RunDirectory
from optuna_dsat.launch.stacks import StackWatch, describe_stacks
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.agent.preload import Preload
from optuna_dsat.runtime.agent.processes import ProcessKey
from optuna_dsat.runtime.events import Event, RankFinished
from optuna_dsat.runtime.process import EXIT_LIMIT_S

_EXIT_GRACE_S = EXIT_LIMIT_S + 1.0
"""Time for ranks to exit after their last record, before they are killed: they end themselves at ``EXIT_LIMIT_S``."""

_FAILURE_GRACE_S = 2.0
"""Time for the other ranks to leave a record, after one failed for a reason that may lie with another."""

_EXPLAINED_GRACE_S = 0.3
"""The same after a rank failed first: others fail alike, and their record may say more."""

_AGENT_GRACE_S = 1.0
"""Time for torchrun to record exit codes, after a rank died without a record."""

_LAST_RANK_S = 30.0
"""Longest silence of the other ranks after one is done: all end at the same step."""

_STALLED_STEPS, _STALLED_STARTS, _LEAST_STALL_S = 20, 5, 30.0
"""Silence, in multiples of the longest step or, before the first step, of the longest start of an earlier launch, but
no less than the last, after which ranks that stand still are stalled."""


@dataclass(frozen=True, kw_only=True)
class FailedFork:
    """A forked launch that failed before it trained, when none with the same modules imported had trained."""

    preloaded: Preload
    message: str
    """Message of its outcome."""


@dataclass(frozen=True, kw_only=True)
class WaitingLaunch:
    """A launch to start."""

    request: LaunchRequest
    directory: RunDirectory | None = None
    """Its run directory; None before it is written."""
    repeats: FailedFork | None = None
    """The failed forked launch that it repeats by plain torchrun; None for any other launch."""


def lone_save(ends: Mapping[int, Event], *, slots: int) -> int | None:
    """Return the first rank that saved checkpoints more often than another; None if none did or a rank failed."""
    saves = {rank: end.saves for rank, end in ends.items() if isinstance(end, RankFinished)}
    more = [rank for rank, count in saves.items() if count > min(saves.values())]
    return min(more, default=None) if len(saves) == slots else None


class Processes(Protocol):
    """The processes of a launch: on this machine (``agent/run.py``), or on nodes (``places/place.py``)."""

    @property
    def host(self) -> str:
        """Name of the machine, or of the nodes."""

    @property
    def pid(self) -> int:
        """Process number of torchrun."""

    @property
    def code(self) -> int | None:
        """Exit code (negative: signal) of torchrun if it ended and was not killed by the launcher; None before."""

    @property
    def dead_ranks(self) -> Collection[int]:
        """Ranks whose process has ended."""

    @property
    def ranks(self) -> Collection[ProcessKey]:
        """The ranks seen so far."""

    @property
    def conditions(self) -> Conditions:
        """Load by other processes while the steps were measured, as far as it is known."""

    @property
    def end(self) -> EndFacts | None:
        """Facts of the end; None while a process lives."""

    def advance(self, now: float, read: Callable[[float], list[Event]]) -> list[Event]:
        """Look at the processes, then read the events: they include the last ones of the dead ranks."""

    def usage(self) -> Mapping[ProcessKey, ProcessUsage]:
        """Return the resources used by the ranks and all their descendants."""

    def ask_for_stacks(self) -> Collection[int]:
        """Have the ranks write their stacks to their logs; return all ranks."""

    def leave(self) -> None:
        """Order ranks that wait for another trial to leave."""

    def kill_ranks(self) -> None:
        """Kill everything but torchrun."""

    def kill_all(self) -> None:
        """Kill everything."""

    def sweep(self) -> bool:
        """Kill the remaining processes and clean up after them; return whether none was left."""

    def release(self, now: float) -> str | None:
        """Give the devices back once all processes are gone.

        Returns:
            The report's note on devices that are not free; None while they may still become free.
        """


@dataclass(kw_only=True)
class Launch:
    """One launch in flight: reads its events and ends its processes. Times are monotonic unless named otherwise."""

    request: LaunchRequest
    directory: RunDirectory
    processes: Processes
    devices: tuple[int, ...]
    """Index of each device."""
    command: tuple[str, ...]
    started: float
    started_unix: float
    preloaded: Preload | None = None
    """Imports of the process that it was forked from; None for a launch by plain torchrun."""
    repeats: FailedFork | None = None
    """The failed forked launch that this one repeats plainly, to find out whether the fork was the cause."""
    longest_start_s: float | None = None
    """Longest time from the start of an earlier launch to its first step; None if unknown."""
    root: str = ""
    """The launch that started its processes, if it continues another; empty if they are its own."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Changes of the running engine, if it continues another."""

    gone_at: float | None = field(default=None, init=False)
    """When the last process was seen to be gone; None while any lives."""
    stop_reason: Verdict | None = field(default=None, init=False)
    """Why the launcher ended it; None if it did not."""
    settled_as: LaunchReport | None = field(default=None, init=False)
    """Its report once the outcome is final; None before."""

    def __post_init__(self) -> None:
        self.log = EventLog(self.directory, slots=self.request.slots, started=self.started)
        self._activity = ActivityMonitor(limit_s=self.request.stall_s, started=self.started)
        ranks = range(self.request.slots)
        self._log_limit = LogLimit(
            path(rank) for rank in ranks for path in (self.directory.stdout, self.directory.stderr)
        )
        self._stacks = StackWatch(self.directory.log_dir)
        self._kill_ranks_at: float | None = None
        self._last_end: tuple[int, float] = 0, 0.0
        """Ranks that have left a record of their end, and the time at which the last of these records was read."""
        self._sweeping = False
        self._left_at: float | None = None
        """When its ranks were told to leave; None if they were not."""

    @property
    def pids(self) -> tuple[int, ...]:
        """Process numbers of torchrun and the ranks, in the order of the ranks."""
        starts = sorted(self.log.starts, key=lambda start: start.rank)
        return (self.processes.pid, *(start.pid for start in starts))

    @property
    def conditions(self) -> Conditions:
        """What went on beside it while its steps were measured, and how the user's files were protected."""
        starts = self.log.starts
        notes = sorted({start.isolation_note for start in starts if start.isolation_note})
        return replace(
            self.processes.conditions,
            isolation=starts[0].isolation if starts else "",
            isolation_note="; ".join(notes),
            lone_save=lone_save(self.log.ends, slots=self.request.slots),
        )

    @property
    def settled(self) -> bool:
        """Whether the outcome is final: all steps are done, it was stopped, or a rank is out of memory."""
        if self.stop_reason is not None or self.log.has_failed_with(Outcome.OUT_OF_MEMORY):
            return True
        return len(self.log.done) == self.request.slots

    @property
    def waits(self) -> bool:
        """Whether its ranks wait for an order: another trial, or to leave."""
        ends = self.log.ends.values()
        return (
            self.may_continue
            and len(ends) == self.request.slots
            and all(isinstance(end, RankFinished) and end.reason == "profile_done" for end in ends)
        )

    def leave(self) -> None:
        """End its ranks: without a signal if they wait for an order, else at once."""
        if not self.waits:
            self._start_sweep()
            return
        self._left_at = time.monotonic()
        self._last_end = len(self.log.ends), self._left_at  # their time to exit begins now
        self.processes.leave()

    @property
    def may_continue(self) -> bool:
        """Whether its ranks measure another trial after their last step, unless they are told to leave."""
        return self.request.continues and self._left_at is None and not self._sweeping

    @property
    def _is_nearly_done(self) -> bool:
        """Whether its ranks may continue, and come to their last step sooner than a launch starts."""
        steps, first = self.log.last_step, self.log.first_step
        if not self.may_continue or not steps or first is None or self.log.longest_step_s is None:
            return False
        start_s = self.longest_start_s or first - self.started
        return (self.request.end_profile_step - steps) * self.log.longest_step_s < start_s

    def advance(self, now: float) -> list[Event]:
        """Read new events and return them; check the limits and end what must end."""
        events = self.processes.advance(now, self.log.read)
        self._log_limit.check(now)
        if self.processes.code is not None:
            self._sweeping = True
        elif not self._sweeping:
            self._decide(now, {*self.processes.dead_ranks})
        if self._sweeping and self.processes.sweep():
            if self.gone_at is None:
                self.gone_at = now
                self.shorten_logs()
            events += self.log.read(now)
        return events

    def end(self, reason: Verdict) -> None:
        """Kill the launch without waiting; one that is already ending keeps its first reason.

        A trial that is pruned, or known well enough, leaves its ranks to their last step if they may take on another.
        """
        if self.stop_reason is None and not self._sweeping:
            self.stop_reason = reason
            if not (reason.outcome in (Outcome.PRUNED, Outcome.MEASURED) and self._is_nearly_done):
                self._start_sweep()
        elif reason.outcome in (Outcome.TIMEOUT, Outcome.STALLED):
            self._start_sweep()

    def continued(self, request: LaunchRequest, changes: Mapping[str, Any]) -> Launch:
        """Return the launch of another trial by the same processes, which begins now; its run directory is written."""
        folder, leavings = self.directory.root.parent, self.directory.leavings
        directory = write_run_directory(request, folder, leavings=leavings, changes=changes)
        directory.copy_command(self.directory)
        self.shorten_logs()
        return Launch(
            request=request,
            directory=directory,
            processes=self.processes,
            devices=self.devices,
            command=self.command,
            started=time.monotonic(),
            started_unix=time.time(),
            preloaded=self.preloaded,
            root=self.root or self.request.launch_id,
            changes=changes,
        )

    def left_s(self, now: float) -> float:
        """Return the seconds since its ranks were told to leave; 0 if they were not."""
        return 0.0 if self._left_at is None else now - self._left_at

    def shorten_logs(self) -> None:
        """Shorten logs that are too long; call it once all processes are gone, or wait for an order."""
        self._log_limit.close()

    def facts(self) -> LaunchFacts:
        """Return the observations of the launch, once it is over or settled."""
        micro_batch = self.request.ds_config.get(MICRO_BATCH)
        if self.request.purpose == "profile":
            micro_batch = None  # any batch will do: measurements are divided by the observed samples
        if self.request.command.batch_source.get("kind") == "held":
            micro_batch = None  # the script makes its batches whatever the config says
        end = self.processes.end or EndFacts(agent_exit_code=self.processes.code)
        return LaunchFacts(
            **vars(end),
            slots=self.request.slots,
            start_profile_step=self.request.start_profile_step,
            end_profile_step=self.request.end_profile_step,
            micro_batch=micro_batch if isinstance(micro_batch, int) else None,
            events=self.log.events,
            stop=self.stop_reason,
            config_path=self.request.command.config_path,
            config=flatten(self.request.ds_config),
        )

    def _decide(self, now: float, dead: set[int]) -> None:
        ends, done = set(self.log.ends), self.log.done
        if len(ends) == self.request.slots and dead >= ends:
            self._start_sweep()  # all have left a record and are gone: torchrun has nothing to add
            return
        if len(ends) > self._last_end[0]:
            self._last_end = len(ends), now
        if self.waits and not dead:
            return
        if len(done) == self.request.slots:
            self._kill_by(now)
        elif ends - done or dead - ends:
            self._kill_by(now + self._grace_s(ends, dead))
        if self._kill_ranks_at is None:
            self._check_limits(now, bool(done))
        elif now >= self._kill_ranks_at and not (ends - dead and now < self._last_end[1] + _EXIT_GRACE_S):
            unexplained = dead - ends
            if not unexplained or now >= self._kill_ranks_at + _AGENT_GRACE_S:
                self._start_sweep()
            else:
                self.processes.kill_ranks()

    def _grace_s(self, ends: set[int], dead: set[int]) -> float:
        """Return the time that the other ranks have to leave a record, after one has ended too early."""
        if self.log.has_failed_with(Outcome.OUT_OF_MEMORY):
            return 0.0  # takes precedence over all other records
        if dead - ends:
            return _FAILURE_GRACE_S
        explained = (Outcome.SCRIPT_ERROR, Outcome.INVALID_CONFIG, Outcome.HOST_OUT_OF_MEMORY)
        return _EXPLAINED_GRACE_S if self.log.has_failed_with(*explained) else _FAILURE_GRACE_S

    def _kill_by(self, deadline: float) -> None:
        if self._kill_ranks_at is None or deadline < self._kill_ranks_at:
            self._kill_ranks_at = deadline

    def _start_sweep(self) -> None:
        self._sweeping = True
        self.processes.kill_all()

    def _check_limits(self, now: float, some_done: bool) -> None:
        request = self.request
        if request.timeout_s is not None and now - self.started > request.timeout_s:
            text = f"longer than the limit of {request.timeout_s:g} s (--trial-timeout); {self._progress()}"
            self.end(Verdict(outcome=Outcome.TIMEOUT, message=text))
            return
        stall_s = min(request.stall_s, _LAST_RANK_S) if some_done else request.stall_s
        last_activity = self.log.last_event if some_done else self._last_activity(now)
        limit_s = self._stand_still_limit_s()
        stands_still = not some_done and self._stacks.stand_still(
            now, silent_since=last_activity, limit_s=limit_s, ask=self.processes.ask_for_stacks
        )
        if stands_still or now - last_activity > stall_s:
            option = " (--stall-timeout)" if stall_s == request.stall_s else ""
            text = f"no activity from any rank for {stall_s:g} s{option}"
            if stands_still:
                text = f"no rank has moved for {now - last_activity:.0f} s"
            elif now - self.log.last_event > MAX_STALL_LIMITS * stall_s:
                text = f"processes work, but no event came for {MAX_STALL_LIMITS} times --stall-timeout ({stall_s:g} s)"
            if places := describe_stacks(self._stacks.latest()):
                text += f": {places}"
            text += f"; {self._progress()}; {self.log.last_event_in_words(now)}"
            worked = self._activity.last_work
            if worked is not None and worked > self.log.last_event:
                text += f", processes at work {now - worked:.0f} s ago"
            self.end(Verdict(outcome=Outcome.STALLED, message=text))

    def _stand_still_limit_s(self) -> float:
        """Return the silence after which ranks that stand still are stalled; a compiler at work ends a silence."""
        if self.log.longest_step_s is not None:
            usual_s = _STALLED_STEPS * self.log.longest_step_s
        elif self.longest_start_s is not None:
            usual_s = _STALLED_STARTS * self.longest_start_s
        else:
            return self.request.stall_s
        return min(self.request.stall_s, max(_LEAST_STALL_S, usual_s))

    def _progress(self) -> str:
        return self.log.progress_in_words(end_profile_step=self.request.end_profile_step)

    def _last_activity(self, now: float) -> float:
        """Return the time of the last event or of the last activity of the launch's processes."""
        if self._activity.is_due(now, last_event=self.log.last_event):
            ranks, usage = self.processes.ranks, self.processes.usage()
            self._activity.update(usage, now, last_event=self.log.last_event, ranks=ranks, trained=self.log.has_trained)
        return self._activity.last_activity(self.log.last_event)
