"""A study as its report sees it: read once from the store, never written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from optuna_dsat import history
from optuna_dsat.errors import UsageError
from optuna_dsat.finalists import Finalist
from optuna_dsat.launch.protocol import LaunchReport
from optuna_dsat.profiling import Profiled
from optuna_dsat.spec import StudySpec
from optuna_dsat.store import Store, StoredLaunch, StudyRecord
from optuna_dsat.telling import objective, speed_up
from optuna_dsat.tuner import EndReason

__all__ = ["Standing", "StudyView", "read_view"]


@dataclass(frozen=True, kw_only=True)
class Standing:
    """A measured trial and its metric, confirmed with more steps where it was."""

    trial: FrozenTrial
    value: float
    low: float | None = None
    """Lower end of the 95 % confidence interval; None where it was not confirmed."""
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class StudyView:
    """A study, read at one moment."""

    record: StudyRecord
    spec: StudySpec
    trials: tuple[FrozenTrial, ...]
    attributes: Mapping[str, Any]
    """User attributes of the study."""
    profiled: Profiled | None
    """None before the profile launch."""
    launches: tuple[StoredLaunch, ...]
    storage_url: str
    """Without its password."""

    @property
    def metric(self) -> str:
        """The metric that is optimised."""
        return self.spec.metric if self.profiled is None else objective(self.spec, self.profiled)

    @property
    def maximize(self) -> bool:
        """Whether a larger metric is better."""
        return self.spec.direction == "maximize"

    @property
    def end_reason(self) -> str | None:
        """Why the search ended, empty where that was not recorded; None before its end and after an interruption."""
        if history.WINNER not in self.attributes or self.running:
            return None
        reason = str(self.attributes.get(history.END_REASON, ""))
        return None if reason == EndReason.INTERRUPTED else reason

    @cached_property
    def finalists(self) -> Mapping[int, Finalist]:
        """What was measured again, by the trial's number."""
        return {f["number"]: Finalist(**f) for f in self.attributes.get(history.FINALISTS, [])}

    @cached_property
    def best(self) -> Standing | None:
        """The winner; while there is none, the best measured trial."""
        found = history.best_trials(self.trials, maximize=self.maximize)
        winner = self.attributes.get(history.WINNER)
        trial = next((t for t in found if t.number == winner), found[0] if found else None)
        return None if trial is None else self.standing(trial)

    @cached_property
    def baseline(self) -> Standing | None:
        """The user's own config, where it was measured."""
        trial = history.user_config_trial(self.trials)
        return None if trial is None else self.standing(trial)

    def standing(self, trial: FrozenTrial) -> Standing:
        """Return the metric of a measured trial, the confirmed one where there is one."""
        again = self.finalists.get(trial.number)
        if again is None or again.value is None:
            return Standing(trial=trial, value=trial.values[0])
        return Standing(trial=trial, value=again.value, low=again.low, high=again.high)

    def speed_up(self, standing: Standing) -> float | None:
        """Return how many times better than the user's own config it is; like is compared with like.

        A confirmed value is compared with the confirmed one of the user's config, a trial's with the trial's.
        """
        if self.baseline is None:
            return None
        confirmed = standing.low is not None and self.baseline.low is not None
        value = standing.value if confirmed else standing.trial.values[0]
        user_value = self.baseline.value if confirmed else self.baseline.trial.values[0]
        return speed_up(value, user_value, maximize=self.maximize)

    @cached_property
    def launched(self) -> tuple[FrozenTrial, ...]:
        """Trials that were launched and are over, by number."""
        return tuple(
            t for t in self.trials if t.state.is_finished() and history.LAUNCH_ID in t.user_attrs
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
        first = trial.user_attrs.get(history.LAUNCH_ID)
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
    record = store.find_study(name)
    if record is None:
        known = ", ".join(study.name for study in store.list_studies()) or "none"
        raise UsageError(f"There is no study {name!r} in {store.url}; there: {known}.")
    study = optuna.load_study(study_name=name, storage=store.storage)
    attributes = study.user_attrs
    key = attributes.get(history.FINGERPRINT)
    stored = None if key is None else store.find_profile(key)
    return StudyView(
        record=record,
        spec=StudySpec.model_validate(dict(record.spec)),
        trials=tuple(study.get_trials(deepcopy=False)),
        attributes=attributes,
        profiled=None if stored is None else Profiled.from_json(stored.profile),
        launches=tuple(store.launches(record.uuid)),
        storage_url=store.url,
    )
