"""Open, create, check and load stored studies. All readers of a study use this module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from optuna.trial import FrozenTrial
from pydantic import ValidationError

from optuna_dsat.config.ds_config import with_values
from optuna_dsat.config.search_space import SearchSpace
from optuna_dsat.errors import ConfigError, NothingRunnableError, StudyConflictError, UnreadableStudyError, UsageError
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.failure import rule_in_words
from optuna_dsat.runtime.overlay import MODEL, flatten
from optuna_dsat.script.trainer import ScriptTrainer
from optuna_dsat.secrecy.shapes import hidden_data
from optuna_dsat.store import Store, StoredLaunch, StudyRecord
from optuna_dsat.study.config_changes import complete_config, ready_config
from optuna_dsat.study.confirm.measured import Measured, configuration_of
from optuna_dsat.study.confirm.rounds import Rounds
from optuna_dsat.study.confirm.speeds import Speed
from optuna_dsat.study.confirm.verdict import Verdict, verdict_of
from optuna_dsat.study.confirm.words import how_known, value_in_words
from optuna_dsat.study.options.declaration import stored_command
from optuna_dsat.study.profile.profiled import Profiled
from optuna_dsat.study.space import objective, space_of
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.trials import attributes
from optuna_dsat.words import things_in_words

if TYPE_CHECKING:
    from optuna_dsat.guided.planner import GuidedPlanner
    from optuna_dsat.guided.prior_knowledge import PriorKnowledge
    from optuna_dsat.launch.machine.devices import Devices

_REASON_CHARS = 200


@contextmanager
def reading(name: str, what: str, versions: Mapping[str, str]) -> Iterator[None]:
    """Convert errors from reading a study's data to ``UnreadableStudyError``, which names the study."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, ConfigError) as error:
        made = versions.get("optuna-dsat")
        by = f" (made by optuna-dsat {made})" if made else ""
        raise UnreadableStudyError(name, f"{what}: {_reason(error)}{by}") from error


