"""A study's history as samplers and pruners read it, without doing the same work twice.

Finished trials never change, so what follows from them is kept between decisions: which lineage each belongs to, and
whatever else was derived from them. Every reading asks the study for its trials anew; only trials that are new or
were unfinished before are looked at. All of it is derived: a fresh process finds the same and decides the same.

What is kept belongs to a thread and to a storage object, and goes with them; of each storage the studies used last
are kept. A study that was deleted and made again is noticed by its trials.
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

__all__ = ["StudyHistory", "notes_of", "read_history", "same_trial"]

T = TypeVar("T")

_MOST_STUDIES = 4
"""Studies of one storage whose history is kept."""
_MOST_NOTES = 256
"""Trials of a study of which a sampler's notes are kept."""


class StudyHistory:
    """The trials of a study at one moment, without the trial that asks.

    What is derived from them is up to date until the same thread reads the study's history again; after that it is
    derived anew, from these trials alone.

    Args:
        trials: The trials, by number.
        pending: Those among them that are not finished.
        ledger: What is known of the study.
    """

    def __init__(self, trials: Sequence[FrozenTrial], pending: Sequence[FrozenTrial], ledger: _Ledger) -> None:
        self.trials = trials
        self.pending = pending
        self._latest = ledger
        self._reading = ledger.readings

    @property
    def _ledger(self) -> _Ledger:
        if self._latest.readings != self._reading:
            self._latest = _Ledger(self._latest.micro_batch)
            self._latest.read(self.trials, None, dense=False)
            self._reading = self._latest.readings
        return self._latest

    @property
    def lineages(self) -> Lineages:
        """The lineages, those of trials in flight included; see ``optuna_dsat.trials.lineage.group``."""
        self._ledger.place(self.pending)
        return self._ledger.lineages

    @property
    def finished(self) -> Sequence[FrozenTrial]:
        """The finished trials in the order in which they were seen; the sequence only ever grows at its end."""
        return self._ledger.finished

    @property
    def unreachable(self) -> frozenset[str]:
        """Keys of lineages that became another one once suggested; see ``optuna_dsat.trials.lineage.unreachable``."""
        return self._ledger.missed | unreachable(self.pending, micro_batch=self._ledger.micro_batch)

    def copies_before(self, number: int) -> int:
        """Return how many trials below a number repeat lost ones."""
        in_flight = sum(RETRY_ATTR in trial.system_attrs for trial in self.pending if trial.number < number)
        return in_flight + bisect_left(self._ledger.copies, number)

    def kept(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what ``make`` made for this study and key; it lives as long as ``finished`` does."""
        return self._ledger.kept(key, make)


def read_history(
    study: Study, *, micro_batch: str = MICRO_BATCH, without: int | None = None, again: bool = True
) -> StudyHistory:
    """Return the history of a study.

    Args:
        study: The study.
        micro_batch: Name of the micro-batch's parameter.
        without: Number of a trial to leave out: the one that asks.
        again: False to be content with the last reading, where that was one for the same trial with ``again=False``
            too. So the knobs of one new lineage are drawn from one history.
    """
    ledger = _ledger_of(study, micro_batch)
    last = ledger.last
    if not again and without is not None and last is not None and last[0] == without:
        return last[1]
    trials = study.get_trials(deepcopy=False)
    history = ledger.read(trials, without)
    if history is None:
        others = [trial for trial in trials if trial.number != without]
        history = _Ledger(micro_batch).read(others, None, dense=False)
    if history is None:
        raise RuntimeError("a new ledger takes any trials")
    ledger.last = None if again or without is None else (without, history)
    return history


def notes_of(study: Study, trial: FrozenTrial, make: Callable[[], T], *, micro_batch: str, begin: bool) -> T:
    """Return this thread's notes on a trial that it suggests parameters for.

    Args:
        study: The study.
        trial: The trial.
        make: Makes the notes where there are none.
        micro_batch: Name of the micro-batch's parameter.
        begin: Whether to begin anew, as for a trial just made.
    """
    notes = _ledger_of(study, micro_batch).notes
    if begin or trial._trial_id not in notes:
        notes[trial._trial_id] = make()
        if len(notes) > _MOST_NOTES:
            del notes[next(iter(notes))]
    found: T = notes[trial._trial_id]
    return found


class _Ledger:
    """What is known of one study, in one thread."""

    def __init__(self, micro_batch: str) -> None:
        self.micro_batch = micro_batch
        self.last: tuple[int, StudyHistory] | None = None
        self.readings = 0
        self.notes: dict[int, Any] = {}
        self._reset()

    def _reset(self) -> None:
        self.lineages = Lineages()
        self.finished: list[FrozenTrial] = []
        self.missed: frozenset[str] = frozenset()
        self.copies: list[int] = []
        self._kept: dict[Hashable, Any] = {}
        self._seen = 0
        """Trials below this number were looked at."""
        self._open: list[int] = []
        """Numbers below ``_seen`` that were not finished."""
        self._placed: dict[int, tuple[str, _Seen]] = {}
        """Trials in flight that ``lineages`` holds, by number: the key of their lineage, and what they said."""

    def kept(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self._kept:
            self._kept[key] = make()
        found: T = self._kept[key]
        return found

    def read(self, trials: Sequence[FrozenTrial], without: int | None, *, dense: bool = True) -> StudyHistory | None:
        """Take note of new and newly finished trials; None for a history that cannot be continued.

        Args:
            trials: The trials of the study, by number.
            without: Number of a trial to leave out.
            dense: Whether the numbers are those of the positions, as a study's are.
        """
        if not self._continues(trials):
            self._reset()
        looked_at = [*(trials[n] for n in self._open), *trials[self._seen :]]
        if dense and any(trial.number != n for trial, n in zip(looked_at, self._numbers(len(trials)), strict=True)):
            return None
        done: list[FrozenTrial] = []
        pending: list[FrozenTrial] = []
        for trial in looked_at:  # one look at each: another thread may finish it meanwhile
            (done if trial.state.is_finished() else pending).append(trial)
        if without is not None and without < len(trials) and trials[without].state.is_finished():
            return None
        self.readings += 1
        self._open = [trial.number for trial in pending]
        self._seen = len(trials)
        self._absorb(done)
        others = list(trials) if without is None else [*trials[:without], *trials[without + 1 :]]
        return StudyHistory(others, [trial for trial in pending if trial.number != without], self)

    def _numbers(self, count: int) -> Iterable[int]:
        return [*self._open, *range(self._seen, count)]

    def _continues(self, trials: Sequence[FrozenTrial]) -> bool:
        """Return whether these are the trials seen before, and perhaps more."""
        if len(trials) < self._seen:
            return False
        return all(same_trial(known, trials[known.number]) for known in (*self.finished[:1], *self.finished[-1:]))

    def _absorb(self, done: Sequence[FrozenTrial]) -> None:
        """Add finished trials for good."""
        if not done:
            return
        self.finished.extend(done)
        for trial in done:
            if RETRY_ATTR in trial.system_attrs:
                insort(self.copies, trial.number)
        missed = unreachable(done, micro_batch=self.micro_batch)
        if missed:
            self.missed |= missed
        added = [(key, trial) for trial in done if (key := self._key(trial)) is not None]
        self._change(added, [number for trial in done if (number := trial.number) in self._placed])

    def place(self, pending: Sequence[FrozenTrial]) -> None:
        """Make the trials in flight among ``lineages`` these."""
        wanted = {trial.number: trial for trial in pending}
        gone = [number for number, (_, said) in self._placed.items() if said != _said(wanted.get(number))]
        kept = self._placed.keys() - set(gone)
        new = [trial for trial in pending if trial.number not in kept]
        added = [(key, trial) for trial in new if (key := self._key(trial)) is not None]
        self._change(added, gone)
        self._placed |= {trial.number: (key, _said(trial)) for key, trial in added}

    def _change(self, added: Sequence[tuple[str, FrozenTrial]], gone: Sequence[int]) -> None:
        """Add trials to lineages, and take out those in flight of the given numbers."""
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
        """Return the key of a trial's lineage, None for a foreign trial."""
        return next(iter(group([trial], micro_batch=self.micro_batch)), None)


def same_trial(known: FrozenTrial, trial: FrozenTrial | None) -> bool:
    """Return whether a finished trial is the one that was seen before under its number."""
    return trial is known or (
        trial is not None
        and (trial._trial_id, trial.number, trial.state) == (known._trial_id, known.number, known.state)
        and trial.datetime_complete == known.datetime_complete
        and trial.params == known.params
    )


_Seen = tuple[TrialState, dict[str, Any], dict[str, Any]] | None


def _said(trial: FrozenTrial | None) -> _Seen:
    """Return a copy of what an unfinished trial says of its lineage: some storages change trials in place."""
    return None if trial is None else (trial.state, dict(trial.params), dict(trial.system_attrs))


_LOCAL = threading.local()


def _ledger_of(study: Study, micro_batch: str) -> _Ledger:
    """Return this thread's ledger of a study."""
    storages: weakref.WeakKeyDictionary[BaseStorage, OrderedDict[Hashable, _Ledger]] | None
    storages = getattr(_LOCAL, "storages", None)
    if storages is None:
        storages = _LOCAL.storages = weakref.WeakKeyDictionary()
    ledgers = storages.setdefault(study._storage, OrderedDict())
    key = (study._study_id, micro_batch)
    if key not in ledgers:
        ledgers[key] = _Ledger(micro_batch)
        if len(ledgers) > _MOST_STUDIES:
            ledgers.popitem(last=False)
    ledgers.move_to_end(key)
    return ledgers[key]
