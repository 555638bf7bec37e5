"""A launcher that simulates launches from a landscape: whole searches in seconds, without a GPU, in virtual time.

A landscape maps a configuration to the result of its launch: any object with the two methods of ``Landscape``, such as
``tests.harness.landscapes.Hill``. The launcher sends the same events and reports as a real launcher. Its clock jumps
from event to event, so concurrent launches interleave as in real time.
"""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import itertools
import json
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from optuna_dsat.config.differences import live_changes
from optuna_dsat.config.ds_config import GRADIENT_ACCUMULATION, MICRO_BATCH
from optuna_dsat.launch.machine.devices import Device, Devices
from optuna_dsat.launch.protocol import (
    Conditions,
    Finished,
    Holder,
    LaunchReport,
    LaunchRequest,
    LaunchUpdate,
    Observed,
    SlotsBusyError,
)
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.agent.preload import Preload
from optuna_dsat.runtime.events import (
    CheckpointsOff,
    EngineReady,
    Event,
    ModelFacts,
    ProfileMeasured,
    RankFailed,
    RankFinished,
    RankStarted,
    StepMeasured,
)
from optuna_dsat.runtime.overlay import MODEL, without_model
from optuna_dsat.words import things_in_words

_EPOCH_S = 1_700_000_000.0
"""Unix time at which virtual time starts, so that simulated events look like real events."""

_EXIT_S = 0.5
"""Seconds from the last event of a launch, or its stop, to its end."""

_ORDER_S = 0.1
"""Seconds from the start of a trial that continues a launch to its first step."""

_RECORDED_FAILURES = frozenset(
    {
        Outcome.COMMUNICATION_ERROR,
        Outcome.HOST_OUT_OF_MEMORY,
        Outcome.INVALID_CONFIG,
        Outcome.OUT_OF_MEMORY,
        Outcome.SCRIPT_ERROR,
    }
)
"""Outcomes recorded by a rank; the others are determined by the launcher."""

SIMULATED_DEVICES = Devices(
    kind="cuda",
    devices=(Device(index=0, visible_id="0", name="simulated", memory_bytes=2**36),),
    host_memory_bytes=2**40,
)
"""Devices for a study's request; a simulated launch uses the devices of its landscape."""


@dataclass(frozen=True, kw_only=True)
class SimulatedProfile(ModelFacts):
    """Result of a profile launch."""

    device_name: str = "simulated"
    optimizer: str = "AdamW"


@dataclass(frozen=True, kw_only=True)
class SimulatedResult:
    """Result of a configuration's launch, without noise. Durations of phases are per global step."""

    outcome: Outcome = Outcome.MEASURED
    startup_s: float = 0.0
    """Time from the start of the launch to the first step; to the end for a failed launch."""
    forward_s: float = 0.0
    """Of all micro-batches of the step."""
    backward_s: float = 0.0
    step_s: float = 0.0
    other_s: float = 0.0
    """Outside the three phases, such as data loading."""
    peak_bytes: int = 0
    missing_bytes: int | None = None
    """Bytes of the failed allocation, if any."""
    failed_at_step: int = 1
    """Global step (from 1) in which a failure occurs."""
    message: str = ""
    loss: float | None = None
    """Of every step; None if the script's losses are not observed."""
    power_w: float | None = None
    """Of all GPUs."""
    checkpoints: bool = False
    """Whether the script checkpoints activations itself, and the launch set that."""

    @property
    def latency_s(self) -> float:
        """Wall time of a global step."""
        return self.forward_s + self.backward_s + self.step_s + self.other_s


class Landscape(Protocol):
    """Results of all configurations of a model on a machine; deterministic, since noise is added later."""

    def profile(self, slots: int) -> SimulatedProfile:
        """Return the measurements of a profile launch on ``slots`` devices."""
        ...

    def run(self, ds_config: Mapping[str, Any], slots: int) -> SimulatedResult:
        """Return the result of a launch with a complete DeepSpeed config on ``slots`` devices."""
        ...


@dataclass
class SimulatedLaunch:
    """A simulated launch."""

    request: LaunchRequest
    started_s: float
    devices: tuple[int, ...]
    luck: float = 1.0
    """Factor on all step times of the launch, common to the trials that it measures."""
    root: str = ""
    """The launch that it continues; empty if it started its own processes."""
    first_boundary_s: float | None = None
    last_boundary_s: float | None = None
    power_w: float | None = None


