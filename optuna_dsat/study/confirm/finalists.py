"""Choose the finalists, which are measured again alongside the user's config."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

from optuna.trial import FrozenTrial

from optuna_dsat.guided.joint_estimate import JointEstimate
from optuna_dsat.metrics import speed_up
from optuna_dsat.study.confirm.rounds import MIN_ROUNDS, Rounds
from optuna_dsat.study.confirm.verdict import VerdictKind, user_batch, verdict_of
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.trials import attributes

USUAL_NOISE = 0.02
"""Assumed relative standard deviation between equal launches before any repetition: launches of this project's examples
differ by 1 or 2%.
"""

_FEWER = 1.5
"""Factor by which a global batch must be smaller for another config of the same speed to be measured in rounds."""


def confirmation_end(spec: StudySpec) -> int:
    """Return the last step of a confirmation: by default it counts five times the steps of a trial, at least ten.

    A launch with long steps ends earlier.
    """
    return spec.start_profile_step + max(10, 5 * trial_steps(spec)) - 1


def trial_steps(spec: StudySpec) -> int:
    """Return the number of steps that a trial counts."""
    return spec.end_profile_step - spec.start_profile_step + 1


def choose_finalists(
    trials: Sequence[FrozenTrial],
    candidates: Sequence[FrozenTrial],
    *,
    spec: StudySpec,
    noise: float | None,
    estimate: JointEstimate | None = None,
    out: Collection[int] = (),
) -> list[int]:
    """Return the numbers of the finalists, including the user's config.

    The first of ``--confirm`` finalists is the method's best. The second has the smallest global batch of the trials
    that noise or ``--tie`` does not distinguish from the best, if that is smaller by ``_FEWER``. As a model may be
    wrong, the best measurement follows if it exceeds the first's by more than the noise. Without a posterior, which
    says that others are worse, the next best follow. With ``--batch both`` the best trial at the user's global batch is
    added. A trial whose simplification was no slower than a tie is replaced by it.

    Args:
        trials: All trials.
        candidates: The measured trials, best first.
        spec: The study.
        noise: Relative standard deviation between launches; None if unknown.
        estimate: Estimate of the candidates by the search; None if its method has no posterior.
        out: Numbers of trials that failed or were not better than the user's config in earlier rounds.
    """
    baseline = attributes.user_config_trial(trials)
    left_out = {*out, *_simplified(candidates, spec)} | (set() if baseline is None else {baseline.number})
    others = [candidate for candidate in candidates if candidate.number not in left_out]
    first = [] if baseline is None or not spec.confirm else [baseline.number]
    if not spec.confirm or not others:
        return first
    measured = attributes.best_trials(others, maximize=spec.maximize)
    batches = {
        candidate.number: attributes.train_batch_size(candidate, slots=spec.slots_per_trial) for candidate in candidates
    }
    best, sd = others[0].number, USUAL_NOISE if noise is None else noise
    if estimate is None:
        margin, value = max(spec.tie, 2 * sd), abs(measured[0].values[0])
        equal = [trial.number for trial in measured if abs(abs(trial.values[0]) / value - 1) <= margin]
    else:
        equal = [trial.number for trial in others if not _is_below(trial.number, best, estimate, tie=spec.tie)]
    rank = {trial.number: place for place, trial in enumerate(others)}
    smallest = min(equal, key=lambda number: (batches[number], rank[number]))
    places = [best, *([smallest] if _FEWER * batches[smallest] <= batches[best] else [])]
    if abs(math.log(measured[0].values[0] / others[0].values[0])) > math.sqrt(2) * sd:
        places.append(measured[0].number)
    if estimate is None:
        places += rank
    chosen = list(dict.fromkeys(places))[: spec.confirm]
    if spec.batch == "both":
        batch = user_batch(candidates, spec=spec)
        same = [trial.number for trial in others if batches[trial.number] == batch][:1]
        chosen += [number for number in same if number not in chosen]
    return [*chosen, *first]


def _simplified(candidates: Sequence[FrozenTrial], spec: StudySpec) -> set[int]:
    """Return the trials that were measured without their settings, at most a tie slower."""
    by_number = {trial.number: trial for trial in candidates}
    numbers = set()
    for trial in candidates:
        complex_ = by_number.get(trial.user_attrs.get(attributes.SIMPLIFIES, -1))
        if complex_ is None:
            continue
        ratio = speed_up(trial.values[0], complex_.values[0], maximize=spec.maximize)
        if ratio is not None and ratio >= 1 - spec.tie:
            numbers.add(complex_.number)
    return numbers


def _is_below(number: int, best: int, estimate: JointEstimate, *, tie: float) -> bool:
    """Whether a trial is worse than a tie with the best by a standard deviation."""
    log_ratio, sd = estimate.log_ratio(number, best)
    return log_ratio + sd < math.log1p(-tie)


# Replacement of finalists that failed with more steps or were not better than the user's config in the rounds.
#
# The best measurement of a search may be wrong: the machine was less busy, or the launch too short. If no finalist is
# better than the user's config, the next best trials are measured as well.


def refuted(rounds: Rounds, trials: Sequence[FrozenTrial], *, spec: StudySpec) -> frozenset[int]:
    """Return the trials that failed in the rounds, or were not better than the user's config in them.

    Not better means not surely better, and by at most a tie after three rounds.
    """
    out = {launch.number for launch in rounds.launches if rounds.failure(launch.number) is not None}
    verdict = verdict_of(trials, rounds, spec)
    if verdict is None:
        return frozenset(out)
    for contender in verdict.contenders:
        ratio = contender.speed_up
        if contender.is_user_config or ratio is None or ratio.rounds < MIN_ROUNDS:
            continue
        if not ratio.surely_above_1 and ratio.value <= 1 + spec.tie:
            out.add(contender.number)
    return frozenset(out)


def without_failed(
    rounds: Rounds, trials: Sequence[FrozenTrial], candidates: Sequence[FrozenTrial], *, spec: StudySpec
) -> Rounds:
    """Return the rounds, with the next best trial as a finalist if the last launch eliminated a finalist."""
    last = rounds.launches[-1].number
    baseline = attributes.user_config_trial(trials)
    failed = [number for number in rounds.chosen if rounds.failure(number) is not None]
    if last not in failed or (baseline is not None and last == baseline.number) or len(failed) > spec.confirm:
        return rounds
    out = {*rounds.chosen, *refuted(rounds, trials, spec=spec)}
    waiting = [candidate.number for candidate in candidates if candidate.number not in out]
    return replace(rounds, chosen=(*rounds.chosen, *waiting[:1]))


def with_next_best(
    rounds: Rounds, trials: Sequence[FrozenTrial], candidates: Sequence[FrozenTrial], *, spec: StudySpec
) -> Rounds:
    """Return the rounds, with another finalist if no finalist so far was better than the user's config.

    The new finalist is the next best trial that the search measured better than the user's config by more than a tie.
    There are at most twice ``--confirm`` finalists. None is added after ``--confirm-time`` is spent.
    """
    verdict = verdict_of(trials, rounds, spec)
    spent = spec.confirm_time is not None and rounds.spent_s >= spec.confirm_time
    if verdict is None or verdict.kind is not VerdictKind.BASELINE_IS_BEST or spent:
        return rounds
    user = None if verdict.baseline is None else verdict.baseline.number
    out = refuted(rounds, trials, spec=spec)
    compared = {number for number in rounds.chosen if number != user}
    heard = {launch.number for launch in rounds.launches if launch.round >= rounds.since} - {user}
    if compared - out or len(heard | compared) >= 2 * spec.confirm:
        return rounds
    values = {candidate.number: float(candidate.values[0]) for candidate in candidates}

    def claims_more(number: int) -> bool:
        claimed = speed_up(values[number], values.get(user), maximize=spec.maximize) if user is not None else None
        return claimed is not None and claimed > 1 + spec.tie

    waiting = [number for number in values if number not in {user, *compared, *heard, *out} and claims_more(number)]
    if not waiting:
        return rounds
    kept = [number for number in rounds.chosen if number == user or rounds.failure(number) is not None]
    return replace(rounds, chosen=(*kept, waiting[0]))
