"""The slots of a cluster: launches run on nodes that its own scheduler grants."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from optuna_dsat.launch.agent.command import write_run_directory
from optuna_dsat.launch.agent.files import append_events, append_log
from optuna_dsat.launch.isolation import FolderWatch
from optuna_dsat.launch.launch import Launch, WaitingLaunch
from optuna_dsat.launch.launcher import each_once
from optuna_dsat.launch.machine.nvml import DeviceError
from optuna_dsat.launch.places.engine import ClusterError, Engine, News, Place, PlaceState
from optuna_dsat.launch.places.place import HeldPlace, Layout, RemoteLaunch, Stage
from optuna_dsat.launch.protocol import Holder, LaunchRequest, SlotsBusyError, Verdict
from optuna_dsat.launch.run_directory import RunDirectory
from optuna_dsat.launch.warm.forking import Forking
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.agent.operators import ASYNC_IO
from optuna_dsat.secrecy.references import resolved, values_for
from optuna_dsat.words import things_in_words

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


class Cluster:
    """The slots of a cluster's nodes (``Places``): requested while launches wait, and given back when unused."""

    def __init__(
        self,
        output_dir: Path,
        *,
        engine: Engine,
        layout: Layout,
        limits: Limits,
        files: Mapping[str, str],
        forking: Forking,
        own_files: Collection[str] = (),
        environ: Mapping[str, str] | None = None,
        on_notice: Callable[[str], None] = lambda _: None,
        on_phase: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._output_dir = output_dir
        self._engine = engine
        self._layout = layout
        self._limits = limits
        self._files = files
        self._environ = dict(os.environ if environ is None else environ)
        self._notify = each_once(on_notice)
        self._on_phase = on_phase
        self._phase = ""
        self._forking = forking
        self._operators: tuple[str, ...] = ()
        self._held: dict[Place, HeldPlace] = {}
        """Allocation of the engine -> messages of its nodes."""
        self._changes = FolderWatch(output_dir, own_files=own_files)
        self._launches: dict[str, tuple[Launch, RemoteLaunch]] = {}
        self._losses = 0

    @property
    def total_slots(self) -> int:
        """Ranks that may run at once."""
        return self._limits.places * self._layout.ranks

    @property
    def free_slots(self) -> int:
        """Slots of places without a launch, held or not."""
        return self.total_slots - len(self._launches) * self._layout.ranks

    def holders(self) -> Sequence[Holder]:
        """Return the launches and queued places, all of them this search's own: their wait is limited here."""
        running = [Holder(device=name, who="a launch of this search", own=True) for name in self._launches]
        queued = [place for place in self._held.values() if place.stage is not Stage.USABLE]
        return [*running, *(Holder(device=item.place.name, who="a queued place", own=True) for item in queued)]

    def prepare(self, operators: Sequence[str]) -> None:
        """Set the operators that nodes compile; they begin with it at once, or once they are there."""
        self._operators = tuple(operators)

    def admit(self, request: LaunchRequest) -> None:
        """Check that a launch has the size of a place."""
        if request.slots != self._layout.ranks:
            has = things_in_words(self._layout.ranks, "slot")
            raise ValueError(f"A place has {has}; {request.launch_id} asks for {request.slots}.")

    def write(self, request: LaunchRequest) -> RunDirectory:
        """Write the run directory of a launch."""
        return write_run_directory(request, self._output_dir)

    def begin(self, waiting: WaitingLaunch) -> Launch:
        """Start a launch in the first place that is idle."""
        request, place = waiting.request, self._idle_place()
        if place is None:
            raise SlotsBusyError(f"A launch asks for {things_in_words(request.slots, 'slot')}; 0 are free.")
        remote = RemoteLaunch(request.launch_id, place=place, nodes=self._layout.nodes, slots=request.slots)
        launch = Launch(
            request=request,
            directory=self.write(request) if waiting.directory is None else waiting.directory,
            processes=remote,
            devices=tuple(range(request.slots)),
            command=(),
            started=time.monotonic(),
            started_unix=time.time(),
            repeats=waiting.repeats,
        )
        self._launches[request.launch_id] = launch, remote
        self._changes.begin(request)
        place.launch_id = request.launch_id
        if self._layout.nodes == 1:
            self._order_launch(request.launch_id, port=0)
        else:
            place.order({"do": "port", "launch_id": request.launch_id, "address": place.address}, node=0)
        return launch

    def continue_with(self, request: LaunchRequest, launch: Launch, changes: Mapping[str, Any]) -> Launch:
        """Have the ranks of a launch that wait for an order measure another trial."""
        self._changes.check(launch)
        continued = launch.continued(request, changes)
        _, remote = self._launches.pop(launch.request.launch_id)
        remote.take_on(request.launch_id, {"request": self._on_the_wire(request), "changes": dict(changes)})
        self._launches[request.launch_id] = continued, remote
        return continued

    def _on_the_wire(self, request: LaunchRequest) -> dict[str, Any]:
        return replace(request, env=resolved(dict(request.env), self._environ)).to_json()

    def _idle_place(self) -> HeldPlace | None:
        for place in self._held.values():
            place.prepare(self._forking.preload, self._operators)
            if place.is_idle:
                return place
        return None

    def _order_launch(self, name: str, *, port: int) -> None:
        """Have the nodes start a launch, unless it was stopped meanwhile."""
        if name not in self._launches or self._launches[name][0].stop_reason is not None:
            return
        launch, remote = self._launches[name]
        remote.ordered = True
        request = launch.request
        secrets = values_for([request.command.args, request.ds_config, request.overlay, request.env], self._environ)
        order: dict[str, Any] = {
            "do": "launch",
            "request": self._on_the_wire(request),
            "environ": secrets,
            "warm": self._forking.enabled and launch.repeats is None,
        }
        for node in range(self._layout.nodes):
            rendezvous = remote.place.rendezvous(node, port)
            meeting = None if rendezvous is None else rendezvous.to_json()
            remote.place.order({**order, "rendezvous": meeting}, node=node)

    def advance(self, pause_s: float) -> None:
        """Receive news from the nodes; wait up to ``pause_s`` seconds for some.

        Raises:
            ClusterError: If nodes do not meet the study's requirements, or the cluster refuses a place.
            DeviceError: If places are lost one after another before a launch ends in them.
        """
        for news in self._engine.news(pause_s):
            self._take(news)
        for place in list(self._held.values()):
            place.advance()
            if place.stage is Stage.LOST:
                self._lose(place)
            else:
                place.prepare(self._forking.preload, self._operators)

    def _take(self, news: News) -> None:
        place = self._held.get(news.place)
        if place is None:
            return
        message = news.message
        kind, name = str(message.get("news")), str(message.get("launch_id", ""))
        if kind == "notice":
            self._notify(f"{place.name_of(news.node)}: {message['text']}")
        elif kind == "port":
            self._order_launch(name, port=int(message["port"]))
        elif kind == "prepared":
            place.note(news)
            for builder, why in message["failed"].items():
                where = place.name_of(news.node)
                if builder == ASYNC_IO:
                    raise ClusterError(
                        f"Offload to NVMe needs DeepSpeed's async_io, which {where} cannot build: {why}."
                    )
                self._notify(f"DeepSpeed's {builder} fails on {where}, and so will what needs it: {why}.")
        elif not name:
            place.note(news)
        elif name in self._launches:
            self._take_of_launch(name, news)

    def _take_of_launch(self, name: str, news: News) -> None:
        launch, remote = self._launches[name]
        place, message, kind = remote.place, news.message, news.message["news"]
        if kind == "events":
            append_events(launch.directory, message, ahead_s=place.clock_ahead_s(news.node))
        elif kind == "log":
            append_log(launch.directory, message)
        else:
            remote.note(news.node, message)
        if kind == "started" and len(remote.forked) == self._layout.nodes:
            launch.started, launch.started_unix = time.monotonic(), news.time
            launch.command = remote.command
            launch.preloaded = self._forking.preload if all(remote.forked.values()) else None
            cwd = launch.request.command.cwd
            launch.directory.write_command(remote.command, cwd=cwd, devices=launch.devices, environ={})
        if kind == "failed":
            where = place.name_of(news.node)
            launch.end(Verdict(outcome=Outcome.KILLED, message=f"{where} could not start it: {remote.failure}"))

    def _lose(self, place: HeldPlace) -> None:
        """Forget a place that is lost, and end what ran there."""
        del self._held[place.place]
        why = f"{place.place.name} was lost: {place.place.why}"
        for launch, remote in self._launches.values():
            if remote.place is place:
                remote.is_lost = True
                launch.end(Verdict(outcome=Outcome.KILLED, message=why))
        self._notify(f"{why[0].upper()}{why[1:]}.")
        self._losses += 1
        if self._losses >= _MOST_LOSSES:
            raise DeviceError(
                f"{self._losses} places were lost one after another, the last one since {place.place.why}."
            )

    def tend(self, waiting: int) -> None:
        """Ask for the places that waiting launches need, and give back places that nobody needs."""
        coming = sum(place.launch_id is None for place in self._held.values())
        while coming < waiting and len(self._held) < self._limits.places:
            place = HeldPlace(self._engine, self._layout, files=self._files)
            self._held[place.place] = place
            coming += 1
        self._give_back_places(waiting)
        phase = next((place.phase for place in self._held.values() if place.phase), "")
        if phase != self._phase:
            self._phase = phase
            self._on_phase(phase)

    def _give_back_places(self, waiting: int) -> None:
        """Give back places that nobody needs, and report and limit the wait for queued ones."""
        now = time.monotonic()
        held = any(place.stage is Stage.USABLE for place in self._held.values())
        for place in list(self._held.values()):
            if place.stage is Stage.USABLE and place.launch_id is None and not waiting:
                place.idle_since = now if place.idle_since is None else place.idle_since
                if now - place.idle_since >= self._limits.idle_s:
                    self._release(place)
                continue
            place.idle_since = None
            if place.stage is not Stage.QUEUED:
                continue
            if held and not waiting:
                self._release(place)
                continue
            self._tell_queued(place, now)
            if not held and self._limits.queue_s is not None and now - place.asked_at > self._limits.queue_s:
                why = f" ({place.place.why})" if place.place.why else ""
                raise DeviceError(
                    f"No nodes were granted in {self._limits.queue_s:g} s (--queue-timeout): {place.place.name} is "
                    f"queued{why}. Nothing is lost: resume continues."
                )

    def _tell_queued(self, place: HeldPlace, now: float) -> None:
        why = place.place.why
        if place.place.state is not PlaceState.QUEUED or now - place.asked_at < _QUIET_S:
            return
        if why and place.told_reason != why:
            place.told_reason = why
            nodes = f"{self._layout.nodes} node{'s' * (self._layout.nodes > 1)}"
            self._notify(f"Waiting for {nodes}: {place.place.name} is queued ({why}).")

    def _release(self, place: HeldPlace) -> None:
        place.release()
        del self._held[place.place]

    def ended(self, launch: Launch, *, note: str) -> None:  # noqa: ARG002 - nodes deal with devices that are not free
        """Forget a launch; its place is idle."""
        _, remote = self._launches.pop(launch.request.launch_id)
        remote.place.launch_id = None
        if remote.place.stage is not Stage.LOST:
            self._losses = 0
        self._changes.check(launch)

    def close(self) -> None:
        """End everything, and give all places back."""
        self._engine.close()
        self._forking.close()
        self._held.clear()
        self._launches.clear()
