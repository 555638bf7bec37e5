"""The tuner itself on the rig: whole sessions, as the command line runs them, over a store in memory."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal, cast

import optuna

from benchmarks.rig import COMMAND, Rig
from optuna_dsat.errors import NothingRunnableError
from optuna_dsat.session import Session
from optuna_dsat.spec import StudySpec, make_spec
from optuna_dsat.store import Store
from optuna_dsat.store.history import StoredLaunch
from optuna_dsat.store.registry import StudyRecord

__all__ = ["MemoryStore", "run", "spec_of"]


class _Heartbeat:
    """One worker: nobody is ever lost."""

    def add(self, trial: optuna.Trial) -> None:
        """Accept a trial."""

    def remove(self, trial: optuna.Trial) -> None:
        """Forget a trial."""

    def is_lost(self, trial: optuna.Trial) -> bool:  # noqa: ARG002 - the store's signature
        """Return that a trial is still this worker's."""
        return False


class MemoryStore:
    """What a session needs of a store, in memory: a search over SQLite spends most of its time in the database.

    ``tests/benchmarks`` checks that a session over SQLite launches the same configurations.
    """

    def __init__(self) -> None:
        self.storage = optuna.storages.InMemoryStorage()
        self.heartbeat = _Heartbeat()
        self._claims: set[str] = set()
        self._record: StudyRecord | None = None

    def find_study(self, name: str) -> StudyRecord | None:
        """Return the study, None before it is created."""
        return self._record if self._record is not None and self._record.name == name else None

    def create_study(
        self, name: str, spec: Mapping[str, Any], *, direction: Literal["minimize", "maximize"]
    ) -> StudyRecord:
        """Create the study."""
        optuna.create_study(study_name=name, storage=self.storage, direction=direction)
        self._record = StudyRecord(uuid=name, name=name, spec=dict(spec), created_at=0.0, versions={})
        return self._record

    def find_profile(self, key: str) -> None:
        """Return no profile: each search measures its own."""

    def save_profile(self, *args: Any, **kwargs: Any) -> None:
        """Keep nothing."""

    def record_launch(self, *args: Any, **kwargs: Any) -> None:
        """Keep nothing: the rig does."""

    record_steps = record_launch

    def reclaim_stale(self, study: optuna.Study) -> None:
        """Find nothing to reclaim."""

    def launches(self, study_uuid: str) -> list[StoredLaunch]:  # noqa: ARG002 - the store's signature
        """Return nothing: the rig counts."""
        return []

    def claim(self, study_uuid: str, key: str, number: int) -> bool:  # noqa: ARG002 - the store's signature
        """Return whether a configuration is new."""
        new = key not in self._claims
        self._claims.add(key)
        return new

    def claim_owner(self, study_uuid: str, key: str) -> None:
        """Return nobody: there is one worker."""

    def exclusive(self, purpose: str) -> AbstractContextManager[None]:  # noqa: ARG002 - the store's signature
        """Return a lock that nobody else wants."""
        return nullcontext()

    def release_claim(self, study_uuid: str, key: str) -> None:  # noqa: ARG002 - the store's signature
        """Forget a configuration."""
        self._claims.discard(key)


def spec_of(rig: Rig, *, method: str, budget: int, seed: int, folder: Path) -> StudySpec:
    """Return the study: the command line's defaults, one launch at a time.

    The finalists (three and the user's config) are part of the budget, so that no method launches more than another.
    """
    confirm = 3 if budget > 8 else 0
    return make_spec(
        name="benchmark",
        method=method,
        script={"script": COMMAND.script, "cwd": str(folder), "config_path": COMMAND.config_path},
        ds_config=rig.landscape.user_config,
        device="cuda",
        slots_per_trial=rig.landscape.slots,
        max_trials=budget - (confirm + 1 if confirm else 0),
        max_concurrent_trials=1,
        random_seed=seed,
        confirm=confirm,
        output_dir=str(folder),
    )


def run(method: str, rig: Rig, *, budget: int, seed: int, store: Store | None = None) -> None:
    """Run one search; the rig keeps what it launched."""
    with tempfile.TemporaryDirectory() as folder:
        session = Session(
            spec_of(rig, method=method, budget=budget, seed=seed, folder=Path(folder)),
            store=store or cast(Store, MemoryStore()),
            launcher=rig,
            device_names=("simulated",),
            observer=lambda _: None,
        )
        try:
            session.run()
        except NothingRunnableError:
            return  # an outcome of the search like any other
