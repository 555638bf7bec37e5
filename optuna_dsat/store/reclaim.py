"""Reclaims trials whose worker died: fails them and enqueues a copy exactly once per loss.

A trial is lost if the process that ran it no longer exists (observed on the same machine), or if its heartbeat is
older than the grace period *and* has not changed while this process observed it for two intervals. The second
condition protects a study after a long database outage or a forward clock jump, when all heartbeats are old and live
workers need time to renew theirs. After a backward clock jump, only this process's own clock counts. A running trial
without a heartbeat is lost immediately: trials are asked for and get their first heartbeat under the database's lock,
so a missing heartbeat under this lock means that the worker ended in between.

A lost trial is processed under the database's lock, in an order that can be interrupted anywhere and completed by
another worker: set outcome and message, set state FAIL, release the claim, enqueue a copy, delete the heartbeat. The
heartbeat row marks unfinished work. The change of state is atomic, so a trial that its worker finishes at the last
moment stays finished. If the server releases the lock meanwhile, the remaining steps follow when it is held again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import select
from sqlalchemy.orm import Session

from optuna_dsat.outcome import Outcome
from optuna_dsat.store.database import Database
from optuna_dsat.store.leases import (
    HEARTBEAT_INTERVAL_S,
    Heartbeat,
    Worker,
    beat_of,
    delete_beat,
    release_trial,
    server_time,
)
from optuna_dsat.store.tables import HeartbeatRow, insert_or_skip
from optuna_dsat.trials import attributes

GRACE_S = 60.0
"""Age from which a heartbeat is stale, in seconds."""

_MAX_LOSSES = 3
"""Maximum times that a configuration is requeued after its worker died, since it may crash machines."""

_LOSSES = "dsat_losses"
"""System attribute of a copy: number of workers that died running its configuration."""

_RETRY_HISTORY = "retry_history"
_FAILED_TRIAL = "failed_trial"
"""System attributes of Optuna's ``RetryHeartbeatStaleTrialCallback``."""

_WISHES = {attributes.PURPOSE, attributes.PREDICTED_VALUE, attributes.SAME_BATCH, attributes.SIMPLIFIES}
_LAUNCH_ATTRIBUTES = frozenset(value for name, value in vars(attributes).items() if name.isupper()) - _WISHES
"""User attributes that a launch sets; a requeued trial gets only the enqueued trial's."""


