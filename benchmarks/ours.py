"""The tuner itself on the rig: whole sessions, as the command line runs them, over a throw-away store."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import optuna

from benchmarks.recorded import Recorded
from benchmarks.rig import COMMAND, BudgetSpentError, Landscape, Rig
from optuna_dsat.config.knobs import PARTITION_COPY
from optuna_dsat.errors import NothingRunnableError
from optuna_dsat.store import Store
from optuna_dsat.store.registry import STUDY_UUID
from optuna_dsat.study.confirm.rounds import Rounds
from optuna_dsat.study.confirm.verdict import verdict_of
from optuna_dsat.study.search.methods import Method, make_method
from optuna_dsat.study.session import Session
from optuna_dsat.study.spec import StudyRequest, StudySpec, make_spec
from optuna_dsat.study.stored import StoredStudy, read_stored
from optuna_dsat.trials import attributes
from tests.harness.simulated import SIMULATED_DEVICES

BOTH = "-both"
"""Ending of a method's name with ``--batch both``."""
_EVERY = 8
"""Trials between two statements of what may be left to gain."""


class _QuickStore(Store):
    """Asks Optuna's storage which studies there are, where the tables of its studies are empty."""

    def _uuids(self, name: str | None = None) -> dict[str, str]:
        studies = [study for study in self.storage.get_all_studies() if name in (None, study.study_name)]
        return {study.study_name: study.user_attrs[STUDY_UUID] for study in studies if STUDY_UUID in study.user_attrs}


@contextmanager
def quick_store(folder: Path) -> Iterator[Store]:
    """Open a throw-away store: the real one, but with Optuna's trials in memory.

    A search of the benchmark spends most of its time in Optuna's tables otherwise. ``tests/benchmarks`` checks that a
    session with all of it in SQLite launches the same configurations.
    """
    with Store.open(f"sqlite:///{folder / 'study.db'}") as store:
        trials = cast(optuna.storages.RDBStorage, optuna.storages.InMemoryStorage())
        quick = _QuickStore(store._database, trials)
        try:
            yield quick
        finally:
            quick.heartbeat.close()


def spec_of(rig: Rig, *, method: str, budget: int, seed: int, folder: Path) -> StudySpec:
    """Return the study: the command line's defaults, one launch at a time, for the one question that peers answer.

    A method whose name ends with ``BOTH`` answers the second question as well, as by default, and its rounds go on.

    The finalists (three and the user's config) are part of the budget, so that no method launches more than another:
    the last launches are a single round of them, where a search leaves no more. Simulated machines know nothing of
    ``zero_hpz_partition_size``, which would be tuned on several nodes.
    """
    confirm = 3 if budget > 8 else 0
    return make_spec(
        name="benchmark",
        method=method.removesuffix(BOTH),
        script={"script": COMMAND.script, "cwd": str(folder), "config_path": COMMAND.config_path},
        ds_config=rig.landscape.user_config,
        device=rig.landscape.kind,
        **_space(rig.landscape),
        on="here" if rig.landscape.nodes == 1 else "slurm",
        nodes_per_trial=rig.landscape.nodes,
        slots_per_trial=rig.landscape.slots,
        max_trials=budget - (confirm + 1 if confirm else 0),
        batch="both" if method.endswith(BOTH) else "free",
        max_concurrent_trials=1,
        random_seed=seed,
        confirm=confirm,
        output_dir=str(folder),
    )


def _space(landscape: Landscape) -> dict[str, tuple[Any, ...]]:
    """Return the options that restrict a search to the settings that a landscape covers."""
    if not isinstance(landscape, Recorded):
        return {"no_tune": () if landscape.nodes == 1 else (PARTITION_COPY,)}
    complete = {1, 2, 3} <= set(landscape.stages)
    return {"no_tune": landscape.no_tune, **({} if complete else {"zero_stages": landscape.stages})}


def run(method: str, rig: Rig, *, budget: int, seed: int) -> None:
    """Run a search; the rig keeps its launches, results and statements."""
    with tempfile.TemporaryDirectory() as folder, quick_store(Path(folder)) as store:
        study = search(method, rig, budget=budget, seed=seed, store=store)
        if study is not None:
            rig.results = results(rig, study)
            same = study.verdict.same_batch if study.spec.batch == "both" and study.verdict else None
            rig.same_batch = None if same is None else same.trial.user_attrs[attributes.CONFIG]
            rig.statements = statements(study)


def search(method: str, rig: Rig, *, budget: int, seed: int, store: Store) -> StoredStudy | None:
    """Run one search in a store; return None if nothing runs, which is an outcome like any other."""
    with tempfile.TemporaryDirectory() as folder:
        request = StudyRequest(
            spec=spec_of(rig, method=method, budget=budget, seed=seed, folder=Path(folder)),
            devices=SIMULATED_DEVICES,
            storage=store.url,
        )
        session = Session(request, store=store, launcher=rig, observer=lambda _: None)
        try:
            session.run()
        except NothingRunnableError:
            return None
        except BudgetSpentError:
            pass  # the rounds of the finalists end with the budget
        return read_stored(store, request.spec.name)


def statements(study: StoredStudy) -> list[tuple[Mapping[str, Any], float]]:
    """Return what the search would state if it ended after each ``_EVERY`` trials, and what it states at its end.

    Returns:
        The config that it holds, and the share by which nothing else is better with 90 % probability.
    """
    method = _method_of(study)
    trials = [trial for trial in study.trials if attributes.LAUNCH_ID in trial.user_attrs]
    result = []
    for count in [*range(_EVERY, len(trials), _EVERY), len(trials)]:
        ranked = method.ranked(trials[:count], maximize=True)
        if ranked and method.posterior is not None:
            result.append((ranked[0].user_attrs[attributes.CONFIG], method.posterior.remaining(trials[:count])))
    return result


def _method_of(study: StoredStudy) -> Method:
    """Return the method of a session that ran.

    Raises:
        RuntimeError: If it did not profile.
    """
    if study.profiled is None:
        raise RuntimeError("a session that ran has a profile")
    return make_method(study.spec, study.profiled, study.space)


def results(rig: Rig, study: StoredStudy) -> list[Mapping[str, Any] | None]:
    """Return the config that would be the result if the search were stopped, after each launch.

    That is the method's best trial so far (``Method.ranked``), by which finalists are chosen, until two rounds have
    compared these; then the config of the verdict.
    """
    method = _method_of(study)
    trials = {trial.user_attrs.get(attributes.LAUNCH_ID): trial for trial in study.trials}
    again = {f"confirm-{item.number:04d}-round-{item.round}": item for item in study.rounds.launches}
    seen: list[optuna.trial.FrozenTrial] = []
    rounds = Rounds(chosen=study.rounds.chosen, estimate=study.rounds.estimate)
    result: list[Mapping[str, Any] | None] = []
    for launch in rig.launches:
        if launch.launch_id in trials:
            seen = sorted([*seen, trials[launch.launch_id]], key=lambda trial: trial.number)
        elif launch.launch_id in again:
            rounds = rounds.with_launch(again[launch.launch_id])
        candidates = method.ranked(seen, maximize=True)
        verdict = verdict_of(seen, rounds, study.spec)
        winner = candidates[0] if candidates else None
        if verdict is not None and verdict.is_by_rounds:
            winner = next(candidate for candidate in candidates if candidate.number == verdict.result.number)
        result.append(None if winner is None else winner.user_attrs[attributes.CONFIG])
    return result