class SimulatedLauncher:
    """Simulates launches from a landscape, in virtual time. Implements the ``Launcher`` protocol.

    With ``continues``, the ranks of a measured launch wait for a trial that differs in live settings only. It pays no
    start-up and shares the launch's deviation. They leave at the next ``poll`` without such a trial.

    Args:
        landscape: Result of each configuration.
        total_slots: Devices of the simulated machine.
        noise: Relative standard deviation of the step time between launches of the same configuration; a fifth of it
            between steps of a launch.
        seed: Determines the noise, together with the configuration and the number of its earlier launches.
        continues: Whether requests that may continue a launch do so.
    """

    def __init__(
        self,
        landscape: Landscape,
        *,
        total_slots: int = 8,
        noise: float = 0.0,
        seed: int = 0,
        continues: bool = False,
    ) -> None:
        self._landscape = landscape
        self._noise = noise
        self._seed = seed
        self._continues = continues
        self._parked: list[SimulatedLaunch] = []
        """Measured launches whose ranks wait for another trial."""
        self._left_at_s = 0.0
        """Time at which the ranks of the last such launch have left."""
        self._free = list(range(total_slots))
        self._total = total_slots
        self._running: dict[str, SimulatedLaunch] = {}
        self._attempts: Counter[str] = Counter()
        self._queue: list[tuple[float, int, LaunchUpdate]] = []
        self._order = itertools.count()
        self._now_s = 0.0

    @property
    def now_s(self) -> float:
        """Virtual time in seconds since the launcher was created."""
        return self._now_s

    @property
    def free_slots(self) -> int:
        """Slots that are currently free, or held by ranks that wait for another trial."""
        return len(self._free) + sum(len(launch.devices) for launch in self._parked)

    @property
    def total_slots(self) -> int:
        """Slots this launcher manages, busy or free."""
        return self._total

    @property
    def waiting(self) -> Collection[str]:
        """Always empty: slots are free as soon as a launch has finished."""
        return ()

    def holders(self) -> Sequence[Holder]:
        """Return no holders: only launches of this launcher take slots."""
        return ()

    def prepare(self, preload: Preload, *, operators: Sequence[str] = ()) -> None:
        """Do nothing: a simulation imports and compiles nothing."""

    def start(self, request: LaunchRequest) -> None:
        """Start a launch.

        Raises:
            SlotsBusyError: If fewer than ``request.slots`` slots are free.
        """
        if not 1 <= request.slots <= self.free_slots:
            raise SlotsBusyError(
                f"A launch asks for {things_in_words(request.slots, 'slot')}; "
                f"{self.free_slots} of {self._total} are free."
            )
        result = self._landscape.run(request.ds_config, request.slots)
        config = request.ds_config
        changes_model = any(config.get(MODEL, {}).values())
        key = json.dumps(config if changes_model else without_model(config), sort_keys=True, default=str)
        rng = random.Random(hashlib.sha256(f"{self._seed}/{key}/{self._attempts[key]}".encode()).digest())
        self._attempts[key] += 1
        luck = max(0.1, rng.gauss(1.0, self._noise))
        launch = self._continued(request) or self._begun(request, luck)
        if launch.root:
            result = dataclasses.replace(result, startup_s=_ORDER_S)
        self._running[request.launch_id] = launch
        self._schedule(launch, result, rng)

    def _continued(self, request: LaunchRequest) -> SimulatedLaunch | None:
        """Return the launch of a trial that continues a launch whose ranks wait, None if it continues none."""
        if request.purpose != "trial" or not request.continues:
            return None
        for waiting in self._parked:
            if _is_continued_by(waiting.request, request):
                self._parked.remove(waiting)
                root = waiting.root or waiting.request.launch_id
                return SimulatedLaunch(request, self._now_s, waiting.devices, luck=waiting.luck, root=root)
        return None

    def _begun(self, request: LaunchRequest, luck: float) -> SimulatedLaunch:
        """Return a launch with its own processes, which start once the ranks that wait have left."""
        self._dismiss()
        devices = tuple(self._free[: request.slots])
        del self._free[: request.slots]
        return SimulatedLaunch(request, max(self._now_s, self._left_at_s), devices, luck=luck)

    def _dismiss(self) -> None:
        """End the ranks that wait for another trial."""
        for launch in self._parked:
            self._free = sorted((*self._free, *launch.devices))
            self._left_at_s = self._now_s + _EXIT_S
        self._parked.clear()

    def _waits(self, request: LaunchRequest, outcome: Outcome) -> bool:
        """Return whether the ranks of a finished launch wait for another trial."""
        return self._continues and request.continues and outcome is Outcome.MEASURED

    def _schedule(self, launch: SimulatedLaunch, result: SimulatedResult, rng: random.Random) -> None:
        """Queue all updates of a launch."""
        request, launch.power_w = launch.request, result.power_w
        timeline = _RankTimeline(request, result, rng, noise=self._noise, luck=launch.luck)
        profile = self._landscape.profile(request.slots) if request.purpose == "profile" else None
        end_s = 0.0
        for offset_s, event in timeline.events(profile):
            end_s = offset_s
            self._push(launch.started_s + offset_s, Observed(launch_id=request.launch_id, event=event))
            if isinstance(event, StepMeasured):
                launch.first_boundary_s = offset_s if launch.first_boundary_s is None else launch.first_boundary_s
                launch.last_boundary_s = offset_s
        measured = f"measured to step {timeline.last_step}"
        message = measured if result.outcome is Outcome.MEASURED else _message(result)
        exit_s = 0.0 if self._waits(request, result.outcome) else _EXIT_S
        self._finish_at(launch, launch.started_s + end_s + exit_s, result.outcome, message, result)

    def _finish_at(
        self, launch: SimulatedLaunch, time_s: float, outcome: Outcome, message: str, result: SimulatedResult | None
    ) -> None:
        request = launch.request
        measured = launch.first_boundary_s is not None and launch.last_boundary_s is not None
        report = LaunchReport(
            launch_id=request.launch_id,
            outcome=outcome,
            message=message,
            exit_code=0 if outcome is Outcome.MEASURED else 1,
            error_excerpt="" if outcome in (Outcome.MEASURED, Outcome.PRUNED) else message,
            missing_bytes=None if result is None else result.missing_bytes,
            log_path="",
            command=("simulated", request.command.script, *request.command.args),
            host="simulated",
            devices=launch.devices,
            pids=(),
            started_at=_EPOCH_S + launch.started_s,
            startup_s=(launch.first_boundary_s or 0.0) if measured else time_s - launch.started_s,
            measured_s=(launch.last_boundary_s or 0.0) - (launch.first_boundary_s or 0.0),
            exit_s=0.0 if self._waits(request, outcome) else _EXIT_S,
            root=launch.root,
            conditions=Conditions(power_w=launch.power_w),
        )
        self._push(time_s, Finished(launch_id=request.launch_id, report=report))

    def _push(self, time_s: float, update: LaunchUpdate) -> None:
        if isinstance(update, Observed):
            event = dataclasses.replace(update.event, time=_EPOCH_S + time_s)
            update = Observed(launch_id=update.launch_id, event=event)
        heapq.heappush(self._queue, (time_s, next(self._order), update))

    def poll(self, timeout_s: float) -> Sequence[LaunchUpdate]:  # noqa: ARG002 - virtual time never waits
        """Advance the clock to the next update; return all updates at that time."""
        self._dismiss()
        if not self._queue:
            return ()
        self._now_s = self._queue[0][0]
        updates: list[LaunchUpdate] = []
        while self._queue and self._queue[0][0] <= self._now_s:
            update = heapq.heappop(self._queue)[2]
            updates.append(update)
            if isinstance(update, Finished):
                self._release(update.launch_id, update.report.outcome)
        return updates

    def _release(self, launch_id: str, outcome: Outcome) -> None:
        launch = self._running.pop(launch_id)
        if self._waits(launch.request, outcome):
            self._parked.append(launch)
            return
        self._free = sorted((*self._free, *launch.devices))

    def stop(self, launch_id: str, *, outcome: Outcome = Outcome.PRUNED, message: str = "") -> None:
        """End a launch; its ``Finished`` comes half a virtual second later. Unknown launches are ignored."""
        launch = self._running.get(launch_id)
        if launch is None:
            return
        self._queue = [entry for entry in self._queue if entry[2].launch_id != launch_id]
        heapq.heapify(self._queue)
        elapsed_s = self._now_s - launch.started_s
        if launch.last_boundary_s is not None:
            launch.last_boundary_s = min(launch.last_boundary_s, elapsed_s)
        if launch.first_boundary_s is not None and launch.first_boundary_s > elapsed_s:
            launch.first_boundary_s = launch.last_boundary_s = None
        text = message or f"stopped: {outcome.value}"
        self._finish_at(launch, self._now_s + _EXIT_S, outcome, text, None)

    def close(self) -> None:
        """End everything still running."""
        for launch_id in list(self._running):
            self._release(launch_id, Outcome.KILLED)
        self._dismiss()
        self._queue.clear()


