"""One launch in flight on this machine: its events, its limits and its termination."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from optuna_dsat.launch.activity import MAX_STALL_LIMITS, ActivityMonitor, read_usage
from optuna_dsat.launch.agent_handle import AgentHandle
from optuna_dsat.launch.classify import LaunchFacts, StopReason
from optuna_dsat.launch.preload import Preload
from optuna_dsat.launch.processes import ProcessKey, children_of, end_processes, find_marked
from optuna_dsat.launch.protocol import LaunchReport, LaunchRequest
from optuna_dsat.launch.run_directory import RunDirectory
from optuna_dsat.launch.slots import SlotLease
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.events import (
    EngineReady,
    Event,
    RankFailed,
    RankFinished,
    RankStarted,
    StepMeasured,
    decode_event,
)

__all__ = ["EventTail", "FailedFork", "RunningLaunch", "first_failure_code", "read_exit_codes"]

_EXIT_GRACE_S = 1.0
"""Time for a clean exit after all ranks are done, before they are killed."""

_FAILURE_GRACE_S = 2.0
"""Time for the other ranks to leave a record, after one failed for a reason that may lie with another."""

_EXPLAINED_GRACE_S = 0.3
"""The same after a rank failed for a reason of its own: others fail alike, and their record may say more."""

_AGENT_GRACE_S = 1.0
"""Time for torchrun to record exit codes, after a rank died without a record."""

_LAST_RANK_S = 30.0
"""Longest silence of the other ranks after one is done: all end at the same step."""


_EVENT_WORDS = {
    RankStarted: "the start of the script",
    EngineReady: "the end of deepspeed.initialize",
    StepMeasured: "a step",
}
"""Type of an event -> words for it, for those that a launch may stall after."""


class EventTail:
    """Reads events as a rank appends them to its file; an incomplete line is kept for the next read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._partial = b""

    def read(self) -> list[Event]:
        """Return the events appended since the last call."""
        try:
            if self._path.stat().st_size <= self._offset:
                return []
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *lines, self._partial = (self._partial + data).split(b"\n")
        decoded = (decode_event(line.decode("utf-8", errors="replace")) for line in lines)
        return [event for event in decoded if event is not None]


