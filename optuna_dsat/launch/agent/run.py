"""The part of one launch that runs on this node: started, watched and ended by order of the head.

What becomes of the launch is decided at the head, by the same rules as for one on its own machine
(``launch/launch.py``); here is only what a machine alone can see and do.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from optuna_dsat.launch.agent.command import PreparedLaunch, prepare_launch, write_run_directory
from optuna_dsat.launch.agent.files import LaunchFiles, TrackerFiles
from optuna_dsat.launch.agent.wire import request_from_json
from optuna_dsat.launch.launch import RunningLaunch
from optuna_dsat.launch.machine.host import BesideWatch
from optuna_dsat.launch.machine.journal import remove_noted
from optuna_dsat.launch.machine.nvml import DeviceError
from optuna_dsat.launch.machine.operators import remove_stale_locks
from optuna_dsat.launch.machine.processes import kernel_oom_kills, new_mark
from optuna_dsat.launch.machine.slots import SlotLease, SlotPool
from optuna_dsat.launch.machine.tree import AgentHandle, ProcessTree, end_launch
from optuna_dsat.launch.protocol import Conditions, LaunchRequest, Preload, Rendezvous
from optuna_dsat.launch.run_directory import RunDirectory
from optuna_dsat.launch.warm.forking import Forking
from optuna_dsat.launch.warm.server import WarmOrder
from optuna_dsat.runtime.events import Event, RankStarted, decode_event

__all__ = ["DeviceReturn", "Machine", "NodeLaunch", "Started", "spawn", "start_processes"]


@dataclass(frozen=True, kw_only=True)
class Started:
    """The processes of a launch on this machine, just started."""

    agent: AgentHandle
    preloaded: Preload | None
    """Imports of the process that they were forked from; None for plain torchrun."""
    command: tuple[str, ...]
    """As plain torchrun, without secrets."""
    started: float
    """Monotonic time."""
    started_unix: float
    oom_kills_before: int | None
    """The kernel's count of processes killed for want of memory; None if unknown."""


def spawn(
    request: LaunchRequest,
    directory: RunDirectory,
    lease: SlotLease,
    *,
    pool: SlotPool,
    base_env: Mapping[str, str],
    forking: Forking | None,
    mark: str,
) -> RunningLaunch:
    """Start a launch.

    Args:
        request: The launch.
        directory: Its run directory, written.
        lease: Its slots.
        pool: The pool they are from.
        base_env: Environment to inherit from.
        forking: Forks launches; None for plain torchrun.
        mark: Mark of its processes.

    Raises:
        OutputError: If the run directory cannot be written.
    """
    prepared = prepare_launch(request, directory, lease, pool=pool, base_env=base_env, mark=mark)
    begun = start_processes(request, prepared, base_env=base_env, forking=forking, mark=mark)
    return RunningLaunch(
        request=request,
        directory=directory,
        lease=lease,
        mark=mark,
        agent=begun.agent,
        preloaded=begun.preloaded,
        command=begun.command,
        started=begun.started,
        started_unix=begun.started_unix,
        oom_kills_before=begun.oom_kills_before,
        look_at_gpus=lambda own: pool.sight(lease, own),
    )


def start_processes(
    request: LaunchRequest,
    prepared: PreparedLaunch,
    *,
    base_env: Mapping[str, str],
    forking: Forking | None,
    mark: str,
) -> Started:
    """Start the processes of a launch on this machine.

    Args:
        request: The launch.
        prepared: Its command and environment.
        base_env: Environment that they are made from.
        forking: Forks launches; None for plain torchrun.
        mark: Mark of its processes.
    """
    remove_stale_locks(base_env)
    oom_kills = kernel_oom_kills()
    agent = None if forking is None else forking.start(_warm_order(request, prepared, mark))
    # A fork may have waited for the imports; the launch begins here.
    started, started_unix = time.monotonic(), time.time()
    return Started(
        agent=_start_torchrun(request, prepared) if agent is None else agent,
        preloaded=None if agent is None else agent.preload,
        command=prepared.shown,
        started=started,
        started_unix=started_unix,
        oom_kills_before=oom_kills,
    )


def _warm_order(request: LaunchRequest, prepared: PreparedLaunch, mark: str) -> WarmOrder:
    return WarmOrder(
        launch_id=request.launch_id,
        mark=mark,
        arguments=prepared.arguments,
        environ=prepared.environ,
        cwd=request.command.cwd,
        directory=prepared.directory,
    )


def _start_torchrun(request: LaunchRequest, prepared: PreparedLaunch) -> AgentHandle:
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


_USAGE_S = 2.0
"""Time between two readings of what the processes use, while no rank writes events."""
_FREE_DEADLINE_S = 60.0
"""Longest time for a GPU's memory to be back after the last process is gone."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the launches of this node share."""

    node: int
    """Number of the node in its place."""
    pool: SlotPool
    environ: Mapping[str, str]
    forking: Forking
    new_folder: Callable[[], tuple[Path, Path]]
    """Returns a folder for a run directory, and the file in which a launch notes what it may leave elsewhere."""
    on_notice: Callable[[str], None]
    cpu_memory_bytes: int = 0
    """What one rank on the CPU may allocate where the study does not say."""

    def limited(self, request: LaunchRequest) -> LaunchRequest:
        """Return a launch with a limit of its memory, if it is on the CPU and has none."""
        if self.pool.kind != "cpu" or request.device_memory_bytes is not None or not self.cpu_memory_bytes:
            return request
        return replace(request, device_memory_bytes=self.cpu_memory_bytes)


