"""Launches on nodes of a cluster, in places that its own scheduler grants."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from optuna_dsat.launch.agent.command import write_run_directory
from optuna_dsat.launch.agent.files import TOKEN, append_events, append_log, write_tracker
from optuna_dsat.launch.agent.wire import request_to_json
from optuna_dsat.launch.classify import classify
from optuna_dsat.launch.facts import StopReason
from optuna_dsat.launch.folder_changes import FolderWatch
from optuna_dsat.launch.launch import FailedFork, RunningLaunch
from optuna_dsat.launch.machine.devices import Device
from optuna_dsat.launch.machine.nvml import DeviceError
from optuna_dsat.launch.machine.slots import SlotLease
from optuna_dsat.launch.places.engine import Engine, News, Place, PlaceState
from optuna_dsat.launch.places.place import HeldPlace, Layout, Stage
from optuna_dsat.launch.places.remote import RemoteLaunch
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
from optuna_dsat.secrecy.references import resolved, values_for
from optuna_dsat.words import things_in_words

__all__ = ["ClusterLauncher", "Limits"]

_POLL_PAUSE_S = 0.02
"""Longest pause between two looks at the launches."""
_MOST_LOSSES = 4
"""Places lost one after another, without a launch that ended in one, after which the search ends."""
_QUIET_S = 2.0
"""Shortest wait in a queue that is reported with the scheduler's reason."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How many places a search holds, and for how long."""

    places: int = 1
    """Most places at a time."""
    queue_s: float | None = None
    """Longest wait for a place while no other is held; None for no limit."""
    idle_s: float = 300.0
    """Time after which a place that nothing is launched in is given back."""


@dataclass(kw_only=True)
class _Waiting:
    request: LaunchRequest
    directory: RunDirectory
    repeats: FailedFork | None = None
    plain: bool = False


