"""What every phase of a running study works with: profile, search, confirmation and conclusion."""

from __future__ import annotations

from dataclasses import dataclass

from optuna_dsat.launch.measurement import LaunchRecord
from optuna_dsat.launch.protocol import Launcher, LaunchReport
from optuna_dsat.launch.waiting import SlotWait
from optuna_dsat.store import Store
from optuna_dsat.study.progress import Message, Observer
from optuna_dsat.study.spec import StudySpec

__all__ = ["StudyContext"]


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
    """Reports who holds the slots and limits the wait for them."""

    def say(self, text: str) -> None:
        """Send a message to the observer."""
        self.observer(Message(text=text))

    def record_launch(
        self, report: LaunchReport, record: LaunchRecord, *, purpose: str, trial_number: int | None = None
    ) -> None:
        """Store a launch that ended and its steps.

        Args:
            report: What became of it.
            record: Its events.
            purpose: ``profile`` or ``confirm``.
            trial_number: The trial that it measures again; None if there is none.
        """
        self.store.record_launch(self.study_uuid, report, trial_number=trial_number, purpose=purpose, attempt=0)
        self.store.record_steps(self.study_uuid, report.launch_id, record.events)
