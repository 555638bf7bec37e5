from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, IntDistribution
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from optuna_dsat.trials.lineage import MICRO_BATCH, PLAN_ATTR, RETRY_ATTR, Lineage, agrees, group, unreachable
from optuna_dsat.trials.lineage_cache import StudyHistory, read_history
from optuna_dsat.trials.lineage_index import Lineages, best_score

SPACE: dict[str, Any] = {
    "zero_stage": CategoricalDistribution([1, 2, 3]),
    "offload_param": CategoricalDistribution(["none", "cpu"]),
    "bucket": CategoricalDistribution([5e6, 5e7]),
    MICRO_BATCH: IntDistribution(1, 64, log=True),
}


@pytest.fixture(params=["memory", "journal", "sqlite", "sqlite without a cache"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BaseStorage]:
    if request.param == "memory":
        yield InMemoryStorage()
    elif request.param == "journal":
        yield JournalStorage(JournalFileBackend(str(tmp_path / "journal")))
    else:
        backend = RDBStorage(f"sqlite:///{tmp_path}/s.db")
        yield backend if request.param == "sqlite without a cache" else optuna.storages.get_storage(backend)
        backend.remove_session()
        backend.engine.dispose()


def knobs(chance: random.Random) -> dict[str, Any]:
    stage = chance.choice([1, 2, 3])
    result: dict[str, Any] = {"zero_stage": stage}
    if stage == 3:
        result["offload_param"] = chance.choice(["none", "cpu"])
    return {**result, "bucket": chance.choice([5e6, 5e7])}


def finished(chance: random.Random) -> FrozenTrial:
    params = {**knobs(chance), MICRO_BATCH: chance.randint(1, 64)}
    if chance.random() < 0.2:
        del params[MICRO_BATCH]
    state = chance.choice([TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL])
    return create_trial(
        state=state,
        value=chance.random() if state == TrialState.COMPLETE else None,
        params=params,
        distributions={name: SPACE[name] for name in params},
        system_attrs={RETRY_ATTR: 0} if chance.random() < 0.2 else None,
    )


def disturb(study: optuna.Study, flying: list[optuna.Trial], chance: random.Random) -> None:
    """Do one of the things that happen to a study."""
    what = chance.random()
    if what < 0.25:
        study.add_trial(finished(chance))
    elif what < 0.35:
        study.enqueue_trial({**knobs(chance), MICRO_BATCH: chance.randint(1, 64)})
    elif what < 0.6 or not flying:
        flying.append(study.ask())
        plan: dict[str, Any] = {"draw": 1}
        if chance.random() < 0.7:
            plan |= {"lineage": knobs(chance), "micro_batch": chance.randint(1, 64)}
        study._storage.set_trial_system_attr(flying[-1]._trial_id, PLAN_ATTR, plan)
    elif what < 0.8:
        trial = chance.choice(flying)
        for name, value in {**knobs(chance), MICRO_BATCH: chance.randint(1, 64)}.items():
            if name not in study._storage.get_trial(trial._trial_id).params:
                internal = SPACE[name].to_internal_repr(value)
                study._storage.set_trial_param(trial._trial_id, name, internal, SPACE[name])
    else:
        study.tell(flying.pop(chance.randrange(len(flying))), chance.random())


def told(lineages: Mapping[str, Lineage]) -> list[tuple[str, list[tuple[str, Any]], list[tuple[int, Any, Any]]]]:
    return [
        (key, list(o.params.items()), [(t.number, t.state, dict(t.params)) for t in o.trials])
        for key, o in lineages.items()
    ]


def check(history: StudyHistory, trials: Sequence[FrozenTrial]) -> None:
    assert [t.number for t in history.trials] == [t.number for t in trials]
    assert told(history.lineages) == told(group(trials))
    assert [t.number for t in history.pending] == [t.number for t in trials if not t.state.is_finished()]
    assert {t.number for t in history.finished} == {t.number for t in trials if t.state.is_finished()}
    assert history.unreachable == unreachable(trials)
    for number in (0, 5, 50):
        expected = sum(RETRY_ATTR in t.system_attrs for t in trials if t.number < number)
        assert history.retries_before(number) == expected


@pytest.mark.parametrize("seed", range(3))
def test_a_history_is_what_its_trials_say(storage: BaseStorage, seed: int) -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    chance = random.Random(seed)
    study = optuna.create_study(storage=storage, sampler=optuna.samplers.RandomSampler(seed=0))
    flying: list[optuna.Trial] = []
    steps = 80 if isinstance(storage, InMemoryStorage | JournalStorage) else 30  # a database takes ten times as long
    for _ in range(steps):
        disturb(study, flying, chance)
        trials = study.get_trials()
        without = chance.choice([None, *(t.number for t in flying), len(trials) // 2])
        check(read_history(study, without=without), [t for t in trials if t.number != without])


def test_an_older_reading_stays_what_it_was(storage: BaseStorage) -> None:
    study = optuna.create_study(storage=storage)
    study.add_trial(finished(random.Random(1)))
    before = study.get_trials()
    old = read_history(study)
    study.add_trial(finished(random.Random(2)))
    check(read_history(study), study.get_trials())
    check(old, before)


def test_a_study_made_again_under_its_old_number_is_read_anew(tmp_path: Path) -> None:
    storage = RDBStorage(f"sqlite:///{tmp_path}/s.db")
    for seed in range(2):
        study = optuna.create_study(storage=storage, study_name="s")
        for _ in range(5):
            study.add_trial(finished(random.Random(seed)))
        check(read_history(study), study.get_trials())
        optuna.delete_study(study_name="s", storage=storage)
    storage.remove_session()
    storage.engine.dispose()


def test_a_shared_reading_serves_one_trial_until_another_reads() -> None:
    study = optuna.create_study()
    first = read_history(study, without=0, again=False)
    assert read_history(study, without=0, again=False) is first
    assert read_history(study, without=1, again=False) is not first
    assert read_history(study, without=0, again=False) is not first
    read_history(study)
    last = read_history(study, without=0, again=False)
    assert read_history(study, without=0) is not last


def everything_opened(params: Mapping[str, Any], lineages: Sequence[Lineage], hopeless: Sequence[Any]) -> bool:
    """The result of ``Tree.closed``, computed from scratch."""
    if any(agrees(params, kind, strict=True) for kind in hopeless):
        return True
    below = [lineage for lineage in lineages if agrees(lineage.params, params, strict=True)]
    if not below or any(len(lineage.params) == len(params) for lineage in below):
        return bool(below)
    for name in below[0].params:
        distribution = below[0].trials[-1].distributions.get(name)
        shared = name not in params and all(name in o.params for o in below)
        if shared and isinstance(distribution, CategoricalDistribution):
            return all(everything_opened({**params, name: c}, below, hopeless) for c in distribution.choices)
    return False


@pytest.mark.parametrize("seed", range(4))
def test_tree_and_kinds_follow_the_lineages(seed: int) -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    chance = random.Random(seed)
    study = optuna.create_study()
    flying: list[optuna.Trial] = []
    answers = set()
    for _ in range(60):
        disturb(study, flying, chance)
        lineages = read_history(study).lineages
        whole = [o for o in lineages.values() if o.complete]
        for hopeless in ([], [{"zero_stage": 3, "offload_param": "cpu"}], [{"zero_stage": 3}]):
            for params in ({}, {"zero_stage": 1}, {"zero_stage": 3}, {"zero_stage": 3, "offload_param": "none"}):
                expected = everything_opened(params, whole, hopeless)
                assert lineages.tree.closed(params, hopeless) is expected
                assert Lineages(lineages.values()).tree.closed(params, hopeless) is expected
                answers.add(expected)
        for name, value in (("bucket", 50_000_000), ("zero_stage", 3), ("offload_param", "cpu")):
            counted = sum(kind.count(name, value) for kind in lineages.structures.values())
            assert counted == sum(o.params.get(name) == value for o in whole)
        shown = [s for o in lineages.values() if (s := o.best_score(StudyDirection.MAXIMIZE)) is not None]
        assert best_score(lineages, StudyDirection.MAXIMIZE) == max(shown, default=None)
    assert answers == {True, False}
