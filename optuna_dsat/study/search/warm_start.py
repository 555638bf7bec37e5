"""Warm start: which earlier studies a guided search takes prior knowledge from.

The prior knowledge is stored with the study (``optuna_dsat.trials.attributes.WARM_START``): every worker and every
resumed run plans with the same, and deleting the earlier study changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import optuna
from optuna.trial import FrozenTrial

from optuna_dsat.errors import UnreadableStudyError, UsageError
from optuna_dsat.guided.prior_knowledge import EarlierLaunch, PriorKnowledge, launches_of
from optuna_dsat.store import Store
from optuna_dsat.study.profile.profiled import Profiled
from optuna_dsat.study.search.methods import make_planner
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.study.stored import StoredStudy, attributes_of, read_stored
from optuna_dsat.trials import attributes

_MOST_STUDIES = 3
"""Most earlier studies of the same fingerprint that are read, the latest first."""


_Earlier = tuple[StoredStudy, Profiled]
"""An earlier study, of which something was measured, with its profile."""


def prior_knowledge_of(
    study: optuna.Study, *, store: Store, spec: StudySpec, profiled: Profiled, fingerprint: str
) -> tuple[PriorKnowledge | None, bool]:
    """Return a study's prior knowledge, None without any, and whether this call gathered and stored it.

    A study that was started without prior knowledge stays without.

    Raises:
        UsageError: If ``--warm-start`` names a study that cannot be used.
    """
    if spec.method != "guided":
        return None, False

    def work() -> tuple[PriorKnowledge | None, bool]:
        stored = study.user_attrs.get(attributes.WARM_START)
        if stored is not None:
            return (PriorKnowledge.from_json(stored) if stored else None), False
        begun = any(attributes.LAUNCH_ID in trial.user_attrs for trial in study.get_trials(deepcopy=False))
        knowledge = None if begun else gather(store, spec, profiled, fingerprint=fingerprint)
        study.set_user_attr(attributes.WARM_START, {} if knowledge is None else knowledge.to_json())
        return knowledge, knowledge is not None

    return store.exclusively("look for earlier studies", work)


def check_warm_start(store: Store, spec: StudySpec) -> None:
    """Refuse a ``--warm-start`` that names no measured study, unless its knowledge is stored with this one."""
    named = spec.options.warm_start
    if named is None or (
        store.find_study(spec.name) is not None and attributes.WARM_START in attributes_of(store, spec.name)
    ):
        return
    if spec.options.no_warm_start:
        raise UsageError("--warm-start and --no-warm-start exclude each other: give one.")
    names = [record.name for record in store.list_studies() if record.name != spec.name]
    if named not in names:
        raise UsageError(
            f"--warm-start is {named!r}; the other studies of this database: {', '.join(names) or 'none'}."
        )
    if _read(store, named) is None:
        raise UsageError(f"--warm-start is {named!r}, of which nothing was measured: there is nothing to take over.")


def gather(store: Store, spec: StudySpec, profiled: Profiled, *, fingerprint: str) -> PriorKnowledge | None:
    """Return prior knowledge from earlier studies, if wanted and any; ``UsageError`` if named on other hardware."""
    if spec.options.no_warm_start:
        return None
    named = spec.options.warm_start
    if named is None:
        same = [earlier for earlier in _others(store, spec.name) if earlier[0].fingerprint == fingerprint]
        return _knowledge_of(same[:_MOST_STUDIES], same_model=True) if same else None
    check_warm_start(store, spec)
    earlier = _read(store, named)
    if earlier is None:
        return None
    study, there_profiled = earlier
    if study.fingerprint == fingerprint:
        return _knowledge_of([earlier], same_model=True)
    there, here = _hardware(study.spec, there_profiled), _hardware(spec, profiled)
    if there != here:
        raise UsageError(f"--warm-start is {named!r}, which was measured on {there}; this study runs on {here}.")
    return _knowledge_of([earlier], same_model=False)


def _hardware(spec: StudySpec, profiled: Profiled) -> str:
    device = profiled.profile.device_name or profiled.device or spec.device
    nodes = "" if spec.nodes_per_trial == 1 else f" on {spec.nodes_per_trial} nodes"
    return f"{spec.slots_per_trial} x {device}{nodes}"


def _others(store: Store, name: str) -> Iterator[_Earlier]:
    """Yield the other measured studies of the database, the latest first."""
    for record in sorted(store.list_studies(), key=lambda record: -record.created_at):
        try:
            earlier = None if record.name == name else _read(store, record.name)
        except UnreadableStudyError:
            continue
        if earlier is not None:
            yield earlier


def _read(store: Store, name: str) -> _Earlier | None:
    """Return a study with its profile; None if nothing of it was measured."""
    if store.find_study(name) is None:
        return None
    study = read_stored(store, name)
    measured = any(attributes.METRICS in trial.user_attrs for trial in _finished(study))
    return (study, study.profiled) if measured and study.profiled is not None else None


def _finished(study: StoredStudy) -> list[FrozenTrial]:
    return [trial for trial in study.trials if trial.state.is_finished()]


def _knowledge_of(studies: list[_Earlier], *, same_model: bool) -> PriorKnowledge:
    """Fit the coefficients to each study in turn, the oldest first; of the ``same_model``, gather their launches."""
    prior_knowledge: PriorKnowledge | None = None
    names: list[str] = []
    launches: list[EarlierLaunch] = []
    for study, profiled in reversed(studies):
        planner = make_planner(study.spec, profiled, study.space, prior_knowledge=prior_knowledge)
        names.append(study.spec.name)
        fitted = planner.fitted_coefficients(_finished(study))
        untold = ("network",) if study.spec.nodes_per_trial == 1 else ()
        prior_knowledge = PriorKnowledge.of(fitted, studies=names, same_model=same_model, untold=untold)
        launches += launches_of(_finished(study))
    if prior_knowledge is None:
        raise ValueError("there is no study to learn from")
    return replace(prior_knowledge, launches=tuple(launches) if same_model else ())