def _reason(error: Exception) -> str:
    """Return the first line of an error, one of pydantic's with the field."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(str(part) for part in first['loc'])}: {rule_in_words(first['msg'])}"[:_REASON_CHARS]
    if isinstance(error, KeyError):
        return f"{error} is not known or missing"[:_REASON_CHARS]
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")[:_REASON_CHARS]


@dataclass(frozen=True, kw_only=True)
class StoredStudy:
    """Snapshot of a study."""

    record: StudyRecord
    stored_spec: StudySpec
    """The spec as stored."""
    spec: StudySpec
    """The spec with batch sizes of the script's trainer, which fills in sizes that the config leaves open."""
    trials: tuple[FrozenTrial, ...]
    attributes: Mapping[str, Any]
    """User attributes of the study."""
    profiled: Profiled | None
    """Result of the profile launch; None before it."""

    @property
    def maximize(self) -> bool:
        """Whether a larger metric is better."""
        return self.spec.maximize

    @property
    def metric(self) -> str:
        """The optimised metric; the requested metric before the profile launch."""
        return self.spec.metric if self.profiled is None else objective(self.spec, self.profiled)

    @property
    def launches_used(self) -> int:
        """Launches that count against the budget."""
        return attributes.launches_used(self.trials)

    @cached_property
    def measured(self) -> Sequence[FrozenTrial]:
        """The measured trials, best first."""
        return attributes.best_trials(self.trials, maximize=self.maximize)

    @property
    def fingerprint(self) -> str | None:
        """Key of the study's profile in the store; None before the profile launch."""
        return self.attributes.get(attributes.FINGERPRINT)

    @property
    def trainer(self) -> ScriptTrainer | None:
        """The script's trainer; None if it uses none that sets batch sizes."""
        return None if self.profiled is None else self.profiled.trainer

    @property
    def prior_knowledge(self) -> PriorKnowledge | None:
        """Prior knowledge from earlier studies; None without any."""
        known = self.attributes.get(attributes.WARM_START)
        if not known:
            return None
        from optuna_dsat.guided.prior_knowledge import PriorKnowledge

        return PriorKnowledge.from_json(known)

    @cached_property
    def space(self) -> SearchSpace:
        """The search space; before the profile launch it is not yet capped by the model's size."""
        return space_of(self.spec, self.profiled)

    @cached_property
    def planner(self) -> GuidedPlanner | None:
        """The models of ``guided`` over the study's space, for any method; None before the profile launch."""
        return self.planner_over(self.space)

    def planner_over(self, space: SearchSpace) -> GuidedPlanner | None:
        """Return the models of ``guided`` over another space of the study."""
        if self.profiled is None:
            return None
        from optuna_dsat.study.search.methods import make_planner

        return make_planner(self.spec, self.profiled, space, prior_knowledge=self.prior_knowledge)

    @cached_property
    def rounds(self) -> Rounds:
        """Rounds of the confirmation."""
        return Rounds.of(self.attributes)

    @cached_property
    def verdict(self) -> Verdict | None:
        """Verdict on the study so far; None if nothing was measured."""
        return verdict_of(self.trials, self.rounds, self.spec)

    @property
    def best(self) -> Measured | None:
        """The selected config; preliminary before the study is concluded, None if nothing was measured."""
        return None if self.verdict is None else self.verdict.result

    @property
    def baseline(self) -> Measured | None:
        """The user's config; None if it was not measured."""
        return None if self.verdict is None else self.verdict.baseline

    def selected(self, *, same_batch: bool = False) -> tuple[FrozenTrial, str]:
        """Return the trial of the result, or at the user's global batch, and a line on its number and metric.

        Raises:
            NothingRunnableError: If nothing was measured, or with ``same_batch`` nothing at the user's global batch.
        """
        if self.verdict is None:
            raise NothingRunnableError(f"The study {self.spec.name!r} has measured nothing yet.")
        if same_batch:
            measured = self.verdict.same_batch
            if measured is None:
                raise NothingRunnableError(f"The study {self.spec.name!r} has measured nothing at your global batch.")
            batch = things_in_words(measured.train_batch_size, "sample")
            return measured.trial, (
                f"trial {measured.number}: {self.speed(measured).text}, at your global batch of {batch}."
            )
        value = value_in_words(self.verdict, metric=self.metric, device=self.spec.device)
        trial = self.verdict.result.trial
        return trial, f"trial {trial.number}: {value}, {how_known(self.verdict)}."

    def speed(self, measured: Measured) -> Speed:
        """Return the speed of a measured config."""
        return measured.speed(metric=self.metric, device=self.spec.device)

    def check(self) -> None:
        """Compute everything that depends on stored values; ``ValueError`` and the like if one is invalid."""
        for launch in self.rounds.launches:
            Outcome(launch.outcome)
        for trial in self.trials:
            Outcome(trial.user_attrs.get(attributes.OUTCOME, Outcome.LOST))
            self.row(trial)
            attributes.step_facts(trial)
            float(trial.user_attrs.get(attributes.PREDICTED_VALUE, 0.0))
        _ = (self.space, self.prior_knowledge, self.verdict, self.rounds.finalists())

    def row(self, trial: FrozenTrial) -> dict[str, Any]:
        """Return a trial as a flat row, with measurements of the rounds."""
        return trial_row(trial, self.verdict)

    def complete_config(self, trial: FrozenTrial) -> dict[str, Any]:
        """Return a trial's DeepSpeed config without any tuning key and with all batch sizes."""
        return complete_config(trial, slots=self.spec.slots_per_trial, space=self.space)

    def ready_config(self, trial: FrozenTrial) -> dict[str, Any]:
        """Return a trial's DeepSpeed config as the script trains with it."""
        complete = self.complete_config(trial)
        config = self.as_in_file(ready_config(complete, user=self.spec.ds_config, trainer=self.trainer), complete)
        return self.at_batch(config, trial.number)

    def at_batch(self, config: dict[str, Any], number: int) -> dict[str, Any]:
        """Return a trial's config with the settings that the script computes from its batch; not of the user's file."""
        settings, computed = flatten(config), self.script_values(number)
        values = {key: computed[key] for key, value in self.script_values().items() if settings.get(key, ...) == value}
        return with_values(config, values)

    def script_values(self, number: int | None = None) -> dict[str, Any]:
        """Return dotted key -> value of settings that differ from the file, in a trial's or the profile launch."""
        differences = {} if self.profiled is None else self.profiled.config_differences
        trial = next((trial for trial in self.trials if trial.number == number), None)
        computed = [launch.script_values for launch in self.rounds.launches if launch.number == number]
        computed += [] if trial is None else [trial.user_attrs.get(attributes.SCRIPT_VALUES, {})]
        return {key: values[0] for key, values in differences.items()} | {**next(filter(None, computed), {})}

    def as_in_file(self, config: dict[str, Any], complete: Mapping[str, Any]) -> dict[str, Any]:
        """Return a config, of a trial's ``complete`` one, with the file's values of keys set in the script's code."""
        return config if self.profiled is None else self.profiled.as_in_file(self.spec, config, complete)

    def overlay_of(self, trial: FrozenTrial) -> dict[str, Any]:
        """Return a trial's DeepSpeed config with its settings that change the model, as a launch takes them."""
        complete = self.complete_config(trial)
        return {**self.ready_config(trial), **{key: complete[key] for key in (MODEL,) if key in complete}}


