"""A study's history for samplers and pruners, with results cached between decisions.

Finished trials never change, so derived data is kept between decisions: the lineages of trials, and results of samplers
and pruners. Each reading fetches the study's trials again, but processes only trials that are new or were unfinished
before. The cache contains derived data only: a new process computes the same data and decides the same.

Caches belong to a thread and a storage object and are dropped with them; per storage, the caches of the most recently
used studies are kept. A study that was deleted and recreated is detected by its trials.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

from optuna.storages import BaseStorage
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from optuna_dsat.trials.lineage import MICRO_BATCH, RETRY_ATTR, Lineage, group, unreachable, visible_params
from optuna_dsat.trials.lineage_index import Lineages

__all__ = ["StudyHistory", "read_history", "same_trial", "trial_notes"]

T = TypeVar("T")

_MAX_STUDIES = 4
"""Studies per storage whose history is kept."""
_MAX_NOTES = 256
"""Trials per study whose notes are kept."""


class StudyHistory:
    """A snapshot of a study's trials, without the trial to decide on.

    Derived data is cached until the same thread reads the study's history again; after that it is recomputed from these
    trials only.
    """

    def __init__(self, trials: Sequence[FrozenTrial], pending: Sequence[FrozenTrial], cache: _StudyCache) -> None:
        self.trials = trials
        self.pending = pending
        self._latest = cache
        self._reading = cache.readings

    @property
    def _cache(self) -> _StudyCache:
        if self._latest.readings != self._reading:
            self._latest = _StudyCache(self._latest.micro_batch)
            self._latest.read(self.trials, None, dense=False)
            self._reading = self._latest.readings
        return self._latest

    @property
    def lineages(self) -> Lineages:
        """The lineages, including lineages of running trials; see ``optuna_dsat.trials.lineage.group``."""
        self._cache.place(self.pending)
        return self._cache.lineages

    @property
    def finished(self) -> Sequence[FrozenTrial]:
        """The finished trials in the order of reading; the sequence only grows at its end."""
        return self._cache.finished

    @property
    def unreachable(self) -> frozenset[str]:
        """Keys of lineages that became another when suggested; see ``optuna_dsat.trials.lineage.unreachable``."""
        return self._cache.unreachable_keys | unreachable(self.pending, micro_batch=self._cache.micro_batch)

    def retries_before(self, number: int) -> int:
        """Return the number of trials below ``number`` that are retries of lost trials."""
        in_flight = sum(RETRY_ATTR in trial.system_attrs for trial in self.pending if trial.number < number)
        return in_flight + bisect_left(self._cache.retries, number)

    def cached(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return ``make()``, cached by ``key`` as long as ``finished``."""
        return self._cache.cached(key, make)


def read_history(
    study: Study, *, micro_batch: str = MICRO_BATCH, without: int | None = None, again: bool = True
) -> StudyHistory:
    """Return the history of a study.

    Args:
        study: The study.
        micro_batch: Name of the micro-batch's parameter.
        without: Number of the trial to decide on, which is excluded.
        again: False to reuse the last reading if it was for the same trial with ``again=False`` as well, so that all
            knobs of a new lineage are drawn from the same history.
    """
    cache = _cache_of(study, micro_batch)
    last = cache.last
    if not again and without is not None and last is not None and last[0] == without:
        return last[1]
    trials = study.get_trials(deepcopy=False)
    history = cache.read(trials, without)
    if history is None:
        others = [trial for trial in trials if trial.number != without]
        history = _StudyCache(micro_batch).read(others, None, dense=False)
    if history is None:
        raise RuntimeError("a new cache accepts any trials")
    cache.last = None if again or without is None else (without, history)
    return history


def trial_notes(study: Study, trial: FrozenTrial, make: Callable[[], T], *, micro_batch: str, begin: bool) -> T:
    """Return this thread's notes on a trial for which it suggests parameters.

    Args:
        study: The study.
        trial: The trial.
        make: Creates the notes if missing.
        micro_batch: Name of the micro-batch's parameter.
        begin: Whether to replace existing notes, as for a newly created trial.
    """
    notes = _cache_of(study, micro_batch).notes
    if begin or trial._trial_id not in notes:
        notes[trial._trial_id] = make()
        if len(notes) > _MAX_NOTES:
            del notes[next(iter(notes))]
    result: T = notes[trial._trial_id]
    return result


