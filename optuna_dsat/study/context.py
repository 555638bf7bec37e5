"""A study that runs in this process: what profile, search and confirmation share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import optuna
from optuna.trial import FrozenTrial

from optuna_dsat.config.search_space import SearchSpace
from optuna_dsat.launch.follow import SlotWait, follow
from optuna_dsat.launch.measurement import GlobalStep, LaunchRecord
from optuna_dsat.launch.protocol import Launcher, LaunchReport, LaunchRequest
from optuna_dsat.runtime.events import Event
from optuna_dsat.store import Store
from optuna_dsat.study.profile.profiled import Profiled
from optuna_dsat.study.progress import Message, Observer, TrialPhase, TrialStepped
from optuna_dsat.study.requests import phase_of
from optuna_dsat.study.search.methods import Method
from optuna_dsat.study.space import objective
from optuna_dsat.study.spec import StudySpec


@dataclass(frozen=True, kw_only=True)
class StudyContext:
    """A study that runs in this process: its spec, database, launcher and observer."""

    spec: StudySpec
    """After the profile launch it follows the script's trainer."""
    study_uuid: str
    """The study's identifier in the store."""
    store: Store
    launcher: Launcher
    observer: Observer
    """Called with each progress event."""
    wait: SlotWait
    """Reports which processes occupy the slots and limits the wait for them."""
    callbacks: Sequence[Callable[[optuna.Study, FrozenTrial], None]] = ()
    """Called after each launched trial."""

    def say(self, text: str) -> None:
        """Send a message to the observer, unless it is empty."""
        if text:
            self.observer(Message(text=text))

    def show_phase(self, event: Event, number: int | None) -> None:
        """Tell the observer which phase of a launch an event starts; the trial is None for a profile."""
        if (phase := phase_of(event)) is not None:
            self.observer(TrialPhase(number=number, words=phase))

    def show_step(self, step: GlobalStep, number: int, *, peak_bytes: int) -> None:
        """Tell the observer about a step of a trial's launch."""
        rate = step.samples / step.latency_s
        self.observer(TrialStepped(number=number, step=step.step, samples_per_s=rate, peak_bytes=peak_bytes))

    def launch(self, request: LaunchRequest) -> tuple[LaunchRecord, LaunchReport]:
        """Run a launch beside the trials to its end, and store it."""
        record, report = follow(self.launcher, request, wait=self.wait)
        self.record_launch(report, record, purpose=request.purpose)
        return record, report

    def record_launch(
        self, report: LaunchReport, record: LaunchRecord, *, purpose: str, trial_number: int | None = None
    ) -> None:
        """Store a finished launch of the profile or the confirmation, and its steps."""
        self.store.record_launch(self.study_uuid, report, trial_number=trial_number, purpose=purpose, attempt=0)
        self.store.record_steps(self.study_uuid, report.launch_id, record.stored_events)


@dataclass(frozen=True, kw_only=True)
class SearchContext(StudyContext):
    """A study after its profile launch: it can be searched and concluded."""

    study: optuna.Study
    """Made with the method's sampler and pruner."""
    profiled: Profiled
    space: SearchSpace
    method: Method

    @cached_property
    def metric(self) -> str:
        """The metric that is optimised."""
        return objective(self.spec, self.profiled)

    def trials(self) -> Sequence[FrozenTrial]:
        """Return the trials of the study as they are now."""
        return self.study.get_trials(deepcopy=False)