_COLUMNS = (
    "number", "state", "outcome", "value", "confirmed_value", "confirmed_low", "confirmed_high", "rounds", "speed_up",
    "handed_over", "configuration", "reason", "attempts", "peak_memory_bytes", "message",
)  # fmt: skip


def trial_row(trial: FrozenTrial, verdict: Verdict | None) -> dict[str, Any]:
    """Return a trial as a flat row, as ``trials`` of a result and ``optuna-dsat export`` show it."""
    attrs = trial.user_attrs
    again = None if verdict is None else verdict.in_rounds(trial.number)
    return {
        "number": trial.number,
        "state": trial.state.name.lower(),
        "outcome": attrs.get(attributes.OUTCOME),
        "value": None if trial.values is None else trial.values[0],
        "confirmed_value": None if again is None else again.value,
        "confirmed_low": None if again is None else again.interval.low,
        "confirmed_high": None if again is None else again.interval.high,
        "rounds": 0 if again is None else again.rounds,
        "speed_up": None if again is None or again.speed_up is None else again.speed_up.value,
        "handed_over": verdict is not None and trial.number == verdict.result.number,
        "configuration": configuration_of(trial) if attributes.CONFIG in attrs else None,
        "reason": attrs.get(attributes.REASON),
        "attempts": attrs.get(attributes.ATTEMPTS),
        "peak_memory_bytes": attrs.get(attributes.PEAK_BYTES),
        "message": attrs.get(attributes.MESSAGE, attrs.get(attributes.VETOED)),
        "skipped_steps": attrs.get(attributes.SKIPPED_STEPS, 0),
        "steps_completed": attrs.get(attributes.STEPS_COMPLETED),
        "params": trial.params,
        "metrics": attrs.get(attributes.METRICS, {}),
        "config": attrs.get(attributes.CONFIG),
    }


def flat_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rows with equal keys and no dictionary or config: ``param:NAME`` and ``metric:NAME`` instead."""
    params = sorted({key for row in rows for key in row["params"]})
    metrics = sorted({key for row in rows for key in row["metrics"]})
    return [
        {
            **{name: row[name] for name in _COLUMNS},
            **{f"param:{key}": row["params"].get(key) for key in params},
            **{f"metric:{key}": row["metrics"].get(key) for key in metrics},
        }
        for row in rows
    ]


def columns_of(rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the names of the columns of ``flat_rows``; the columns of every table if empty."""
    return tuple(rows[0]) if rows else _COLUMNS


def open_study(
    store: Store, spec: StudySpec, *, relocated: bool = False, devices: Devices | None = None
) -> tuple[StudyRecord, StudySpec]:
    """Return the study's record and its spec; create the study if it does not exist.

    The budgets of ``spec`` replace the stored ones; without trials all of it does. A ``relocated`` spec, the stored one
    with this machine's paths, is neither compared nor stored. A new study records the driver of ``devices``.

    Raises:
        StudyConflictError: If a study of this name has other settings; lists the differences.
        UnreadableStudyError: If the study of this name cannot be read.
    """
    result = store.find_study(spec.name)
    if result is None:
        from optuna_dsat.launch.machine.devices import environment_of

        versions = environment_of(spec.script.folder, spec.python, on=spec.on, devices=devices)
        result = store.create_study(spec.name, spec.stored(), direction=spec.direction, versions=versions)
        if result.spec == spec.stored():  # else another process has created it meanwhile
            return result, spec
    read_stored(store, spec.name)  # both refuse what later steps could not read
    read_launches(store, result)
    if relocated:
        return result, spec
    check_study(store, spec)
    if spec != spec_of(result):
        store.update_spec(result.uuid, spec.stored())
    return result, spec


