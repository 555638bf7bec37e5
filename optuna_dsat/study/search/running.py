"""The launches of trials that are in flight: running, waiting for slots, or settled while their processes exit."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import optuna
from optuna.trial import FrozenTrial

from optuna_dsat.launch.measurement import LaunchRecord
from optuna_dsat.launch.protocol import LaunchRequest, SlotsBusyError
from optuna_dsat.outcome import Outcome
from optuna_dsat.study.context import SearchContext
from optuna_dsat.study.progress import TrialStarted
from optuna_dsat.trials import attributes


@dataclass(kw_only=True)
class Flight:
    """A launch of a trial."""

    trial: optuna.Trial
    request: LaunchRequest
    words: str
    """The configuration in words."""
    reason: str = ""
    """Why it is launched."""
    attempt: int = 0
    """Number of the launch within its trial, from 0."""
    reported: set[int] = field(default_factory=set)
    """Steps reported to the study, also by earlier launches of the trial: Optuna keeps the first report of each."""
    record: LaunchRecord = field(init=False)
    """Events received so far."""

    def __post_init__(self) -> None:
        request = self.request
        self.record = LaunchRecord(world_size=request.slots, start_profile_step=request.start_profile_step)

    @property
    def is_user_config(self) -> bool:
        """Whether it measures the user's config."""
        return bool(self.trial.user_attrs.get(attributes.PURPOSE) == attributes.USER_CONFIG)

    @property
    def may_be_pruned(self) -> bool:
        """Whether the method's pruner judges it: not the user's config, nor the search at the user's global batch."""
        return not self.is_user_config and attributes.SAME_BATCH not in self.trial.user_attrs

    def retry(self) -> Flight:
        """Return the next attempt at the same configuration, with an empty record."""
        attempt = self.attempt + 1
        request = replace(self.request, launch_id=f"trial-{self.trial.number:04d}-retry-{attempt}")
        return replace(self, request=request, attempt=attempt)


class Flights:
    """Starts, stops and keeps the launches of trials in this process."""

    def __init__(self, context: SearchContext) -> None:
        self._context = context
        self._spec = context.spec
        self._launcher = context.launcher
        self._running: dict[str, Flight] = {}
        self._waiting: list[Flight] = []
        """Launches of ``_running`` that wait for slots."""
        self._exiting: dict[str, Flight] = {}
        """Launches whose trials are finished and whose processes still exit."""

    @property
    def running(self) -> bool:
        """Whether any launch runs or waits for slots."""
        return bool(self._running)

    @property
    def exiting(self) -> bool:
        """Whether processes of settled launches still exit."""
        return bool(self._exiting)

    def find(self, launch_id: str) -> Flight | None:
        """Return a launch that runs; None if it is not one of these."""
        return self._running.get(launch_id)

    def may_start(self) -> bool:
        """Whether slots and the study's limits allow another launch."""
        slots = self._spec.slots_per_trial
        if self._waiting or len(self._running) >= self._spec.max_concurrent_trials:
            return False
        if self._launcher.free_slots < slots:
            return False
        return self._spec.max_slots is None or (len(self._running) + 1) * slots <= self._spec.max_slots

    def start(self, flight: Flight) -> None:
        """Start a launch; if another tuner took its slots, it waits for ``start_waiting``."""
        self._running[flight.request.launch_id] = flight
        try:
            self._launcher.start(flight.request)
        except SlotsBusyError:
            self._waiting.append(flight)
            return
        self._context.observer(
            TrialStarted(
                number=flight.trial.number,
                words=flight.words,
                reason=flight.reason,
                attempt=flight.attempt,
                end_profile_step=flight.request.end_profile_step,
            )
        )

    def start_waiting(self) -> None:
        """Try again to start the launches that wait for slots."""
        waiting, self._waiting = self._waiting, []
        for flight in waiting:
            self.start(flight)

    def land(self, launch_id: str, *, exiting: bool) -> None:
        """Remove a launch from the running launches, if it is one; ``exiting`` while its processes are not gone."""
        flight = self._running.pop(launch_id, None)
        if flight is not None and exiting:
            self._exiting[launch_id] = flight

    def exited(self, launch_id: str) -> Flight | None:
        """Return a settled launch whose processes are gone, and forget it; None if it is not one of these."""
        return self._exiting.pop(launch_id, None)

    def watch_slots(self, *, ending: bool) -> None:
        """Report the wait for slots while nothing runs; raise ``DeviceError`` if others hold them for too long."""
        wait = self._context.wait
        waiting = {flight.request.launch_id for flight in self._waiting} | set(self._launcher.waiting)
        if self._exiting or self._running.keys() - waiting:
            wait.reset()
        elif waiting or (not ending and self._launcher.free_slots < self._spec.slots_per_trial):
            wait.check()
        else:
            wait.reset()

    def stop_all(self, *, reason: str) -> None:
        """Stop all launches; trials of launches that wait for slots are returned to the study."""
        for flight in self._waiting:
            del self._running[flight.request.launch_id]
            self._context.store.return_trial(self._context.study, flight.trial, reason=reason)
        self._waiting.clear()
        for launch_id in self._running:
            self._launcher.stop(launch_id, message=reason)

    def return_all(self, *, reason: str) -> list[int]:
        """Stop all launches and return their trials to the study, for another run or worker; return their numbers."""
        flights, self._running = list(self._running.values()), {}
        for flight in flights:
            self._launcher.stop(flight.request.launch_id, outcome=Outcome.LOST, message=reason)
        for flight in flights:
            self._context.store.return_trial(self._context.study, flight.trial, reason=reason)
        return [flight.trial.number for flight in flights]


def frozen(study: optuna.Study, trial: optuna.Trial) -> FrozenTrial:
    """Return a trial as the storage has it now."""
    return study._storage.get_trial(trial._trial_id)