class Reclaimer:
    """Requeues the lost trials of a study. Its grace period must be longer than the interval of heartbeats."""

    def __init__(
        self,
        database: Database,
        storage: BaseStorage,
        study_uuid: str,
        *,
        grace_s: float = GRACE_S,
        interval_s: float = HEARTBEAT_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._storage = storage
        self._uuid = study_uuid
        self._grace_s = grace_s
        self._interval_s = interval_s
        self._clock = clock
        self._seen: dict[int, tuple[float, float]] = {}
        """Trial number -> (heartbeat, our clock when that heartbeat was first observed)."""

    def reclaim(self, study: optuna.Study) -> tuple[int, ...]:
        """Fail the trials whose worker died and enqueue a copy of each.

        Returns:
            The numbers of the trials that this call failed.
        """
        running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        now, beats = self._database.run(self._read, read_only=True)
        stale = _trial_numbers(self._stale(now, beats))
        if not stale and all(trial.number in beats for trial in running):
            return ()
        failed: list[int] = []
        self._database.exclusively("give lost trials back", lambda: self._reclaim_locked(study, failed))
        return tuple(failed)

    def _reclaim_locked(self, study: optuna.Study, failed: list[int]) -> None:
        """Do the same as ``reclaim`` and append the numbers of the failed trials to ``failed``; the lock is held."""
        _, beats = self._database.run(self._read, read_only=True)
        trials = study.get_trials(deepcopy=False)
        nobodys = [t.number for t in trials if t.state is TrialState.RUNNING and t.number not in beats]
        if nobodys:
            self._database.run(lambda session: self._add_missing_beats(session, nobodys))
        now, beats = self._database.run(self._read, read_only=True)
        for number in _trial_numbers(self._stale(now, beats)):
            reason = f"its worker ({beats[number].worker or 'unknown'}) was lost"
            self._fail_and_requeue(study, trials[number], reason=reason, counts=True, failed=failed)

    def requeue(self, study: optuna.Study, number: int, *, reason: str) -> bool:
        """Fail a trial of this process and enqueue a copy to run later; does not count as a loss.

        ``number`` is the number of a running trial whose launch has been stopped.

        Returns:
            Whether the trial was still running.
        """
        failed: list[int] = []

        def work() -> None:
            trial = study.get_trials(deepcopy=False)[number]
            self._fail_and_requeue(study, trial, reason=reason, counts=False, failed=failed)

        self._database.exclusively("return a trial", work)
        return bool(failed)

    def acquire_task(self, heartbeat: Heartbeat, number: int) -> bool:
        """Acquire an exclusive task of the study unless a live worker holds it.

        ``heartbeat`` renews the task's heartbeat until ``remove`` is called.

        Returns:
            Whether this process holds the task now.
        """
        tried = False

        def work() -> bool:
            nonlocal tried
            now, beats = self._database.run(self._read, read_only=True)
            held = number in beats and number not in self._stale(now, beats)
            if held and not (tried and heartbeat.is_own(self._uuid, number)):
                return False
            tried = True
            heartbeat.add(self._uuid, number)
            return True

        return self._database.exclusively("take a turn", work)

    def _read(self, session: Session) -> tuple[float, dict[int, HeartbeatRow]]:
        rows = session.scalars(select(HeartbeatRow).where(HeartbeatRow.study_uuid == self._uuid))
        return server_time(session), {row.trial_number: row for row in rows}

    def _add_missing_beats(self, session: Session, numbers: Sequence[int]) -> None:
        """Mark running trials without a heartbeat as lost by adding heartbeats without a worker; the lock is held."""
        nobody = Worker(name="", machine="", pid=0, pid_started_at=0.0)
        rows = [beat_of(session, self._uuid, number, worker=nobody) for number in numbers]
        insert_or_skip(session, HeartbeatRow, rows)

    def _stale(self, now: float, beats: dict[int, HeartbeatRow]) -> list[int]:
        watched = self._clock()
        self._seen = {
            number: self._seen[number]
            if number in self._seen and self._seen[number][0] == beat.beat_at
            else (beat.beat_at, watched)
            for number, beat in beats.items()
        }
        return [
            number
            for number, beat in sorted(beats.items())
            if not beat.machine
            or _worker_of(beat).is_dead()
            or self._is_overdue(beat, now=now, unchanged_s=watched - self._seen[number][1])
        ]

    def _is_overdue(self, beat: HeartbeatRow, *, now: float, unchanged_s: float) -> bool:
        """Whether a remote worker is silent; for heartbeats in the future (clock set back) only our clock counts."""
        if beat.beat_at > now:
            return unchanged_s > self._grace_s
        return now - beat.beat_at > self._grace_s and unchanged_s >= 2 * self._interval_s

    def _fail_and_requeue(
        self, study: optuna.Study, trial: FrozenTrial, *, reason: str, counts: bool, failed: list[int]
    ) -> None:
        """Do the remaining steps for a trial; the lock is held. Add its number to ``failed`` if this call failed it."""
        if trial.state is TrialState.RUNNING and self._end(trial, reason):
            failed.append(trial.number)
        stored = self._storage.get_trial(trial._trial_id)
        if stored.state is TrialState.FAIL and stored.user_attrs.get(attributes.OUTCOME) == Outcome.LOST:
            self._enqueue_copy(study, stored, counts=counts)
        self._database.run(lambda session: delete_beat(session, self._uuid, trial.number))

    def _end(self, trial: FrozenTrial, reason: str) -> bool:
        try:
            self._storage.set_trial_user_attr(trial._trial_id, attributes.OUTCOME, Outcome.LOST.value)
            self._storage.set_trial_user_attr(trial._trial_id, attributes.MESSAGE, reason)
            return self._storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)
        except UpdateFinishedTrialError:
            return False  # its worker is alive and has just finished it

    def _enqueue_copy(self, study: optuna.Study, lost: FrozenTrial, *, counts: bool) -> None:
        """Enqueue a copy of a lost trial; without parameters, they are sampled as for the lost trial."""
        attrs = {key: value for key, value in lost.user_attrs.items() if key not in _LAUNCH_ATTRIBUTES}
        losses = int(lost.system_attrs.get(_LOSSES, 0)) + counts
        if losses > _MAX_LOSSES:
            return
        copied = (trial.system_attrs.get(_RETRY_HISTORY) or [None] for trial in study.get_trials(deepcopy=False))
        if any(history[-1] == lost.number for history in copied):
            return
        self._database.run(lambda session: release_trial(session, self._uuid, lost.number))
        system_attrs: dict[str, Any] = {
            **lost.system_attrs,
            _FAILED_TRIAL: lost.system_attrs.get(_FAILED_TRIAL, lost.number),
            _RETRY_HISTORY: [*lost.system_attrs.get(_RETRY_HISTORY, []), lost.number],
            _LOSSES: losses,
        }
        study.add_trial(
            optuna.create_trial(
                state=TrialState.WAITING,
                params=lost.params,
                distributions=lost.distributions,
                user_attrs=attrs,
                system_attrs=system_attrs,
            )
        )


def _worker_of(row: HeartbeatRow) -> Worker:
    return Worker(name=row.worker, machine=row.machine, pid=row.pid, pid_started_at=row.pid_started_at)


def _trial_numbers(numbers: Sequence[int]) -> list[int]:
    """Return the numbers of trials; other tasks of a study have negative numbers."""
    return [number for number in numbers if number >= 0]
