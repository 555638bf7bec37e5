"""Run a study request on this machine: open the store, start the launcher, and close both.

Also: searches at several numbers of GPUs, one after another, and the preview of a search without a launch. Shared by
the commands and ``optuna_dsat.tune``, which differ only in how they show the result.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TextIO

import optuna

from optuna_dsat.config import ds_config
from optuna_dsat.config.search_space import SearchSpace
from optuna_dsat.config.structures import Structure
from optuna_dsat.errors import DsatError, NothingRunnableError, ScriptFailedError, StudyDeletedError, failed_file
from optuna_dsat.escape.terminal import say
from optuna_dsat.launch.launcher import local_launcher
from optuna_dsat.launch.machine.journal import LeftoverWatch
from optuna_dsat.launch.protocol import Launcher
from optuna_dsat.script.interpreter import examined, usable
from optuna_dsat.store import Store
from optuna_dsat.store.urls import database_files
from optuna_dsat.study.live_state import LiveNotes
from optuna_dsat.study.profile.permission import refused_in_words, refused_knobs
from optuna_dsat.study.profile.profile import profile_attempts
from optuna_dsat.study.profile.script import user_config
from optuna_dsat.study.progress import (
    Message,
    Observer,
    Phase,
)
from optuna_dsat.study.result import StudyResult
from optuna_dsat.study.session import Session
from optuna_dsat.study.space import space_of
from optuna_dsat.study.spec import StudyRequest, StudySpec
from optuna_dsat.study.stored import read_stored
from optuna_dsat.study.trust import remember, require_secrets
from optuna_dsat.tuning.prepare import Prepared, at_ranks
from optuna_dsat.tuning.resume import train_trial
from optuna_dsat.words import config_in_words, things_in_words


@dataclass(frozen=True, kw_only=True)
class StudyRun:
    """Outcome of a run of a study."""

    request: StudyRequest
    """The request; its spec follows the script's trainer if the profile launch detected a trainer."""
    result: StudyResult | None
    """None if nothing was measured or another worker concludes the study."""
    interrupted: bool
    """Whether it was interrupted with Ctrl-C."""
    storage: str
    """The storage's URL without a password; empty if the run was interrupted before the study was opened."""


def run_study(request: StudyRequest, *, observer: Observer) -> StudyRun:
    """Start or continue a search and return its outcome.

    Raises:
        DsatError: As ``Session.run``. An interruption raises nothing: see ``StudyRun.interrupted``.
    """
    notify = _notifier(observer)
    spec = request.spec
    require_secrets(spec)
    if spec.on == "here":  # on a cluster the nodes check it
        usable(spec.python or sys.executable)
    LeftoverWatch(os.environ, on_notice=notify).begin()
    if not request.relocated:
        remember(spec)
    notes = LiveNotes(observer, study=spec.name)
    launcher = _launcher_of(request, notes)
    shown, result, interrupted = "", None, False
    try:
        with quiet_optuna(), Store.open(request.storage) as store, notes.kept_in(store):
            shown = store.url
            if spec.on == "here" and not request.is_retry:
                notify(f"Launches run with {examined(spec.python or sys.executable)}.")
            session = Session(request, store=store, launcher=launcher, observer=notes)
            try:
                result = session.run()
            except KeyError as error:  # Optuna's, for a study that is not in its tables
                if any(study.name == spec.name for study in store.list_studies()):
                    raise
                raise StudyDeletedError(f"The study {spec.name!r} was deleted while it was searched.") from error
            if request.conclude:
                fill_dashboard(store, spec.name, observer)
            store.require_present()
            request, interrupted = replace(request, spec=session.spec), session.interrupted
    except KeyboardInterrupt:
        interrupted = True
    except PermissionError as error:  # permissions that changed during the run
        raise failed_file(error) from error
    finally:
        launcher.close()
    return StudyRun(request=request, result=result, interrupted=interrupted, storage=shown)


def search_at_ranks(
    prepared: Prepared, search: Callable[[Prepared], StudyRun], *, on_notice: Callable[[str], None]
) -> StudyRun:
    """Search; if script or study have another number of ranks, and no option gives one, search at their number.

    Raises:
        DsatError: As ``search``.
    """
    try:
        return search(prepared)
    except DsatError as error:
        if error.ranks is None or (again := at_ranks(prepared, error.ranks)) is None:
            raise
        option = "--gpus-per-trial" if again.request.devices.kind == "cuda" else "--cpu-ranks"
        owner = "script sets its number of ranks" if isinstance(error, ScriptFailedError) else "study continues"
        on_notice(f"The {owner}: launches have {things_in_words(error.ranks, 'rank')}, as by {option} {error.ranks}.")
    return search(again)


def _notifier(observer: Observer) -> Callable[[str], None]:
    return lambda text: observer(Message(text=text))


