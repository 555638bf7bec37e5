"""A read-only snapshot of a study for reports, read once from the store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from optuna_dsat.cost.gpus import utilisation
from optuna_dsat.launch.protocol import LaunchReport
from optuna_dsat.runtime.overlay import is_compiled
from optuna_dsat.store import Store, StoredLaunch
from optuna_dsat.study.confirm.measured import Measured
from optuna_dsat.study.end_reason import EndReason
from optuna_dsat.study.folder import is_folder_of
from optuna_dsat.study.requests import steps_to_compile
from optuna_dsat.study.result import StudyResult, result_of
from optuna_dsat.study.stored import StoredStudy, read_launches, read_stored, reading
from optuna_dsat.trials import attributes


@dataclass(frozen=True, kw_only=True)
class StudyView(StoredStudy):
    """A snapshot of a study with its launches."""

    launches: tuple[StoredLaunch, ...]
    step_times: Mapping[str, tuple[float, ...]]
    """Launch id -> seconds of each counted step, of a rank on average, in order; only launches with counted steps."""
    storage_url: str
    """Without its password."""

    @cached_property
    def folder(self) -> Path | None:
        """The folder of the study's files; None if it is not on this machine, or may belong to another study."""
        folder = self.spec.study_dir
        return folder if is_folder_of(folder, self.record.uuid) else None

    def utilisation(self, measured: Measured) -> float | None:
        """Return a config's share of the device's peak FLOPS; None if the peak is unknown."""
        config = measured.trial.user_attrs[attributes.CONFIG]
        return None if self.profiled is None else utilisation(self.profiled.profile, config, measured.metrics)

    @cached_property
    def result(self) -> StudyResult | None:
        """The result so far; None if nothing was measured."""
        return result_of(self, self.launches, storage=self.storage_url, reason=self.end_reason or "")

    @property
    def end_reason(self) -> str | None:
        """Reason for the end of the search, empty if not recorded; None before its end and after an interruption."""
        return None if self.running else end_reason_of(self.attributes)

    @property
    def is_fruitless(self) -> bool:
        """Whether the search has made all of its launches and measured nothing."""
        spent = self.launches_used >= self.spec.max_trials
        return spent and bool(self.launched) and self.best is None and not self.running

    @cached_property
    def launched(self) -> tuple[FrozenTrial, ...]:
        """Finished trials that were launched, ordered by number."""
        return tuple(t for t in self.trials if t.state.is_finished() and attributes.LAUNCH_ID in t.user_attrs)

    @property
    def trials_done(self) -> int:
        """Number of finished trials that count against the budget."""
        return attributes.launches_used(self.launched)

    @cached_property
    def running(self) -> int:
        """Number of running trials."""
        return sum(t.state is TrialState.RUNNING for t in self.trials)

    @cached_property
    def reports(self) -> Mapping[int, tuple[StoredLaunch, ...]]:
        """Trial number -> launches, including confirmations."""
        result: dict[int, list[StoredLaunch]] = {}
        for row in self.launches:
            if row.trial_number is not None:
                result.setdefault(row.trial_number, []).append(row)
        return {number: tuple(rows) for number, rows in result.items()}

    def launch_ids(self, trial: FrozenTrial) -> tuple[str, ...]:
        """Return the ids of a trial's launches; a launch whose worker died has files but no report."""
        first = trial.user_attrs.get(attributes.LAUNCH_ID)
        names = [row.report.launch_id for row in self.reports.get(trial.number, ())]
        return tuple(dict.fromkeys([*([] if first is None else [first]), *names]))

    def last_report(self, trial: FrozenTrial) -> LaunchReport | None:
        """Return the report of the trial's last launch, confirmations excluded, or None."""
        reports = [row.report for row in self.reports.get(trial.number, ()) if row.purpose == "trial"]
        return reports[-1] if reports else None


def end_reason_of(study: Mapping[str, Any]) -> str | None:
    """Return the reason for the end of a search without running launches; see ``StudyView.end_reason``."""
    if attributes.WINNER not in study:
        return None
    reason = str(study.get(attributes.END_REASON, ""))
    return None if reason == EndReason.INTERRUPTED else reason


def read_view(store: Store, name: str) -> StudyView:
    """Read a study from the store; errors as ``read_stored``."""
    stored = read_stored(store, name)
    record = stored.record
    launches = read_launches(store, record)
    with reading(name, "its steps", record.versions):
        step_times = {**store.step_times(record.uuid, from_step=stored.spec.start_profile_step)}
        compiled = {t.number for t in stored.trials if is_compiled(t.user_attrs.get(attributes.CONFIG, {}))}
        for name in (launch.report.launch_id for launch in launches if launch.trial_number in compiled):
            step_times[name] = step_times.get(name, ())[steps_to_compile(stored.spec) :]
    return StudyView(
        **{field_.name: getattr(stored, field_.name) for field_ in fields(StoredStudy)},
        launches=launches,
        step_times=step_times,
        storage_url=store.absolute_url,
    )