class _RankTimeline:
    """Events of the ranks of a simulated launch, with their times."""

    def __init__(
        self, request: LaunchRequest, result: SimulatedResult, rng: random.Random, *, noise: float, luck: float
    ) -> None:
        self._request = request
        self._result = result
        self._rng = rng
        self._noise = noise
        self._run_factor = luck
        config = request.ds_config
        self._micro_batch = int(config.get(MICRO_BATCH, 1))
        self._accumulation = int(config.get(GRADIENT_ACCUMULATION, 1))
        self._stage = int(config.get("zero_optimization", {}).get("stage", 0))
        self._failed = result.outcome is not Outcome.MEASURED
        self.last_step = request.end_profile_step
        if self._failed:
            self.last_step = min(self.last_step, result.failed_at_step - 1)

    def events(self, profile: SimulatedProfile | None) -> list[tuple[float, Event]]:
        """Return the events of all ranks with their offsets in seconds from the start of the launch."""
        ranks = range(self._request.slots)
        startup_s = self._result.startup_s
        timed: list[tuple[float, Event]] = [(0.0, self._started(rank)) for rank in ranks]
        timed += [(startup_s * 0.9, self._ready(rank)) for rank in ranks]
        now_s = startup_s
        if self._result.checkpoints:
            timed.append((now_s, CheckpointsOff(rank=0, time=0.0)))
        if profile is not None and not self._failed:
            now_s += self._result.latency_s
            values = dataclasses.asdict(profile)
            timed += [(now_s, ProfileMeasured(rank=rank, time=0.0, **values)) for rank in ranks]
        for step in range(1, self.last_step + 1):
            factor = self._run_factor * max(0.1, self._rng.gauss(1.0, self._noise / 5))
            now_s += self._result.latency_s * factor
            timed += [(now_s, self._step(rank, step, factor)) for rank in ranks]
        if not self._failed:
            timed += [(now_s, _finished(rank, self.last_step)) for rank in ranks]
        elif self._result.outcome in _RECORDED_FAILURES:
            timed.append((now_s, self._failure()))
        return timed

    def _started(self, rank: int) -> RankStarted:
        slots = self._request.slots
        return RankStarted(rank=rank, time=0.0, local_rank=rank, world_size=slots, pid=0)

    def _ready(self, rank: int) -> EngineReady:
        slots = self._request.slots
        return EngineReady(
            rank=rank,
            time=0.0,
            zero_stage=self._stage,
            train_batch_size=self._micro_batch * self._accumulation * slots,
            train_micro_batch_size_per_gpu=self._micro_batch,
            gradient_accumulation_steps=self._accumulation,
            data_parallel_size=slots,
            pipeline=False,
            device="cuda",
        )

    def _step(self, rank: int, step: int, factor: float) -> StepMeasured:
        result = self._result
        return StepMeasured(
            rank=rank,
            time=0.0,
            step=step,
            latency_s=result.latency_s * factor,
            forward_s=result.forward_s * factor,
            backward_s=result.backward_s * factor,
            step_s=result.step_s * factor,
            samples=self._micro_batch * self._accumulation,
            observed_micro_batch=self._micro_batch,
            loss=result.loss,
            peak_allocated_bytes=result.peak_bytes,
            peak_reserved_bytes=result.peak_bytes,
            rss_bytes=0,
            steps_completed=step,
        )

    def _failure(self) -> RankFailed:
        result = self._result
        return RankFailed(
            rank=0,
            time=0.0,
            outcome=result.outcome,
            phase="forward",
            error_type="SimulatedError",
            message=_message(result),
            traceback="",
            missing_bytes=result.missing_bytes,
            steps=self.last_step,
        )


def _is_continued_by(running: LaunchRequest, wanted: LaunchRequest) -> bool:
    """Return whether the ranks of a launch can measure another request."""
    same = ("slots", "device_memory_bytes", "env", "isolation", "writable", "command")
    equal = all(getattr(running, name) == getattr(wanted, name) for name in same)
    return equal and live_changes(running.ds_config, wanted.ds_config) is not None


def _finished(rank: int, steps: int) -> RankFinished:
    return RankFinished(rank=rank, time=0.0, reason="profile_done", steps=steps)


def _message(result: SimulatedResult) -> str:
    return result.message or f"rank 0: {result.outcome.value.replace('_', ' ')}"