def _launcher_of(request: StudyRequest, observer: Observer) -> Launcher:
    spec, own_files, notify = request.spec, database_files(request.storage), _notifier(observer)

    def show_phase(words: str) -> None:
        observer(Phase(words=words))

    if spec.on != "here":
        from optuna_dsat.tuning.cluster import cluster_launcher

        return cluster_launcher(spec, own_files=own_files, on_notice=notify, on_phase=show_phase)
    return local_launcher(
        spec.study_dir,
        devices=request.devices,
        max_slots=spec.max_slots,
        warm=spec.launcher == "warm",
        own_files=own_files,
        on_notice=notify,
        on_phase=show_phase,
    )


def train_with_best(run: StudyRun, result: StudyResult, *, stdout: TextIO | None = None) -> int:
    """Train in the foreground with the result of a run; return the exit code of the training."""
    with Store.open(run.request.storage, create=False) as store:
        study = read_stored(store, run.request.spec.name)
    return train_trial(
        study,
        next(trial for trial in study.trials if trial.number == result.trial),
        spec=run.request.spec,
        devices=run.request.devices,
        stdout=stdout,
        on_notice=lambda text: say(text, file=sys.stderr),
    )


def fill_dashboard(store: Store, name: str, observer: Observer) -> None:
    """Write notes and plots for optuna-dashboard if it is installed."""
    from optuna_dsat.report.dashboard.publish import is_installed, publish

    if not is_installed():
        return
    try:
        publish(store, name)
    except Exception as error:  # noqa: BLE001 - a failing note must not lose the result
        observer(Message(text=f"optuna-dashboard's notes and plots could not be written: {error}"))


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Silence Optuna's log lines within the block; the display shows the same events."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)


@dataclass(frozen=True, kw_only=True)
class AtGpus:
    """Outcome of the search at one number of GPUs."""

    gpus: int
    """GPUs, or CPU ranks, of a launch."""
    study: str
    run: StudyRun | None
    """None if no configuration could run on this number of GPUs."""

    @property
    def result(self) -> StudyResult | None:
        """Result of the search; None if nothing was measured."""
        return None if self.run is None else self.run.result

    @property
    def samples_per_s(self) -> float | None:
        """Throughput of the winner over all GPUs; None if nothing was measured."""
        return None if self.result is None else self.result.metrics.get("throughput")

    @property
    def samples_per_s_per_gpu(self) -> float | None:
        """Throughput per GPU; None if nothing was measured."""
        return None if self.samples_per_s is None else self.samples_per_s / self.gpus


def search_each(
    studies: Sequence[Prepared], search: Callable[[Prepared], StudyRun], *, on_notice: Callable[[str], None]
) -> Iterator[AtGpus]:
    """Run searches one after another and yield each outcome; a search without a runnable config does not stop the rest.

    Raises:
        DsatError: As ``search``, except for ``NothingRunnableError``.
    """
    for prepared in studies:
        spec = prepared.request.spec
        gpus = spec.slots_per_trial
        try:
            ended: StudyRun | None = search(prepared)
        except NothingRunnableError as error:
            what = "GPU" if spec.device == "cuda" else "CPU rank"
            on_notice(f"{gpus} {what}{'s' * (gpus > 1)}: {error}")
            ended = None
        yield AtGpus(gpus=gpus, study=spec.name, run=ended)
        if ended is not None and ended.interrupted:
            return


def best_of(rows: Sequence[AtGpus]) -> tuple[StudyRun, StudyResult]:
    """Return the search with the highest total samples/s (of the fewest GPUs), and its result with the others'.

    Raises:
        NothingRunnableError: If no search measured anything.
    """
    results = {row.gpus: row.result for row in rows if row.result is not None}
    if not results:
        raise NothingRunnableError("No configuration could be measured at any of these numbers of ranks.")
    best = max(rows, key=lambda row: (row.samples_per_s or 0.0, -row.gpus))
    assert best.run is not None
    return best.run, replace(results[best.gpus], by_gpus=results)


def preview(spec: StudySpec) -> tuple[SearchSpace, dict[str, Any]]:
    """Return the space of a search, buckets not capped by the model's size yet, and its preview as plain values."""
    space = space_of(spec, None)
    attempts = list(profile_attempts(spec))
    return space, {
        "study": spec.name,
        "space": [
            {"knob": row.knob, "role": row.role, "applies": row.where, "choices": list(row.choices)}
            for row in space.describe()
        ],
        "refused": refused_in_words(refused_knobs(spec, None)),
        "profile_launch": {
            "micro_batch": attempts[0].micro_batch,
            "attempts": [attempt.words for attempt in attempts],
        },
        "baseline": _user_config_in_words(spec),
    }


def _user_config_in_words(spec: StudySpec) -> str:
    if not spec.script.config_path:
        return "what your script passes to DeepSpeed; the profile launch reads it"
    config = ds_config.effective(spec.ds_config)
    if all(config.get(key) in (None, ds_config.AUTO) for key in (ds_config.TRAIN_BATCH, ds_config.MICRO_BATCH)):
        return f"{Structure.of(config).words}, at the micro-batch that your script sets; the profile launch reads it"
    user, _ = user_config(spec)
    return config_in_words(user)