class NodeLaunch:
    """One launch on this node. Call ``advance`` often, until ``ended``.

    Args:
        order: The head's order.
        machine: This node.

    Raises:
        SlotsBusyError: If fewer slots are free than it needs.
        OutputError: If its files cannot be written.
    """

    def __init__(self, order: Mapping[str, Any], *, machine: Machine) -> None:
        self._machine = machine
        self._request = machine.limited(request_from_json(order["request"]))
        given = order["rendezvous"]
        rendezvous = None if given is None else Rendezvous.from_json(given)
        self._own = self._request.slots // (1 if rendezvous is None else rendezvous.nodes)
        self._base_env = {**machine.environ, **order["environ"]}
        self._warm = bool(order["warm"])
        self.name = self._request.launch_id
        self.ended = False
        """Whether it is over, its devices are free, and nothing of it is left here."""
        self._tree: ProcessTree | None = None
        self._started: Started | None = None
        self._sweeping = False
        self._gone_at: float | None = None
        self._told: tuple[list[int], int | None] = ([], None)
        self._usage_at = time.monotonic()
        self._mark = new_mark()
        self._lease: SlotLease = machine.pool.take(self._own)
        self._folder, self._leavings = machine.new_folder()
        try:
            self._directory = write_run_directory(self._request, self._folder, leavings=self._leavings)
            self._prepared = prepare_launch(
                self._request,
                self._directory,
                self._lease,
                pool=machine.pool,
                base_env=self._base_env,
                mark=self._mark,
                rendezvous=rendezvous,
            )
        except BaseException:
            self._leave()
            raise
        first = machine.node * self._own
        self._files = LaunchFiles(self._directory, ranks=range(first, first + self._own), node=machine.node)
        self._trackers = self._hand_over_trackers(**order["trackers"])
        if self._warm:
            machine.forking.begin(self._prepared.environ)

    @property
    def is_importing(self) -> bool:
        """Whether it waits for the imports before its fork."""
        return self._warm and self._tree is None and not self._sweeping and not self._machine.forking.is_ready

    def advance(self, now: float) -> list[dict[str, Any]]:
        """Start, read and sweep as far as that is possible now; return news for the head."""
        if self.ended:
            return []
        if self._gone_at is not None:
            return self._return_devices(now, self._gone_at)
        if self._tree is None or self._started is None:
            if self._sweeping:
                self._gone_at = now
                return [self._gone({}, oom_kills=0, agent=None, conditions=Conditions())]
            return [] if self.is_importing else self._start()
        return self._follow(self._tree, self._started, now)

    def _start(self) -> list[dict[str, Any]]:
        started = start_processes(
            self._request,
            self._prepared,
            base_env=self._base_env,
            forking=self._machine.forking if self._warm else None,
            mark=self._mark,
        )
        tree = ProcessTree(started.agent, mark=self._mark, leavings=self._leavings)
        self._beside = BesideWatch(
            start_profile_step=self._request.start_profile_step,
            ranks=lambda: tree.ranks,
            find=tree.living,
            look=lambda own: self._machine.pool.sight(self._lease, own),
        )
        self._started, self._tree = started, tree
        forked = started.preloaded is not None
        shown = list(started.command)
        return [self._news("started", pid=started.agent.pid, forked=forked, command=shown, time=started.started_unix)]

    def _follow(self, tree: ProcessTree, started: Started, now: float) -> list[dict[str, Any]]:
        dead = sorted(tree.dead_ranks())
        tree.look(now)
        code = started.agent.poll()
        news = self._read(tree)  # after the processes were checked, so that it includes what the dead ones wrote
        if code is not None and not self._sweeping:
            self._sweeping = True
            news.append(self._news("state", dead=dead, agent=code))
            self._told = (dead, code)
        elif not self._sweeping and (dead, None) != self._told:
            self._told = (dead, None)
            news.append(self._news("state", dead=dead, agent=None))
        if not self._sweeping and now - self._usage_at >= _USAGE_S:
            self._usage_at = now
            news.append(self._use(tree))
        if self._sweeping and tree.sweep():
            self._gone_at = now
            news += self._read(tree, last=True)
            before, after = started.oom_kills_before, kernel_oom_kills()
            news.append(
                self._gone(
                    tree.exit_codes(self._directory.agent_record),
                    oom_kills=None if before is None or after is None else after - before,
                    agent=self._told[1],
                    conditions=self._beside.conditions,
                )
            )
        return news

    def _use(self, tree: ProcessTree) -> dict[str, Any]:
        ranks = tree.ranks
        usage = [
            [key.pid, key.start_ticks, key in ranks, use.cpu_s, use.ended_cpu_s, use.io_bytes]
            for key, use in tree.usage().items()
        ]
        return self._news("usage", usage=usage)

    def _read(self, tree: ProcessTree, *, last: bool = False) -> list[dict[str, Any]]:
        news: list[dict[str, Any]] = []
        events: list[Event] = []
        for rank, lines in self._files.event_lines():
            news.append(self._news("events", rank=rank, lines=lines))
            events += [event for line in lines if (event := decode_event(line)) is not None]
        for event in events:
            if isinstance(event, RankStarted):
                tree.add_rank(event.rank, event.pid)
        self._beside.update(events)
        if events:
            self._usage_at = time.monotonic()
        return news + [self._news("log", file=name, text=text) for name, text in self._files.log_texts(last=last)]

    def _gone(
        self, exit_codes: Mapping[int, int], *, oom_kills: int | None, agent: int | None, conditions: Conditions
    ) -> dict[str, Any]:
        codes = {str(rank): code for rank, code in exit_codes.items()}
        return self._news("gone", exit_codes=codes, oom_kills=oom_kills, agent=agent, conditions=conditions.to_json())

    def _news(self, kind: str, **content: Any) -> dict[str, Any]:
        return {"news": kind, "launch_id": self.name, **content}

    def _return_devices(self, now: float, gone_at: float) -> list[dict[str, Any]]:
        """Hand over what trackers wrote, wait until the devices are free, and leave."""
        if (piece := next(self._trackers, None)) is not None:
            return [piece]
        known = self._tree.known if self._tree is not None else ()
        note = ""
        if not self._machine.pool.is_free(self._lease, known):
            if now - gone_at < _FREE_DEADLINE_S:
                return []
            note = f" (not free after {_FREE_DEADLINE_S:g} s: {self._machine.pool.describe_use(self._lease)})"
        self._leave()
        return [self._news("free", note=note)]

    def _hand_over_trackers(self, folder: str, token: str) -> Iterator[dict[str, Any]]:
        """Yield news with what trackers wrote; begins once it is read, when all processes are gone."""
        files = TrackerFiles(self._directory.trackers_dir, node=self._machine.node, on_notice=self._machine.on_notice)
        try:
            for piece in files.hand_over(Path(folder), token):
                yield self._news("tracker", **piece)
        except OSError as error:
            self._machine.on_notice(f"What trackers wrote in {self.name} could not be kept: {error}.")

    def end_ranks(self) -> None:
        """Kill everything but torchrun, which then records how the ranks ended."""
        if self._tree is not None and not self._sweeping:
            self._tree.kill_ranks()

    def end(self) -> None:
        """Kill everything; ``advance`` says when it is gone."""
        if not self._sweeping:
            self._sweeping = True
            if self._tree is not None:
                self._tree.kill_all()

    def close(self) -> None:
        """Kill everything and wait until it is gone."""
        if self.ended:
            return
        if self._tree is not None:
            end_launch(self._tree)
        self._leave()

    def _leave(self) -> None:
        """Give the slots back and remove the files."""
        seen = self._tree.shared_memory if self._tree is not None else ()
        remove_noted(self._leavings, seen=seen)
        with suppress(OSError):
            shutil.rmtree(self._folder)
        self._machine.pool.give_back(self._lease)
        self.ended = True


