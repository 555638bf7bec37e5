"""The processes of one launch on this machine: started, followed, swept, and their devices given back.

The head decides the outcome of a launch (``launch/launch.py``). It uses ``MachineLaunch`` in its own process for this
machine; on a node, ``NodeLaunch`` carries out its orders and reports.
"""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from optuna_dsat.launch.agent.command import prepare_launch, start_torchrun, write_run_directory
from optuna_dsat.launch.agent.files import LaunchFiles
from optuna_dsat.launch.machine.host import BesideWatch, ProcessUsage, read_usage
from optuna_dsat.launch.machine.journal import remove_noted
from optuna_dsat.launch.machine.operators import remove_stale_locks
from optuna_dsat.launch.machine.processes import kernel_oom_kills, new_mark
from optuna_dsat.launch.machine.shared_memory import free_shared_bytes
from optuna_dsat.launch.machine.slots import SlotLease, SlotPool
from optuna_dsat.launch.machine.tree import AgentHandle, ProcessTree, end_launch, read_exit_codes
from optuna_dsat.launch.protocol import Conditions, EndFacts, LaunchRequest, Rendezvous
from optuna_dsat.launch.run_directory import PreparedLaunch, RunDirectory, readable_errors
from optuna_dsat.launch.stacks import request_stacks
from optuna_dsat.launch.warm.forking import Forking
from optuna_dsat.runtime.agent.preload import Preload
from optuna_dsat.runtime.agent.processes import ProcessKey
from optuna_dsat.runtime.events import Event, RankStarted, decode_event
from optuna_dsat.runtime.measure.live import order_next

_FREE_DEADLINE_S = 60.0
"""Longest time for a GPU's memory to be back after the last process is gone."""


class MachineLaunch:
    """The processes of a launch on this machine (``Processes`` of ``launch/launch.py``), just started.

    ``preloaded`` are the imports of the process that they were forked from; None for plain torchrun. ``oom_kills`` is
    the kernel's count of processes killed for want of memory before they were started; None if unknown.
    """

    def __init__(
        self,
        request: LaunchRequest,
        directory: RunDirectory,
        agent: AgentHandle,
        *,
        lease: SlotLease,
        pool: SlotPool,
        mark: str,
        preloaded: Preload | None = None,
        oom_kills: int | None = None,
    ) -> None:
        self.started, self.started_unix = time.monotonic(), time.time()
        self.name = request.launch_id
        self.host = socket.gethostname()
        self.pid = agent.pid
        self.preloaded = preloaded
        self.code: int | None = None
        self.dead_ranks: set[int] = set()
        self.end: EndFacts | None = None
        self.is_ending = False
        """Whether torchrun has ended, or everything was killed."""
        self._directory = directory
        self._present = directory
        """Run directory of the trial that the ranks measure."""
        self._lease = lease
        self._pool = pool
        self._agent = agent
        self._oom_kills = oom_kills
        self._gone_at = 0.0
        self._tree = ProcessTree(agent, mark=mark, leavings=directory.leavings)
        self._beside = self._beside_watch(request)

    def _beside_watch(self, request: LaunchRequest) -> BesideWatch:
        return BesideWatch(
            start_profile_step=request.start_profile_step,
            end_profile_step=request.end_profile_step,
            ranks=lambda: self._tree.ranks,
            find=self._tree.living,
            look=lambda pids: self._pool.sight(self._lease, pids),
            energy_j=lambda: self._pool.energy_j(self._lease),
        )

    def take_on(self, request: LaunchRequest, directory: RunDirectory) -> None:
        """Order the ranks, which wait for it, to measure another trial."""
        with readable_errors(self._present.root):
            order_next(self._present.root, directory.launch)
        self.name, self._present, self._beside = request.launch_id, directory, self._beside_watch(request)

    def leave(self) -> None:
        """Order ranks that wait for another trial to leave."""
        with suppress(OSError):  # they are killed instead
            order_next(self._present.root, None)

    @classmethod
    def start(
        cls,
        request: LaunchRequest,
        prepared: PreparedLaunch,
        *,
        lease: SlotLease,
        pool: SlotPool,
        base_env: Mapping[str, str],
        forking: Forking | None,
    ) -> MachineLaunch:
        """Start the processes of a launch: by ``forking`` if possible, else by plain torchrun."""
        remove_stale_locks(base_env)
        oom_kills = kernel_oom_kills()
        fork = None if forking is None else forking.start(prepared)
        return cls(
            request,
            prepared.directory,
            fork or start_torchrun(prepared),
            lease=lease,
            pool=pool,
            mark=prepared.mark,
            preloaded=None if fork is None else fork.preload,
            oom_kills=oom_kills,
        )

    @property
    def known(self) -> frozenset[ProcessKey]:
        """All processes of the launch ever seen."""
        return self._tree.known

    @property
    def ranks(self) -> set[ProcessKey]:
        """The ranks seen so far."""
        return self._tree.ranks

    @property
    def conditions(self) -> Conditions:
        """Load by other processes while the steps were measured."""
        return self._beside.conditions

    @property
    def use_in_words(self) -> str:
        """What still uses its devices."""
        return self._pool.describe_use(self._lease)

    def advance(self, now: float, read: Callable[[float], list[Event]]) -> list[Event]:
        """Look at the processes, then read the events: they include the last ones of the dead ranks."""
        self.dead_ranks = self._tree.dead_ranks()
        self._tree.look(now)
        code = self._agent.poll()
        events = read(now)
        for event in events:
            if isinstance(event, RankStarted):
                self._tree.add_rank(event.rank, event.pid)
        self._beside.update(events)
        if code is not None and not self.is_ending:
            self.code, self.is_ending = code, True
        return events

    def usage(self) -> dict[ProcessKey, ProcessUsage]:
        """Return the resources used by the ranks and all their descendants."""
        return read_usage(self._tree.descendants() | self._tree.ranks)

    def ask_for_stacks(self) -> Collection[int]:
        """Have the ranks write their stacks to their logs; return the ranks seen so far."""
        request_stacks(self._present.log_dir, self._tree.rank_keys)
        return self._tree.rank_keys

    def kill_ranks(self) -> None:
        """Kill everything but torchrun, which then records how the ranks ended."""
        if not self.is_ending:
            self._tree.kill_ranks()

    def kill_all(self) -> None:
        """Kill everything."""
        if not self.is_ending:
            self.is_ending = True
            self._tree.kill_all()

    def sweep(self) -> bool:
        """Kill the remaining processes and clean up after them; return whether none was left."""
        if self.end is None and self._tree.sweep():
            self._gone_at = time.monotonic()
            self._clean_up()
            self.end = self._end_facts()
        return self.end is not None

    def _end_facts(self) -> EndFacts:
        before, after = self._oom_kills, kernel_oom_kills()
        killed = self.code is None and self.pid in self._tree.killed
        return EndFacts(
            exit_codes=read_exit_codes(self._directory.agent_record, without=self._tree.killed),
            agent_exit_code=None if killed else self._agent.returncode,
            oom_kills=None if before is None or after is None else after - before,
            shared_memory_free=free_shared_bytes(),
        )

    def _clean_up(self) -> None:
        if self._directory.leavings is not None:
            remove_noted(self._directory.leavings, seen=self._tree.shared_memory)

    def release(self, now: float) -> str | None:
        """Give the devices back if they are free; see ``Processes.release``."""
        if self.give_back_free():
            return ""
        if now - self._gone_at < _FREE_DEADLINE_S:
            return None
        return f" (not free after {_FREE_DEADLINE_S:g} s: {self.use_in_words})"

    def give_back_free(self) -> bool:
        """Give the devices back if they are measured to be free; return whether they were."""
        if not self._pool.is_free(self._lease, self.known):
            return False
        self.give_back()
        return True

    def give_back(self) -> None:
        """Give the devices back."""
        self._pool.give_back(self._lease)

    def close(self) -> None:
        """Kill everything, wait until it is gone, clean up and give the devices back."""
        end_launch(self._tree)
        self._clean_up()
        self.give_back()


