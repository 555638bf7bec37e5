"""Optuna storage that retries after transient errors, such as a server restart or a locked file.

Every call is retried after a transient error (see ``retry``). An error can also arrive after the database has
committed, if only the acknowledgement was lost; the retry then operates on its own result. Consequences by method:

* Reads, attributes, intermediate values, parameters: the second write is idempotent.
* ``set_trial_state_values`` to a finished state: the retry finds the trial finished. This is accepted if the stored
  state is the requested one; otherwise the error is raised (another worker has finished the trial).
* ``set_trial_state_values`` to RUNNING: the retry takes a trial that is running for its own. Trials are asked for under
  the database's lock; where that was lost and another worker has it, only one of the two may claim its configuration.
* ``create_new_trial``: each trial carries the number of the request for it, by which the retry finds the one that was
  created: a second one would count, and move the numbers of all after it.
* ``create_new_study``: the retry reports that the name is taken; the registry adopts a study that is still empty.
* ``delete_study``: the retry finds no study, which is the requested result.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable, Container, Sequence
from typing import Any, TypeVar

from optuna.distributions import BaseDistribution
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.study._frozen import FrozenStudy
from optuna.trial import FrozenTrial, TrialState, create_trial

from optuna_dsat.store.retry import RETRY_LIMIT_S, is_transient, retrying

__all__ = ["REQUEST", "RetryingStorage"]

T = TypeVar("T")

REQUEST = "dsat_request"
"""System attribute of a trial: which call created it."""


class RetryingStorage(BaseStorage):
    """Storage that retries the calls of another one after transient errors.

    It does not implement Optuna's heartbeat; ``Heartbeat`` replaces it, survives errors and works with ask and tell.

    Args:
        backend: The wrapped storage.
        database: Name of the database in messages, without password.
        retry_limit_s: Seconds for which calls are retried after a transient error.
        require_present: Called before each call; raises ``StorageError`` if the database is gone.
    """

    def __init__(
        self,
        backend: BaseStorage,
        *,
        database: str,
        retry_limit_s: float = RETRY_LIMIT_S,
        require_present: Callable[[], None] = lambda: None,
    ) -> None:
        self._require_present = require_present
        self._backend = backend
        self._database = database
        self._retry_limit_s = retry_limit_s

    def _retry(self, work: Callable[[], T]) -> T:
        def attempt() -> T:
            self._require_present()
            return work()

        return retrying(attempt, database=self._database, limit_s=self._retry_limit_s)

    def _retry_unless_done(self, work: Callable[[], T], done: Callable[[Exception], T]) -> T:
        """Run ``work``; after a transient error, pass non-transient errors of retries to ``done``.

        Args:
            work: The call.
            done: Returns the result if the error shows that an earlier attempt was committed; raises it otherwise.
        """
        troubled = False

        def attempt() -> T:
            nonlocal troubled
            try:
                return work()
            except Exception as error:
                if is_transient(error):
                    troubled = True
                    raise
                if not troubled:
                    raise
                return done(error)

        return self._retry(attempt)

    def create_new_study(self, directions: Sequence[StudyDirection], study_name: str | None = None) -> int:
        """See ``optuna.storages.BaseStorage``."""
        return self._retry(lambda: self._backend.create_new_study(directions, study_name))

    def delete_study(self, study_id: int) -> None:
        """See ``optuna.storages.BaseStorage``."""

        def done(error: Exception) -> None:
            if not isinstance(error, KeyError):
                raise error

        self._retry_unless_done(lambda: self._backend.delete_study(study_id), done)

    def set_study_user_attr(self, study_id: int, key: str, value: Any) -> None:
        """See ``optuna.storages.BaseStorage``."""
        self._retry(lambda: self._backend.set_study_user_attr(study_id, key, value))

    def set_study_system_attr(self, study_id: int, key: str, value: Any) -> None:
        """See ``optuna.storages.BaseStorage``."""
        self._retry(lambda: self._backend.set_study_system_attr(study_id, key, value))

    def get_study_id_from_name(self, study_name: str) -> int:
        """See ``optuna.storages.BaseStorage``."""
        return self._retry(lambda: self._backend.get_study_id_from_name(study_name))

    def get_study_name_from_id(self, study_id: int) -> str:
        """See ``optuna.storages.BaseStorage``."""
        return self._retry(lambda: self._backend.get_study_name_from_id(study_id))

    def get_study_directions(self, study_id: int) -> list[StudyDirection]:
        """See ``optuna.storages.BaseStorage``."""
        return self._retry(lambda: self._backend.get_study_directions(study_id))

    def get_study_user_attrs(self, study_id: int) -> dict[str, Any]:
        """See ``optuna.storages.BaseStorage``."""
        return self._retry(lambda: self._backend.get_study_user_attrs(study_id))

    def get_study_system_attrs(self, study_id: int) -> dict[str, Any]:
        """See ``optuna.storages.BaseStorage``."""
        return self._retry(lambda: self._backend.get_study_system_attrs(study_id))

    def get_all_studies(self) -> list[FrozenStudy]:
        """See ``optuna.storages.BaseStorage``."""
        return self._retry(self._backend.get_all_studies)

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        """See ``optuna.storages.BaseStorage``; the trial gets a system attribute, ``REQUEST``."""
        request = uuid.uuid4().hex
        template = create_trial(state=TrialState.RUNNING) if template_trial is None else copy.deepcopy(template_trial)
        template.system_attrs = {**template.system_attrs, REQUEST: request}
        tried = False

        def create() -> int:
            nonlocal tried
            if tried:
                trials = self._backend.get_all_trials(study_id, deepcopy=False)
                made = [trial._trial_id for trial in trials if trial.system_attrs.get(REQUEST) == request]
                if made:
                    return made[0]
            tried = True
            return self._backend.create_new_trial(study_id, template)

        return self._retry(create)

    def set_trial_param(
        self, trial_id: int, param_name: str, param_value_internal: float, distribution: BaseDistribution
    ) -> None:
        """See ``optuna.storages.BaseStorage``."""
        self._retry(lambda: self._backend.set_trial_param(trial_id, param_name, param_value_internal, distribution))

    def get_trial_id_from_study_id_trial_number(self, study_id: int, trial_number: int) -> int:
        """See ``optuna.storages.BaseStorage``."""
        return self._retry(lambda: self._backend.get_trial_id_from_study_id_trial_number(study_id, trial_number))

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        """See ``optuna.storages.BaseStorage``."""

        def done(error: Exception) -> bool:
            stored = isinstance(error, UpdateFinishedTrialError) and self._backend.get_trial(trial_id).state
            if stored is not state:
                raise error
            return True

        tried = False

        def set_state() -> bool:
            nonlocal tried
            repeats, tried = tried, True
            if self._backend.set_trial_state_values(trial_id, state, values):
                return True
            return repeats and self._backend.get_trial(trial_id).state is state

        return self._retry_unless_done(set_state, done)

    def set_trial_intermediate_value(self, trial_id: int, step: int, intermediate_value: float) -> None:
        """See ``optuna.storages.BaseStorage``."""
        self._retry(lambda: self._backend.set_trial_intermediate_value(trial_id, step, intermediate_value))

    def set_trial_user_attr(self, trial_id: int, key: str, value: Any) -> None:
        """See ``optuna.storages.BaseStorage``."""
        self._retry(lambda: self._backend.set_trial_user_attr(trial_id, key, value))

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        """See ``optuna.storages.BaseStorage``."""
        self._retry(lambda: self._backend.set_trial_system_attr(trial_id, key, value))

    def get_trial(self, trial_id: int) -> FrozenTrial:
        """See ``optuna.storages.BaseStorage``."""
        return self._retry(lambda: self._backend.get_trial(trial_id))

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        """See ``optuna.storages.BaseStorage``."""
        return self._retry(lambda: self._backend.get_all_trials(study_id, deepcopy, states))

    def get_best_trial(self, study_id: int) -> FrozenTrial:
        """See ``optuna.storages.BaseStorage``."""
        return self._retry(lambda: self._backend.get_best_trial(study_id))

    def remove_session(self) -> None:
        """See ``optuna.storages.BaseStorage``."""
        self._backend.remove_session()