class _StudyCache:
    """Cached data of a study in a thread."""

    def __init__(self, micro_batch: str) -> None:
        self.micro_batch = micro_batch
        self.last: tuple[int, StudyHistory] | None = None
        self.readings = 0
        self.notes: dict[int, Any] = {}
        self._reset()

    def _reset(self) -> None:
        self.lineages = Lineages()
        self.finished: list[FrozenTrial] = []
        self.unreachable_keys: frozenset[str] = frozenset()
        self.retries: list[int] = []
        self._cached: dict[Hashable, Any] = {}
        self._read_count = 0
        """Trials below this number were read."""
        self._unfinished: list[int] = []
        """Numbers below ``_read_count`` of trials that were not finished."""
        self._placed: dict[int, tuple[str, _Snapshot]] = {}
        """Running trials in ``lineages``, by number: key of the lineage, and snapshot."""

    def cached(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self._cached:
            self._cached[key] = make()
        result: T = self._cached[key]
        return result

    def read(self, trials: Sequence[FrozenTrial], without: int | None, *, dense: bool = True) -> StudyHistory | None:
        """Process new and newly finished trials; return None if they do not continue the cached history.

        Args:
            trials: The trials of the study, by number.
            without: Number of a trial to exclude.
            dense: Whether numbers equal positions, as they do in a study.
        """
        if not self._continues(trials):
            self._reset()
        unread = [*(trials[n] for n in self._unfinished), *trials[self._read_count :]]
        if dense and any(trial.number != n for trial, n in zip(unread, self._numbers(len(trials)), strict=True)):
            return None
        done: list[FrozenTrial] = []
        pending: list[FrozenTrial] = []
        for trial in unread:  # read the state once: another thread may finish the trial meanwhile
            (done if trial.state.is_finished() else pending).append(trial)
        if without is not None and without < len(trials) and trials[without].state.is_finished():
            return None
        self.readings += 1
        self._unfinished = [trial.number for trial in pending]
        self._read_count = len(trials)
        self._add_finished(done)
        others = list(trials) if without is None else [*trials[:without], *trials[without + 1 :]]
        return StudyHistory(others, [trial for trial in pending if trial.number != without], self)

    def _numbers(self, count: int) -> Iterable[int]:
        return [*self._unfinished, *range(self._read_count, count)]

    def _continues(self, trials: Sequence[FrozenTrial]) -> bool:
        """Return whether these are the trials read before, possibly with new trials."""
        if len(trials) < self._read_count:
            return False
        return all(same_trial(known, trials[known.number]) for known in (*self.finished[:1], *self.finished[-1:]))

    def _add_finished(self, done: Sequence[FrozenTrial]) -> None:
        """Add finished trials permanently."""
        if not done:
            return
        self.finished.extend(done)
        for trial in done:
            if RETRY_ATTR in trial.system_attrs:
                insort(self.retries, trial.number)
        unreachable_keys = unreachable(done, micro_batch=self.micro_batch)
        if unreachable_keys:
            self.unreachable_keys |= unreachable_keys
        added = [(key, trial) for trial in done if (key := self._key(trial)) is not None]
        self._change(added, [number for trial in done if (number := trial.number) in self._placed])

    def place(self, pending: Sequence[FrozenTrial]) -> None:
        """Replace the running trials in ``lineages``."""
        wanted = {trial.number: trial for trial in pending}
        gone = [number for number, (_, snapshot) in self._placed.items() if snapshot != _snapshot(wanted.get(number))]
        remaining = self._placed.keys() - set(gone)
        new = [trial for trial in pending if trial.number not in remaining]
        added = [(key, trial) for trial in new if (key := self._key(trial)) is not None]
        self._change(added, gone)
        self._placed |= {trial.number: (key, _snapshot(trial)) for key, trial in added}

    def _change(self, added: Sequence[tuple[str, FrozenTrial]], gone: Sequence[int]) -> None:
        """Add trials to lineages, and remove running trials with the given numbers."""
        groups: dict[str, list[FrozenTrial]] = {}
        out = set(gone)
        for key in [*(self._placed.pop(number)[0] for number in gone), *(key for key, _ in added)]:
            if key not in groups:
                old = self.lineages.get(key)
                groups[key] = [] if old is None else [t for t in old.trials if t.number not in out]
        for key, trial in added:
            groups[key].append(trial)
        for key, trials in groups.items():
            trials.sort(key=lambda trial: trial.number)
            if trials:
                self.lineages.put(self._lineage(key, trials))
            else:
                self.lineages.drop(key)

    def _lineage(self, key: str, trials: Sequence[FrozenTrial]) -> Lineage:
        old = self.lineages.get(key)
        if old is not None and old.trials[0] is trials[0]:
            params = old.params
        else:
            params = visible_params(trials[0], self.micro_batch)
            del params[self.micro_batch]
        return Lineage(key=key, params=params, trials=tuple(trials), micro_batch=self.micro_batch)

    def _key(self, trial: FrozenTrial) -> str | None:
        """Return the key of a trial's lineage, None if it has no micro-batch."""
        return next(iter(group([trial], micro_batch=self.micro_batch)), None)


def same_trial(known: FrozenTrial, trial: FrozenTrial | None) -> bool:
    """Return whether a finished trial is identical to the trial read before under its number."""
    return trial is known or (
        trial is not None
        and (trial._trial_id, trial.number, trial.state) == (known._trial_id, known.number, known.state)
        and trial.datetime_complete == known.datetime_complete
        and trial.params == known.params
    )


_Snapshot = tuple[TrialState, dict[str, Any], dict[str, Any]] | None


def _snapshot(trial: FrozenTrial | None) -> _Snapshot:
    """Copy the data of an unfinished trial that determines its lineage: some storages change trials in place."""
    return None if trial is None else (trial.state, dict(trial.params), dict(trial.system_attrs))


_LOCAL = threading.local()


def _cache_of(study: Study, micro_batch: str) -> _StudyCache:
    """Return this thread's cache of a study."""
    storages: weakref.WeakKeyDictionary[BaseStorage, OrderedDict[Hashable, _StudyCache]] | None
    storages = getattr(_LOCAL, "storages", None)
    if storages is None:
        storages = _LOCAL.storages = weakref.WeakKeyDictionary()
    caches = storages.setdefault(study._storage, OrderedDict())
    key = (study._study_id, micro_batch)
    if key not in caches:
        caches[key] = _StudyCache(micro_batch)
        if len(caches) > _MAX_STUDIES:
            caches.popitem(last=False)
    caches.move_to_end(key)
    return caches[key]