class ClusterLauncher:
    """Runs launches in places of a cluster (a ``Launcher``).

    A launch that is started waits until a place is free; places are asked for while launches wait, and given back when
    none did for a while.

    Args:
        output_dir: Folder of the run directories, one per launch.
        engine: Holds the places.
        layout: Nodes and slots of every launch.
        limits: How many places, and for how long.
        files: File that every node must have -> digest of its content.
        warm: Whether ranks are forked on the nodes, as long as that works.
        environ: Environment with the values of secrets that launches need; None for this process's own.
        on_notice: Called with each new notice for the user.
        on_phase: Called with what takes long and is no launch, and with nothing once it is over.
    """

    def __init__(
        self,
        output_dir: Path | str,
        *,
        engine: Engine,
        layout: Layout,
        limits: Limits,
        files: Mapping[str, str],
        warm: bool = True,
        environ: Mapping[str, str] | None = None,
        on_notice: Callable[[str], None] = lambda _: None,
        on_phase: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._output_dir = Path(output_dir)
        self._engine = engine
        self._layout = layout
        self._limits = limits
        self._files = files
        self._environ = dict(os.environ if environ is None else environ)
        self._notify = on_notice
        self._on_phase = on_phase
        self._phase = ""
        self._forking = Forking(self._output_dir / "warm.log", enabled=warm, on_notice=on_notice)
        self._operators: tuple[str, ...] = ()
        self._held: dict[Place, HeldPlace] = {}
        """What the engine holds -> what its nodes have said."""
        self._waiting: dict[str, _Waiting] = {}
        self._changes = FolderWatch(self._output_dir)
        self._running: dict[str, tuple[RunningLaunch, RemoteLaunch, HeldPlace]] = {}
        self._settled: set[str] = set()
        """Names of the launches whose outcome is known while their processes still end."""
        self._plain: set[str] = set()
        self._unstarted: list[LaunchReport] = []
        self._told: set[str] = set()
        self._losses = 0

    @property
    def total_slots(self) -> int:
        """Ranks that may run at once."""
        return self._limits.places * self._layout.ranks

    @property
    def free_slots(self) -> int:
        """Slots of places that nothing is launched in, held or not."""
        taken = len(self._running) - len(self._settled) + len(self._waiting)
        return max(0, self.total_slots - taken * self._layout.ranks)

    @property
    def _places(self) -> Collection[HeldPlace]:
        return self._held.values()

    @property
    def waiting(self) -> Collection[str]:
        """Names of the launches that have no place yet."""
        return tuple(self._waiting)

    def holders(self) -> Sequence[Holder]:
        """Return the launches and queued places, all of them this search's own: their wait is limited here."""
        running = [Holder(device=name, who="a launch of this search", own=True) for name in self._running]
        queued = [place for place in self._places if place.stage is not Stage.USABLE]
        return [*running, *(Holder(device=one.place.name, who="a queued place", own=True) for one in queued)]

    def prepare(self, preload: Preload, *, operators: Sequence[str] = ()) -> None:
        """Set what nodes import before forks, and compile; they begin with it at once, or once they are there."""
        self._operators = tuple(operators)
        self._forking.prepare(preload)

    def start(self, request: LaunchRequest) -> None:
        """Have a launch start as soon as there is a place for it.

        Raises:
            SlotsBusyError: If more launches run or wait than there may be places.
            ValueError: If the launch has another size than the places, or its name is in use.
            OutputError: If the run directory cannot be written.
        """
        if request.slots != self._layout.ranks:
            has = things_in_words(self._layout.ranks, "slot")
            raise ValueError(f"A place has {has}; {request.launch_id} asks for {request.slots}.")
        if request.launch_id in self._running or request.launch_id in self._waiting:
            raise ValueError(f"launch_id is unique; {request.launch_id!r} is running.")
        if self.free_slots < request.slots:
            asked = things_in_words(request.slots, "slot")
            raise SlotsBusyError(f"A launch asks for {asked}; {self.free_slots} are free.")
        directory = write_run_directory(request, self._output_dir)
        self._waiting[request.launch_id] = _Waiting(request=request, directory=directory)

    def poll(self, timeout_s: float) -> Sequence[LaunchUpdate]:
        """Return what happened since the last call, waiting up to ``timeout_s`` for something to happen.

        Raises:
            ClusterError: If nodes lack what the study needs, or the cluster refuses a place.
            DeviceError: If no place is granted for too long, or each is lost before a launch ends in it.
        """
        deadline = time.monotonic() + timeout_s
        pause_s = 0.0
        while True:
            for news in self._engine.news(pause_s):
                self._take(news)
            updates = self._advance()
            if updates or (now := time.monotonic()) >= deadline:
                return updates
            pause_s = min(_POLL_PAUSE_S, deadline - now)

    def stop(self, launch_id: str, *, outcome: Outcome = Outcome.PRUNED, message: str = "") -> None:
        """End a launch at once; its ``Finished`` comes with a later ``poll``. Unknown or ended launches are ignored."""
        if launch_id in self._waiting:
            one = self._waiting.pop(launch_id)
            self._unstarted.append(report_of_unstarted(one.request, one.directory, outcome, message))
        elif launch_id in self._running:
            self._running[launch_id][0].end(StopReason(outcome=outcome, message=message))

    def close(self) -> None:
        """End everything, and give all places back."""
        self._engine.close()
        self._forking.close()
        self._held.clear()
        self._running.clear()
        self._settled.clear()
        self._waiting.clear()

    def _take(self, news: News) -> None:
        place = self._held.get(news.place)
        if place is None:
            return
        message = news.message
        kind, name = str(message.get("news")), str(message.get("launch_id", ""))
        if kind == "notice":
            self._notify_once(f"{place.name_of(news.node)}: {message['text']}")
        elif kind == "port":
            self._order_launch(place, name, port=int(message["port"]))
        elif kind == "prepared":
            place.note(news)
            for builder, why in message["failed"].items():
                where = place.name_of(news.node)
                self._notify_once(f"DeepSpeed's {builder} fails on {where}, and so will what needs it: {why}.")
        elif not name:
            place.note(news)
        elif name in self._running:
            self._take_of_launch(name, news)

    def _notify_once(self, text: str) -> None:
        if text and text not in self._told:
            self._told.add(text)
            self._notify(text)

    def _take_of_launch(self, name: str, news: News) -> None:
        launch, remote, place = self._running[name]
        message, kind = news.message, news.message["news"]
        if kind == "events":
            append_events(launch.directory, message, ahead_s=place.clock_ahead_s(news.node))
        elif kind == "log":
            append_log(launch.directory, message)
        elif kind == "tracker":
            write_tracker(launch.directory, message)
        else:
            remote.note(news.node, message)
        if kind == "started" and remote.started:
            launch.started, launch.started_unix = time.monotonic(), news.time
            launch.command = remote.command
            launch.preloaded = self._forking.preload if all(remote.forked.values()) else None
            cwd = launch.request.command.cwd
            launch.directory.write_command(remote.command, cwd=cwd, devices=launch.lease.indices, environ={})
        if kind == "failed":
            where = place.name_of(news.node)
            launch.end(StopReason(outcome=Outcome.KILLED, message=f"{where} could not start it: {remote.failure}"))

    def _advance(self) -> list[LaunchUpdate]:
        updates: list[LaunchUpdate] = []
        for place in list(self._places):
            place.advance()
            if place.stage is Stage.LOST:
                self._lose(place)
        for name, (launch, remote, place) in list(self._running.items()):
            updates += [Observed(launch_id=name, event=event) for event in launch.advance(time.monotonic())]
            if launch.settled and launch.settled_as is None and not self._forking.may_repeat(launch):
                launch.settled_as = self._settled_report(launch, remote, place)
                self._settled.add(name)
                updates.append(Settled(launch_id=name, report=launch.settled_as))
            if launch.gone_at is not None and (note := remote.free_note) is not None:
                report = self._conclude(launch, remote, place, note=note)
                if report is not None:
                    updates.append(Finished(launch_id=name, report=report))
        self._fill_places()
        self._ask_for_places()
        self._give_back_places()
        self._tell_phase()
        unstarted, self._unstarted = self._unstarted, []
        return [*updates, *(Finished(launch_id=report.launch_id, report=report) for report in unstarted)]

    def _fill_places(self) -> None:
        """Start launches that wait in places that are idle, in the order of both."""
        for place in self._places:
            place.prepare(self._forking.preload, self._operators)
            if place.is_idle and self._waiting:
                name = next(iter(self._waiting))
                self._begin(place, self._waiting.pop(name))

    def _begin(self, place: HeldPlace, one: _Waiting) -> None:
        request = one.request
        remote = RemoteLaunch(request.launch_id, nodes=self._layout.nodes, send=place.order)
        devices = [Device(index=i, visible_id="", name="", memory_bytes=0) for i in range(request.slots)]
        launch = RunningLaunch(
            request=request,
            directory=one.directory,
            lease=SlotLease(devices=tuple(devices), baseline_bytes={}),
            mark="",
            agent=remote,
            command=(),
            started=time.monotonic(),
            started_unix=time.time(),
            oom_kills_before=0,
            processes=remote,
            conditions_elsewhere=lambda: remote.conditions,
            repeats=one.repeats,
        )
        if one.plain:
            self._plain.add(request.launch_id)
        self._running[request.launch_id] = (launch, remote, place)
        if request.purpose == "profile" and request.isolation != "off":
            self._changes.begin(request)
        place.launch_id = request.launch_id
        if self._layout.nodes == 1:
            self._order_launch(place, request.launch_id, port=0)
        else:
            place.order({"do": "port", "launch_id": request.launch_id, "address": place.address}, node=0)

    def _order_launch(self, place: HeldPlace, name: str, *, port: int) -> None:
        """Have the nodes start a launch, unless it was stopped meanwhile."""
        if name not in self._running or self._running[name][0].stop_reason is not None:
            return
        launch, remote, _ = self._running[name]
        remote.ordered = True
        request = launch.request
        secrets = values_for([request.command.args, request.ds_config, request.overlay, request.env], self._environ)
        wire = request_to_json(replace(request, env=resolved(dict(request.env), self._environ)))
        warm = self._forking.enabled and name not in self._plain
        token = uuid.uuid4().hex
        folder = launch.directory.trackers_dir
        launch.directory.write_text(folder / TOKEN, token)
        trackers = {"folder": str(folder), "token": token}
        for node in range(self._layout.nodes):
            rendezvous = place.rendezvous(node, port)
            order: dict[str, Any] = {
                "do": "launch",
                "request": wire,
                "environ": secrets,
                "warm": warm,
                "trackers": trackers,
            }
            order["rendezvous"] = None if rendezvous is None else rendezvous.to_json()
            place.order(order, node=node)

    def _settled_report(self, launch: RunningLaunch, remote: RemoteLaunch, place: HeldPlace) -> LaunchReport:
        facts = launch.facts(remote.oom_kills)
        self._forking.learn_from(launch)
        self._notify_once(isolation_notice(launch))
        report = report_of(launch, facts, classify(facts), note="", exit_s=0.0)
        return replace(report, host=", ".join(place.node_names))

    def _conclude(
        self, launch: RunningLaunch, remote: RemoteLaunch, place: HeldPlace, *, note: str
    ) -> LaunchReport | None:
        """Return the report of a launch without processes; None if it is repeated by plain torchrun."""
        name = launch.request.launch_id
        del self._running[name]
        self._settled.discard(name)
        (launch.directory.trackers_dir / TOKEN).unlink(missing_ok=True)
        self._plain.discard(name)
        place.launch_id = None
        if place.stage is not Stage.LOST:
            self._losses = 0
        exit_s = time.monotonic() - launch.last_event
        self._changes.check(launch)
        if launch.settled_as is not None:
            return complete_report(launch.settled_as, launch.directory, note=note, exit_s=exit_s)
        facts = launch.facts(remote.oom_kills)
        verdict = classify(facts)
        if (failed := self._forking.suspect(launch, verdict)) is not None:
            directory = write_run_directory(launch.request, self._output_dir)
            again = _Waiting(request=launch.request, directory=directory, repeats=failed, plain=True)
            self._waiting = {name: again, **self._waiting}
            return None
        self._notify_once(isolation_notice(launch))
        report = report_of(launch, facts, verdict, note=note, exit_s=exit_s)
        report = replace(report, host=", ".join(place.node_names))
        write_report(report, launch.directory, facts=facts, output_dir=self._output_dir)
        return report

    def _lose(self, place: HeldPlace) -> None:
        """Forget a place that is lost, and end what ran there.

        Raises:
            DeviceError: If it is one of too many.
        """
        del self._held[place.place]
        why = f"{place.place.name} was lost: {place.place.why}"
        for launch, remote, where in self._running.values():
            if where is place:
                remote.lose()
                launch.end(StopReason(outcome=Outcome.KILLED, message=why))
        self._notify(f"{why[0].upper()}{why[1:]}.")
        self._losses += 1
        if self._losses >= _MOST_LOSSES:
            raise DeviceError(
                f"{self._losses} places were lost one after another, the last one since {place.place.why}."
            )

    def _ask_for_places(self) -> None:
        """Ask for places while launches wait that no held or queued place will take."""
        coming = sum(place.launch_id is None for place in self._places)
        while coming < len(self._waiting) and len(self._held) < self._limits.places:
            place = HeldPlace(self._engine, self._layout, files=self._files)
            self._held[place.place] = place
            coming += 1

    def _give_back_places(self) -> None:
        """Give back places that nobody needs, and report and limit the wait for queued ones.

        Raises:
            DeviceError: If no place was granted for too long.
        """
        now = time.monotonic()
        held = any(place.stage is Stage.USABLE for place in self._places)
        for place in list(self._places):
            if place.stage is Stage.USABLE and place.launch_id is None and not self._waiting:
                place.idle_since = now if place.idle_since is None else place.idle_since
                if now - place.idle_since >= self._limits.idle_s:
                    self._release(place)
                continue
            place.idle_since = None
            if place.stage is not Stage.QUEUED:
                continue
            if held and not self._waiting:
                self._release(place)
                continue
            self._tell_queued(place, now)
            if not held and self._limits.queue_s is not None and now - place.asked_at > self._limits.queue_s:
                why = f" ({place.place.why})" if place.place.why else ""
                raise DeviceError(
                    f"No nodes were granted in {self._limits.queue_s:g} s (--queue-timeout): {place.place.name} is "
                    f"queued{why}. Nothing is lost: resume goes on."
                )

    def _tell_queued(self, place: HeldPlace, now: float) -> None:
        why = place.place.why
        if place.place.state is not PlaceState.QUEUED or now - place.asked_at < _QUIET_S:
            return
        if why and place.told_reason != why:
            place.told_reason = why
            nodes = f"{self._layout.nodes} node{'s' * (self._layout.nodes > 1)}"
            self._notify(f"Waiting for {nodes}: {place.place.name} is queued ({why}).")

    def _tell_phase(self) -> None:
        phase = next((place.phase for place in self._places if place.phase), "")
        if phase != self._phase:
            self._phase = phase
            self._on_phase(phase)

    def _release(self, place: HeldPlace) -> None:
        place.release()
        del self._held[place.place]