def check_study(store: Store, spec: StudySpec) -> None:
    """Raise if the name of a spec belongs to a study with other settings; budgets may differ."""
    record = store.find_study(spec.name)
    if record is None:
        return
    stored = spec_of(record)
    begun = has_trials(store, spec.name)
    differing = _differences(stored.identity(), spec.identity())
    if differing and (begun or stored.direction != spec.direction):
        resume, delete = (stored_command(what, spec.name, storage=store.url) for what in ("resume", "delete"))
        error = StudyConflictError(
            f"A study named {spec.name!r} exists in this storage with other settings: {'; '.join(differing)}. "
            f"Give this one another name with --study, continue that one with `{resume}`, or delete it with `{delete}`."
        )
        if stored.identity() | {"slots_per_trial": spec.slots_per_trial} == spec.identity():
            error.ranks = stored.slots_per_trial
        raise error


def _differences(stored: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    lines = []
    for key in stored:
        if stored[key] != given.get(key):
            old, new = str(hidden_data(stored[key])), str(hidden_data(given.get(key)))
            detail = f"{key} was {old}, is {new}" if len(old) + len(new) < 80 else f"{key} differs"
            lines.append(detail)
    return lines


def record_of(store: Store, name: str) -> StudyRecord:
    """Return the record of a study; ``UsageError`` lists the existing studies if there is none of this name."""
    record = store.find_study(name)
    if record is None:
        known = ", ".join(study.name for study in store.list_studies()) or "none"
        raise UsageError(f"There is no study {name!r} in {store.url}; there: {known}.")
    return record


def latest_study(store: Store) -> str:
    """Return the name of the study that was created last; ``UsageError`` without any study."""
    studies = store.list_studies()
    if not studies:
        raise UsageError(f"There is no study in {store.url}.")
    return studies[-1].name


def spec_of(record: StudyRecord) -> StudySpec:
    """Return the spec of a study as stored, without batch sizes of the script's trainer."""
    with reading(record.name, "its spec", record.versions):
        spec = StudySpec.model_validate(dict(record.spec))
        if spec.name != record.name:
            raise ValueError(f"it is that of a study {spec.name!r}")
    return spec


def attributes_of(store: Store, name: str) -> Mapping[str, Any]:
    """Return the user attributes of a study."""
    return store.storage.get_study_user_attrs(store.storage.get_study_id_from_name(name))


def has_trials(store: Store, name: str) -> bool:
    """Whether a study has any trials."""
    return store.storage.get_n_trials(store.storage.get_study_id_from_name(name)) > 0


def is_spent(store: Store, spec: StudySpec) -> bool:
    """Whether a study has used all of its launches and has no running or waiting trials."""
    trials = store.storage.get_all_trials(store.storage.get_study_id_from_name(spec.name), deepcopy=False)
    return all(trial.state.is_finished() for trial in trials) and attributes.launches_used(trials) >= spec.max_trials


def read_stored(store: Store, name: str) -> StoredStudy:
    """Read a study from the store, as ``record_of``; ``UnreadableStudyError`` if this version cannot."""
    record = record_of(store, name)
    spec = spec_of(record)
    with reading(name, "its attributes", record.versions):
        user_attrs = attributes_of(store, name)
    with reading(name, "its profile", record.versions):
        profiled = _profiled(store, user_attrs.get(attributes.FINGERPRINT))
        followed = spec if profiled is None else profiled.followed_by(spec)
    with reading(name, "its trials", record.versions):
        trials = store.storage.get_all_trials(store.storage.get_study_id_from_name(name), deepcopy=False)
    study = StoredStudy(
        record=record,
        stored_spec=spec,
        spec=followed,
        trials=tuple(trials),
        attributes=user_attrs,
        profiled=profiled,
    )
    with reading(name, "what came of it", record.versions):
        study.check()
    return study


def read_launches(store: Store, record: StudyRecord) -> tuple[StoredLaunch, ...]:
    """Return the launches of a study, the earliest first."""
    with reading(record.name, "its launches", record.versions):
        return tuple(store.launches(record.uuid))


def readable_studies(store: Store) -> Iterator[StoredStudy | UnreadableStudyError]:
    """Yield the studies of a database, the earliest first; for a study that cannot be read, its error."""
    for record in store.list_studies():
        try:
            study = read_stored(store, record.name)
            read_launches(store, record)
        except UnreadableStudyError as error:
            yield error
        except UsageError:  # deleted since
            continue
        else:
            yield study


def _profiled(store: Store, fingerprint: str | None) -> Profiled | None:
    stored = None if fingerprint is None else store.find_profile(fingerprint)
    return None if stored is None else Profiled.from_json(stored)
