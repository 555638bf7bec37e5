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

from optuna_dsat.store.retry import RETRY_LIMIT_S, retrying

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
        return self._retry_again(lambda _again: work())

    def _retry_again(self, work: Callable[[bool], T]) -> T:
        """Run ``work``, which is told whether it ran before; what that wrote may have been committed."""
        again = False

        def attempt() -> T:
            nonlocal again
            self._require_present()
            told, again = again, True
            return work(told)

        return retrying(attempt, database=self._database, limit_s=self._retry_limit_s)

    def create_new_study(self, directions: Sequence[StudyDirection], study_name: str | None = None) -> int:
        """See ``optuna.storages.BaseStorage``."""
        return self._retry(lambda: self._backend.create_new_study(directions, study_name))

    def delete_study(self, study_id: int) -> None:
        """See ``optuna.storages.BaseStorage``."""

        def delete(again: bool) -> None:
            try:
                self._backend.delete_study(study_id)
            except KeyError:
                if not again:
                    raise

        self._retry_again(delete)

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

        def create(again: bool) -> int:
            if again:
                trials = self._backend.get_all_trials(study_id, deepcopy=False)
                made = [trial._trial_id for trial in trials if trial.system_attrs.get(REQUEST) == request]
                if made:
                    return made[0]
            return self._backend.create_new_trial(study_id, template)

        return self._retry_again(create)

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

        def set_state(again: bool) -> bool:
            try:
                if self._backend.set_trial_state_values(trial_id, state, values):
                    return True
            except UpdateFinishedTrialError:
                if not again or self._backend.get_trial(trial_id).state is not state:
                    raise
                return True
            return again and self._backend.get_trial(trial_id).state is state

        return self._retry_again(set_state)

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
