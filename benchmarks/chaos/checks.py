"""What must hold at the end of a study, whatever was killed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import optuna

from optuna_dsat.launch.follow import MOST_KILLED
from optuna_dsat.outcome import Outcome
from optuna_dsat.store import Store
from optuna_dsat.trials import attributes

State = tuple[str, tuple[float, ...] | None]
"""State and values of a finished trial."""
Finished = Mapping[int, State]
"""Finished trials by their numbers."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A study at its end, and what it left on the machine."""

    code: int | None
    """Exit code of the last tuner; None if it hung."""
    seen: Finished
    """What was finished at any time before."""
    processes: tuple[int, ...]
    shared_memory: tuple[str, ...]
    temporary: tuple[str, ...]
    """Files in the temporary folder of its tuners."""
    stderr: str
    """Of all its tuners."""


def _load(url: str, name: str) -> tuple[optuna.trial.FrozenTrial, ...]:
    with Store.open(url, create=False) as store:
        return tuple(optuna.load_study(study_name=name, storage=store.storage).get_trials(deepcopy=False))


def finished_of(url: str, name: str) -> Finished:
    """Return the finished trials of a study; nothing where it does not exist yet."""
    try:
        trials = _load(url, name)
    except Exception:  # noqa: BLE001 - not made yet, or just being made
        return {}
    return {trial.number: (trial.state.name, _values(trial)) for trial in trials if trial.state.is_finished()}


def _values(trial: optuna.trial.FrozenTrial) -> tuple[float, ...] | None:
    return None if trial.values is None else tuple(trial.values)


def violations(ended: Ended, *, url: str, name: str, budget: int, output: Path) -> list[str]:
    """Return what does not hold, in words."""
    if ended.code != 0:
        how = "hung" if ended.code is None else f"ended with {ended.code}"
        return [f"the last tuner {how}: {ended.stderr[-500:]}"]
    return [
        *_study(ended, url=url, name=name, budget=budget),
        *(f"process left: {pid}" for pid in ended.processes),
        *(f"shared memory left: {path}" for path in ended.shared_memory),
        *(f"temporary file left: {path}" for path in ended.temporary),
        *(f"partial file left: {path}" for path in output.rglob(".*.[0-9]*")),
        *(["traceback of a tuner"] if "Traceback (most recent call last)" in ended.stderr else []),
        *([] if (output / name / "best_ds_config.json").is_file() else ["no best_ds_config.json"]),
    ]


def given_up(url: str, name: str) -> int:
    """Return how many trials were not launched again, by design: each of their launches was killed."""
    return sum(map(_is_given_up, _load(url, name)))


def _is_given_up(trial: optuna.trial.FrozenTrial) -> bool:
    outcome, attempts = trial.user_attrs.get(attributes.OUTCOME), trial.user_attrs.get(attributes.ATTEMPTS, 0)
    return outcome == Outcome.KILLED and attempts > MOST_KILLED


def _study(ended: Ended, *, url: str, name: str, budget: int) -> Iterator[str]:
    trials = _load(url, name)
    now = {trial.number: (trial.state.name, _values(trial)) for trial in trials}
    for number, was in ended.seen.items():
        if now.get(number) != was:
            yield f"finished trial {number} was {was}, is {now.get(number)}"
    yield from (f"trial {trial.number} is {trial.state.name}" for trial in trials if not trial.state.is_finished())
    outcomes = [trial for trial in trials if trial.user_attrs.get(attributes.OUTCOME, Outcome.LOST) != Outcome.LOST]
    if len(outcomes) != budget:
        yield f"{len(outcomes)} launches of a budget of {budget}"
    measured = Counter(trial.user_attrs[attributes.CONFIG_KEY] for trial in outcomes)
    yield from (f"measured {count} times: {key[:60]}" for key, count in measured.items() if count > 1)
    for outcome in outcomes:
        if outcome.user_attrs[attributes.OUTCOME] not in (Outcome.MEASURED, Outcome.PRUNED) and not _is_given_up(
            outcome
        ):
            message = outcome.user_attrs.get(attributes.MESSAGE, "")
            yield f"trial {outcome.number} is {outcome.user_attrs[attributes.OUTCOME]} by a kill: {message[:160]}"