_USAGE_S = 2.0
"""Interval between two readings of the processes' resource usage, while no rank writes events."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """State shared by the launches of this node."""

    node: int
    """Number of the node in its place."""
    pool: SlotPool
    environ: Mapping[str, str]
    forking: Forking
    new_folder: Callable[[], tuple[Path, Path]]
    """Returns a folder for a run directory, and the journal of the files that a launch may leave elsewhere."""
    cpu_memory_bytes: int = 0
    """Memory limit of a rank on the CPU if the study sets none, in bytes."""

    def limited(self, request: LaunchRequest) -> LaunchRequest:
        """Return a launch with a limit of its memory, if it is on the CPU and has none."""
        if self.pool.kind != "cpu" or request.device_memory_bytes is not None or not self.cpu_memory_bytes:
            return request
        return replace(request, device_memory_bytes=self.cpu_memory_bytes)


class NodeLaunch:
    """One launch on this node by order of a head. Call ``advance`` often, until ``ended``.

    Raises:
        SlotsBusyError: If fewer slots are free than it needs.
        OutputError: If its files cannot be written.
    """

    def __init__(self, order: Mapping[str, Any], *, machine: Machine) -> None:
        self._machine = machine
        self._request = machine.limited(LaunchRequest.from_json(order["request"]))
        given = order["rendezvous"]
        rendezvous = None if given is None else Rendezvous.from_json(given)
        count = self._request.slots // (1 if rendezvous is None else rendezvous.nodes)
        self._base_env = {**machine.environ, **order["environ"]}
        self._warm = bool(order["warm"])
        self.name = self._request.launch_id
        self.ended = False
        """Whether it is over, its devices are free, and nothing of it is left here."""
        self.processes: MachineLaunch | None = None
        """None before they are started."""
        self._is_stopped = False
        self._is_gone = False
        self._news: list[dict[str, Any]] = []
        self._told: tuple[list[int], int | None] = ([], None)
        self._usage_at = time.monotonic()
        self._lease: SlotLease = machine.pool.take(count)
        self._folder, self._leavings = machine.new_folder()
        try:
            self._directory = write_run_directory(self._request, self._folder, leavings=self._leavings)
            self._prepared = prepare_launch(
                self._request,
                self._directory,
                self._lease,
                pool=machine.pool,
                base_env=self._base_env,
                mark=new_mark(),
                rendezvous=rendezvous,
            )
        except BaseException:
            self._leave()
            raise
        first = machine.node * count
        self._ranks = range(first, first + count)
        self._files = LaunchFiles(self._directory, ranks=self._ranks, node=machine.node)
        if self._warm:
            machine.forking.begin(self._prepared.environ, python=self._request.command.interpreter)

    @property
    def is_importing(self) -> bool:
        """Whether it waits for the imports before its fork."""
        return self._warm and self.processes is None and not self._is_stopped and not self._machine.forking.is_ready

    def advance(self, now: float) -> list[dict[str, Any]]:
        """Start, read and sweep as far as that is possible now; return news for the head."""
        if self.ended:
            return []
        if self._is_gone:
            self._return_devices(now)
        elif self.processes is not None:
            self._follow(self.processes, now)
        elif self._is_stopped:
            self._say_gone(EndFacts(oom_kills=0))
        elif not self.is_importing:
            self._start()
        news, self._news = self._news, []
        return news

    def _start(self) -> None:
        begun = self.processes = MachineLaunch.start(
            self._request,
            self._prepared,
            lease=self._lease,
            pool=self._machine.pool,
            base_env=self._base_env,
            forking=self._machine.forking if self._warm else None,
        )
        shown, forked = list(self._prepared.shown), begun.preloaded is not None
        self._say("started", pid=begun.pid, forked=forked, command=shown, time=begun.started_unix)

    def _follow(self, processes: MachineLaunch, now: float) -> None:
        was_ending = processes.is_ending
        if processes.advance(now, self._read):
            self._say("conditions", conditions=processes.conditions.to_json())
        state = (sorted(processes.dead_ranks), processes.code)
        if not was_ending and state != self._told:
            self._told = state
            self._say("state", dead=state[0], agent=state[1])
        if not processes.is_ending and now - self._usage_at >= _USAGE_S:
            self._usage_at = now
            self._say("usage", usage=_usage_rows(processes))
        if processes.is_ending and processes.sweep() and processes.end is not None:
            self._read(now, last=True)
            self._say_gone(processes.end)

    def _read(self, now: float, *, last: bool = False) -> list[Event]:
        """Report new content of the files; return the events."""
        events: list[Event] = []
        for rank, lines in self._files.event_lines():
            self._say("events", rank=rank, lines=lines)
            events += [event for line in lines if (event := decode_event(line)) is not None]
        if events:
            self._usage_at = now
        for name, text in self._files.log_texts(last=last):
            self._say("log", file=name, text=text)
        return events

    def _say_gone(self, end: EndFacts) -> None:
        self._is_gone = True
        self._say("gone", end=asdict(end))

    def _say(self, kind: str, **content: Any) -> None:
        self._news.append({"news": kind, "launch_id": self.name, **content})

    def _return_devices(self, now: float) -> None:
        """Wait until the devices are free, and leave."""
        note = "" if self.processes is None else self.processes.release(now)
        if note is not None:
            self._leave()
            self._say("free", note=note)

    def take_on(self, order: Mapping[str, Any]) -> None:
        """Have the ranks, which wait for it, measure another trial."""
        if self.processes is None:
            return
        request = self._machine.limited(LaunchRequest.from_json(order["request"]))
        self.name, self._told = request.launch_id, ([], None)
        directory = write_run_directory(request, self._folder, leavings=self._leavings, changes=order["changes"])
        self.processes.take_on(request, directory)
        self._files = LaunchFiles(directory, ranks=self._ranks, node=self._machine.node)

    def end(self) -> None:
        """Kill everything; ``advance`` reports the end."""
        self._is_stopped = True
        if self.processes is not None:
            self.processes.kill_all()

    def close(self) -> None:
        """Kill everything and wait until it is gone."""
        if self.ended:
            return
        if self.processes is not None:
            self.processes.close()
        self._leave()

    def _leave(self) -> None:
        """Give the slots back and remove the files."""
        remove_noted(self._leavings)
        remove_stale_locks(self._base_env)
        with suppress(OSError):
            shutil.rmtree(self._folder)
        self._machine.pool.give_back(self._lease)
        self.ended = True


def _usage_rows(processes: MachineLaunch) -> list[list[Any]]:
    ranks = processes.ranks
    return [
        [key.pid, key.start_ticks, key in ranks, use.cpu_s, use.ended_cpu_s, use.io_bytes]
        for key, use in processes.usage().items()
    ]