class DeviceReturn:
    """Gives slots back to a pool; withholds those whose devices stay in use.

    Args:
        pool: The slots.
        clock: Monotonic time in seconds.
    """

    def __init__(self, pool: SlotPool, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool = pool
        self._clock = clock
        self._withheld: list[RunningLaunch] = []

    def release(self, launch: RunningLaunch, *, gone_at: float) -> str | None:
        """Give back the slots of a launch, or withhold them once its devices are overdue.

        Args:
            launch: A launch without living processes.
            gone_at: When its last process was seen to be gone, monotonic.

        Returns:
            What a report adds about the devices, empty if they are free; None while they may still become free.
        """
        if self._pool.is_free(launch.lease, launch.known):
            self._pool.give_back(launch.lease)
            return ""
        if self._clock() - gone_at < _FREE_DEADLINE_S:
            return None
        self._withheld.append(launch)
        return f" (not free after {_FREE_DEADLINE_S:g} s: {self._pool.describe_use(launch.lease)})"

    def recheck(self) -> None:
        """Give back the withheld slots whose devices have become free."""
        for launch in list(self._withheld):
            if self._pool.is_free(launch.lease, launch.known):
                self._withheld.remove(launch)
                self._pool.give_back(launch.lease)

    def check(self) -> None:
        """Recheck the withheld slots.

        Raises:
            DeviceError: If some devices are still not free.
        """
        self.recheck()
        if self._withheld:
            launch = self._withheld[0]
            raise DeviceError(
                f"The devices of {launch.request.launch_id} are not free although all its processes are gone "
                f"({self._pool.describe_use(launch.lease)}). See what holds them with nvidia-smi, then resume."
            )

    def close(self) -> None:
        """Give back all withheld slots."""
        for launch in self._withheld:
            self._pool.give_back(launch.lease)
        self._withheld.clear()