def _load_failures(record: Path) -> list[Mapping[str, float]]:
    try:
        failures = json.loads(record.read_text(encoding="utf-8"))["failures"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [failure for failure in failures if {"rank", "pid", "exit_code", "time"} <= failure.keys()]


def read_exit_codes(record: Path, *, without: Sequence[int] = ()) -> dict[int, int]:
    """Return rank -> exit code as recorded by the agent, except of the processes in ``without``."""
    return {
        int(failure["rank"]): int(failure["exit_code"])
        for failure in _load_failures(record)
        if failure["pid"] not in without
    }


def first_failure_code(record: Path) -> int | None:
    """Return the exit code (negative: signal) of the rank that failed first; None if the agent recorded none.

    torchrun counts in whole seconds and also lists the ranks that it ended itself (SIGTERM). Of two that ended in the
    same second, one that was killed by a signal is the cause: the other lost its connection to it.
    """

    def order(failure: Mapping[str, float]) -> tuple[bool, float, bool]:
        code = failure["exit_code"]
        killed = code < 0 and -code not in (signal.SIGTERM, signal.SIGABRT)
        return code == -signal.SIGTERM, failure["time"], not killed

    failures = sorted(_load_failures(record), key=order)
    return int(failures[0]["exit_code"]) if failures else None


@dataclass(frozen=True, kw_only=True)
class FailedFork:
    """A forked launch that failed before it trained, when none with the same modules imported had trained."""

    preloaded: Preload
    message: str
    """Message of its outcome."""


@dataclass(kw_only=True)
class RunningLaunch:
    """One launch in flight: reads its events and ends its processes. Times are monotonic unless named otherwise."""

    request: LaunchRequest
    directory: RunDirectory
    lease: SlotLease
    mark: str
    agent: AgentHandle
    command: tuple[str, ...]
    started: float
    started_unix: float
    oom_kills_before: int | None
    preloaded: Preload | None = None
    """Imports of the process that it was forked from; None for a launch by plain torchrun."""
    repeats: FailedFork | None = None
    """The failed forked launch that this one repeats plainly, to find out whether the fork was the cause."""

    gone_at: float | None = field(default=None, init=False)
    """When the last process was seen to be gone; None while any lives."""
    last_event: float = field(init=False)
    stop_reason: StopReason | None = field(default=None, init=False)
    settled_as: LaunchReport | None = field(default=None, init=False)
    """Its report once the outcome is final; None before."""
    events: dict[int, list[Event]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.last_event = self.started
        self._tails = {rank: EventTail(self.directory.events(rank)) for rank in range(self.request.slots)}
        self._ranks: dict[int, ProcessKey] = {}
        self._known: set[ProcessKey] = set()
        self._killed: set[int] = set()
        self._agent_key = ProcessKey.of(self.agent.pid)
        self._kill_ranks_at: float | None = None
        self._sweeping = False
        self._watch = ActivityMonitor(limit_s=self.request.stall_s, started=self.started)
        if self._agent_key is not None:
            self._known.add(self._agent_key)

    @property
    def known(self) -> frozenset[ProcessKey]:
        """All processes of the launch ever seen."""
        return frozenset(self._known)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process numbers of torchrun and the ranks."""
        ranks = [e.pid for events in self.events.values() for e in events if isinstance(e, RankStarted)]
        return (self.agent.pid, *ranks)

    def advance(self, now: float) -> list[Event]:
        """Read new events and return them; check the limits and end what must end."""
        dead = {rank for rank, key in self._ranks.items() if not key.alive}
        agent_ended = self.agent.poll() is not None
        events = self._read(now)  # after the processes were checked, so that it includes what the dead ones wrote
        if agent_ended:
            self._sweeping = True
        elif not self._sweeping:
            self._decide(now, dead)
        if self._sweeping:
            self._sweep(now)
            if self.gone_at is not None:
                events += self._read(now)
        return events

    @property
    def has_trained(self) -> bool:
        """Whether any rank has completed a step."""
        return any(isinstance(event, StepMeasured) for events in self.events.values() for event in events)

    @property
    def is_forked(self) -> bool:
        """Whether all ranks so far were forked."""
        return all(e.forked for events in self.events.values() for e in events if isinstance(e, RankStarted))

    @property
    def settled(self) -> bool:
        """Whether the outcome is final: all steps are done, it was stopped, or it is being ended out of memory."""
        if self.stop_reason is not None or (self._sweeping and self._is_out_of_memory()):
            return True
        return len(_done(self._ends())) == self.request.slots

    def _is_out_of_memory(self) -> bool:
        failures = (end for end in self._ends().values() if isinstance(end, RankFailed))
        return any(failure.outcome == Outcome.OUT_OF_MEMORY for failure in failures)

    def end(self, reason: StopReason) -> None:
        """Kill the launch without waiting; one that is already ending keeps its first reason."""
        if self.stop_reason is None and not self._sweeping:
            self.stop_reason = reason
            self._start_sweep()

    def facts(self, oom_kills_after: int | None) -> LaunchFacts:
        """Return the observations of the launch, once it is over or settled."""
        micro_batch = self.request.ds_config.get("train_micro_batch_size_per_gpu")
        before = self.oom_kills_before
        agent_killed = self.agent.pid in self._killed
        return LaunchFacts(
            slots=self.request.slots,
            start_profile_step=self.request.start_profile_step,
            end_profile_step=self.request.end_profile_step,
            micro_batch=micro_batch if isinstance(micro_batch, int) else None,
            events=self.events,
            exit_codes=read_exit_codes(self.directory.agent_record, without=tuple(self._killed)),
            agent_exit_code=None if agent_killed else self.agent.returncode,
            stop=self.stop_reason,
            oom_kills=None if before is None or oom_kills_after is None else oom_kills_after - before,
            config_path=self.request.command.config_path,
        )

    def _read(self, now: float) -> list[Event]:
        fresh: list[Event] = []
        for rank, tail in self._tails.items():
            read = tail.read()
            if read:
                self.events.setdefault(rank, []).extend(read)
                fresh += read
        for event in fresh:
            if isinstance(event, RankStarted):
                key = ProcessKey.of(event.pid)
                if key is not None:
                    self._known.add(key)
                    self._ranks[event.rank] = key
        if fresh:
            self.last_event = now
        return sorted(fresh, key=lambda event: event.time)

    def _ends(self) -> dict[int, RankFailed | RankFinished]:
        """Return rank -> record of its end, for the ranks that left one."""
        return {
            rank: event
            for rank, events in self.events.items()
            for event in events
            if isinstance(event, RankFailed | RankFinished)
        }

    def _decide(self, now: float, dead: set[int]) -> None:
        ends = self._ends()
        done = _done(ends)
        if len(ends) == self.request.slots and dead >= set(ends):
            self._start_sweep()  # all have left a record and are gone: torchrun has nothing to add
            return
        if len(done) == self.request.slots:
            self._kill_by(now + _EXIT_GRACE_S)
        elif set(ends) - done or dead - set(ends):
            self._kill_by(now + self._grace_s(ends, dead))
        if self._kill_ranks_at is None:
            self._check_limits(now, bool(done))
        elif now >= self._kill_ranks_at:
            unexplained = dead - set(ends)
            if not unexplained or now >= self._kill_ranks_at + _AGENT_GRACE_S:
                self._start_sweep()
            else:
                self._kill(self._all_descendants())

    def _grace_s(self, ends: Mapping[int, RankFailed | RankFinished], dead: set[int]) -> float:
        """Return the time that the other ranks have to leave a record, after one has ended too early."""
        if self._is_out_of_memory():
            return 0.0  # takes precedence over all other records
        if dead - set(ends):
            return _FAILURE_GRACE_S
        own = (Outcome.SCRIPT_ERROR, Outcome.INVALID_CONFIG, Outcome.HOST_OUT_OF_MEMORY)
        explained = any(isinstance(end, RankFailed) and end.outcome in own for end in ends.values())
        return _EXPLAINED_GRACE_S if explained else _FAILURE_GRACE_S

    def _kill_by(self, deadline: float) -> None:
        if self._kill_ranks_at is None or deadline < self._kill_ranks_at:
            self._kill_ranks_at = deadline

    def _check_limits(self, now: float, some_done: bool) -> None:
        request = self.request
        if request.timeout_s is not None and now - self.started > request.timeout_s:
            text = f"longer than the limit of {request.timeout_s:g} s (--trial-timeout); {self._progress_in_words()}"
            self.end(StopReason(outcome=Outcome.TIMEOUT, message=text))
            return
        stall_s = min(request.stall_s, _LAST_RANK_S) if some_done else request.stall_s
        last_activity = self.last_event if some_done else self._last_activity(now)
        if now - last_activity > stall_s:
            option = " (--stall-timeout)" if stall_s == request.stall_s else ""
            text = f"no sign of life from any rank for {stall_s:g} s{option}"
            if now - self.last_event > MAX_STALL_LIMITS * stall_s:
                text = f"processes work, but no event came for {MAX_STALL_LIMITS} times --stall-timeout ({stall_s:g} s)"
            text += f"; {self._progress_in_words()}; {self._last_seen_in_words(now)}"
            self.end(StopReason(outcome=Outcome.STALLED, message=text))

    def _last_activity(self, now: float) -> float:
        """Return the time of the last event or of the last activity of the launch's processes."""
        if self._watch.is_due(now, last_event=self.last_event):
            ranks = set(self._ranks.values())
            readings = read_usage(self._agent_descendants() | ranks)
            self._watch.look(readings, now, last_event=self.last_event, ranks=ranks, trained=self.has_trained)
        return self._watch.last_activity(self.last_event)

    def _last_seen_in_words(self, now: float) -> str:
        """Return the last event and activity of the launch, in words."""
        events = [event for of_rank in self.events.values() for event in of_rank]
        words = "its start"
        if events:
            last = max(events, key=lambda event: event.time)
            words = f"{_EVENT_WORDS.get(type(last), last.kind)} (rank {last.rank})"
        text = f"last seen: {words} {now - self.last_event:.0f} s ago"
        worked = self._watch.last_work
        if worked is not None and worked > self.last_event:
            text += f", processes at work {now - worked:.0f} s ago"
        return text

    def _progress_in_words(self) -> str:
        steps = [e.step for events in self.events.values() for e in events if isinstance(e, StepMeasured)]
        if steps:
            return f"the last step was {max(steps)} of {self.request.end_profile_step}"
        return "no step was finished"

    def _agent_descendants(self) -> set[ProcessKey]:
        """Return the living descendants of torchrun, and of ranks that were re-parented."""
        found: set[ProcessKey] = children_of(() if self._agent_key is None else (self._agent_key,))
        return found | children_of(set(self._ranks.values()) - found)

    def _all_descendants(self) -> set[ProcessKey]:
        found = self._agent_descendants() | set(self._ranks.values())
        self._known |= found
        return found

    def _kill(self, keys: set[ProcessKey]) -> None:
        alive = {key for key in keys if key.alive}
        self._known |= alive
        self._killed |= {key.pid for key in alive}
        end_processes(alive)

    def _start_sweep(self) -> None:
        """Kill torchrun first, so that it neither starts nor signals ranks, then all its descendants."""
        self._sweeping = True
        below = self._all_descendants()
        if self._agent_key is not None:
            self._kill({self._agent_key})
        self._kill(below)

    def _sweep(self, now: float) -> None:
        """Kill the remaining processes, re-parented ones included; called repeatedly until none is left."""
        self.agent.poll()  # reaps it
        left = {process.key for process in find_marked(self.mark)}
        left |= children_of(left) | {key for key in self._known if key.alive}
        if left:
            self._kill(left)
        elif self.agent.returncode is not None:
            self.gone_at = now


def _done(ends: Mapping[int, RankFailed | RankFinished]) -> set[int]:
    """Return the ranks that have completed all profile steps."""
    return {rank for rank, end in ends.items() if isinstance(end, RankFinished) and end.reason == "profile_done"}
