"""Finalists that take the place of others: of one that failed with more steps, or that rounds showed to be no better.

The best measurement of a search may be false: the machine was quieter for a while, or the launch too short. Where all
finalists prove no better than the user's own config, the next best trials are still to be heard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from optuna.trial import FrozenTrial

from optuna_dsat.metrics import speed_up
from optuna_dsat.study.rounds import MIN_ROUNDS, Rounds
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.study.verdict import VerdictKind, verdict_of
from optuna_dsat.trials import attributes

__all__ = ["refuted", "with_next_best", "without_failed"]


def refuted(rounds: Rounds, trials: Sequence[FrozenTrial], *, spec: StudySpec) -> frozenset[int]:
    """Return the trials that failed in the rounds, or that these show to be no better than the user's own config.

    That is: not surely better, and by no more than a tie as far as three rounds tell.

    Args:
        rounds: What was launched so far.
        trials: All trials.
        spec: The study.
    """
    out = {one.number for one in rounds.launches if rounds.failure(one.number) is not None}
    verdict = verdict_of(trials, rounds, maximize=spec.maximize, tie=spec.tie, slots=spec.slots_per_trial)
    if verdict is None:
        return frozenset(out)
    for one in verdict.contenders:
        ratio = one.ratio
        if one.number == verdict.baseline or ratio is None or ratio.rounds < MIN_ROUNDS:
            continue
        if not ratio.surely_above_1 and ratio.value <= 1 + spec.tie:
            out.add(one.number)
    return frozenset(out)


def without_failed(
    rounds: Rounds, trials: Sequence[FrozenTrial], candidates: Sequence[FrozenTrial], *, spec: StudySpec
) -> Rounds:
    """Return the rounds with the next best trial among the chosen if the last launch ended a finalist.

    Args:
        rounds: What was launched so far.
        trials: All trials.
        candidates: The measured trials, best first.
        spec: The study.
    """
    last = rounds.launches[-1].number
    own = attributes.user_config_trial(trials)
    failed = [one for one in rounds.chosen if rounds.failure(one) is not None]
    if last not in failed or (own is not None and last == own.number) or len(failed) > spec.confirm:
        return rounds
    out = {*rounds.chosen, *refuted(rounds, trials, spec=spec)}
    waiting = [one.number for one in candidates if one.number not in out]
    return replace(rounds, chosen=(*rounds.chosen, *waiting[:1]))


def with_next_best(
    rounds: Rounds, trials: Sequence[FrozenTrial], candidates: Sequence[FrozenTrial], *, spec: StudySpec
) -> Rounds:
    """Return the rounds with one more finalist if all so far proved no better than the user's own config.

    It is the next best of the trials that the search measured better than that config, by more than a tie. There are
    at most twice ``--confirm`` finalists, and none is added once the time of ``--confirm-time`` is spent.

    Args:
        rounds: What was launched so far.
        trials: All trials.
        candidates: The measured trials, best first.
        spec: The study.
    """
    verdict = verdict_of(trials, rounds, maximize=spec.maximize, tie=spec.tie, slots=spec.slots_per_trial)
    spent = spec.confirm_time_s is not None and rounds.spent_s >= spec.confirm_time_s
    if verdict is None or verdict.kind is not VerdictKind.BASELINE_IS_BEST or spent:
        return rounds
    own, out = verdict.baseline, refuted(rounds, trials, spec=spec)
    compared = {one for one in rounds.chosen if one != own}
    heard = {one.number for one in rounds.launches if one.round >= rounds.since} - {own}
    if compared - out or len(heard | compared) >= 2 * spec.confirm:
        return rounds
    values = {one.number: float(one.values[0]) for one in candidates}

    def claims_more(number: int) -> bool:
        claimed = speed_up(values[number], values.get(own), maximize=spec.maximize) if own is not None else None
        return claimed is not None and claimed > 1 + spec.tie

    waiting = [number for number in values if number not in {own, *compared, *heard, *out} and claims_more(number)]
    if not waiting:
        return rounds
    kept = [one for one in rounds.chosen if one == own or rounds.failure(one) is not None]
    return replace(rounds, chosen=(*kept, waiting[0]))
