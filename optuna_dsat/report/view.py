"""A study as its report sees it: read once from the store, never written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from optuna.trial import FrozenTrial, TrialState

from optuna_dsat.launch.protocol import LaunchReport
from optuna_dsat.store import Store, StoredLaunch
from optuna_dsat.study.stored import StoredStudy, read_stored
from optuna_dsat.study.tuner import EndReason
from optuna_dsat.trials import attributes

__all__ = ["StudyView", "read_view"]


@dataclass(frozen=True, kw_only=True)
class StudyView(StoredStudy):
    """A study with its launches, read at one moment."""

    launches: tuple[StoredLaunch, ...]
    storage_url: str
    """Without its password."""

    @property
    def end_reason(self) -> str | None:
        """Why the search ended, empty where that was not recorded; None before its end and after an interruption."""
        if attributes.WINNER not in self.attributes or self.running:
            return None
        reason = str(self.attributes.get(attributes.END_REASON, ""))
        return None if reason == EndReason.INTERRUPTED else reason

    @cached_property
    def launched(self) -> tuple[FrozenTrial, ...]:
        """Trials that were launched and are over, by number."""
        return tuple(
            t for t in self.trials if t.state.is_finished() and attributes.LAUNCH_ID in t.user_attrs
        )  # fmt: skip

    @cached_property
    def running(self) -> int:
        """How many trials are in flight."""
        return sum(t.state is TrialState.RUNNING for t in self.trials)

    @cached_property
    def reports(self) -> Mapping[int, tuple[StoredLaunch, ...]]:
        """The launches of each trial, confirmations included, by the trial's number."""
        found: dict[int, list[StoredLaunch]] = {}
        for row in self.launches:
            if row.trial_number is not None:
                found.setdefault(row.trial_number, []).append(row)
        return {number: tuple(rows) for number, rows in found.items()}

    def launch_ids(self, trial: FrozenTrial) -> tuple[str, ...]:
        """Return the launches of a trial by name; a launch whose worker died left no report, but its files."""
        first = trial.user_attrs.get(attributes.LAUNCH_ID)
        names = [row.report.launch_id for row in self.reports.get(trial.number, ())]
        return tuple(dict.fromkeys([*([] if first is None else [first]), *names]))

    def last_report(self, trial: FrozenTrial) -> LaunchReport | None:
        """Return what became of the last launch of the trial itself."""
        own = [row.report for row in self.reports.get(trial.number, ()) if row.purpose == "trial"]
        return own[-1] if own else None


def read_view(store: Store, name: str) -> StudyView:
    """Read a study from the store.

    Raises:
        UsageError: If there is no such study; names those there are.
    """
    stored = read_stored(store, name)
    return StudyView(**vars(stored), launches=tuple(store.launches(stored.record.uuid)), storage_url=store.url)
