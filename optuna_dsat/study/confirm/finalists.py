"""Choose the finalists, which are measured again alongside the user's config, and launch a finalist."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from optuna.trial import FrozenTrial

from optuna_dsat.cost.memory import ModelProfile
from optuna_dsat.guided.acquisition import expected_improvement, learnt_spread
from optuna_dsat.guided.joint_estimate import JointEstimate
from optuna_dsat.launch.follow import SlotWait, follow
from optuna_dsat.launch.measurement import GlobalStep, LaunchRecord, confidence_interval, input_variation, is_certain
from optuna_dsat.launch.protocol import Launcher, LaunchReport, LaunchRequest
from optuna_dsat.metrics import speed_up
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.events import Event
from optuna_dsat.study.confirm.rounds import MIN_ROUNDS, RoundLaunch, Rounds
from optuna_dsat.study.confirm.speeds import with_utilisation
from optuna_dsat.study.confirm.verdict import VerdictKind, are_alike, verdict_of
from optuna_dsat.study.requests import launch_request
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.trials import attributes

__all__ = [
    "choose_finalists",
    "confirmation_end",
    "confirmation_request",
    "confirmation_steps",
    "measure_again",
    "refuted",
    "round_launch",
    "with_next_best",
    "without_failed",
]

_STEP_TOLERANCE = 0.005
"""A finalist ends once the relative error of its step time is below this."""

_SHARE_OF_NOISE = 0.5
"""Or below this share of the standard deviation between equal launches: as the error is the half-width of a 95%
interval, further steps would reduce the variation between launches by 3% at most.
"""

_LONG_S, _FEWEST_LONG_STEPS = 3.0, 5
"""A finalist with long steps ends after this many seconds of counted steps, and at least this many steps: the variation
between launches is larger than the improvement by further steps.
"""

_USUAL_NOISE = 0.02
"""Assumed relative standard deviation between equal launches before any repetition: launches of this project's examples
differ by 1 or 2%.
"""

_SURE_SDS = 2.0
"""Standard deviations of the search's posterior by which a trial is surely worse than another."""

_LEAST_SD = 1e-9
"""Lower bound of the standard deviation of a log ratio, to avoid division by zero."""


def confirmation_steps(spec: StudySpec) -> int:
    """Return the default limit on counted steps of a confirmation: five times the steps of a trial, at least ten.

    A launch with long steps ends earlier; ``--adaptive-steps`` allows more while the step time is uncertain.
    """
    return max(10, 5 * _trial_steps(spec))


def _is_long(steps: Sequence[GlobalStep]) -> bool:
    """Return True if measuring more steps is not worth the time.

    False if inputs vary in size: finalists of equal batch size are then compared over the same data.
    """
    long = len(steps) >= _FEWEST_LONG_STEPS and sum(step.latency_s for step in steps) >= _LONG_S
    return long and not input_variation(steps)


def confirmation_end(spec: StudySpec) -> int:
    """Return the last step of a confirmation."""
    return spec.start_profile_step + max(confirmation_steps(spec), spec.adaptive_steps or 0) - 1


def _trial_steps(spec: StudySpec) -> int:
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
    that cannot be distinguished from the best measurement, by noise or ``--tie``. The best measurement follows, as a
    model may be wrong, then the next best. If the method has a posterior, it decides which trials cannot be
    distinguished from the best. Trials that are surely worse than a tie are then excluded, as are trials from which
    three rounds are expected to gain less than ``--min-gain`` per launch, with launches as long as at this smallest
    batch. The best trial at the user's global batch is added, for a speed-up between equal batches. A trial whose
    simplification was no slower than a tie is replaced by it.

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
    own = [] if baseline is None or not spec.confirm else [baseline.number]
    if not spec.confirm or not others:
        return own
    measured = attributes.best_trials(others, maximize=spec.maximize)
    batches = {
        candidate.number: attributes.train_batch_size(candidate, slots=spec.slots_per_trial) for candidate in candidates
    }
    best, sd = others[0].number, _USUAL_NOISE if noise is None else noise
    if estimate is None:
        margin = max(spec.tie, 2 * sd)
        value = abs(measured[0].values[0])
        equal = [trial.number for trial in measured if abs(abs(trial.values[0]) / value - 1) <= margin]
    else:
        equal, possible = (
            [trial.number for trial in others if not _is_below(trial.number, best, estimate, sds=sds, tie=spec.tie)]
            for sds in (1, _SURE_SDS)
        )
        equal = [number for number in equal if number == best or not are_alike(batches[number], batches[best])]
    rank = {trial.number: place for place, trial in enumerate(others)}
    smallest = min(equal, key=lambda number: (batches[number], rank[number]))
    more = others
    if estimate is not None:
        seconds = {trial.number: _launch_s(trial, spec) for trial in others}

        def is_worth_it(number: int) -> bool:
            launches = MIN_ROUNDS * max(1.0, seconds[number] / seconds[smallest])
            return _gain_of_rounds(number, best, estimate, noise=sd) >= launches * spec.options.min_gain

        more = [trial for trial in others if trial.number in possible and is_worth_it(trial.number)]
    places = [best, smallest, measured[0].number, *(trial.number for trial in more)]
    chosen = list(dict.fromkeys(places))[: spec.confirm]
    if baseline is not None and spec.confirm > 1:
        batch = attributes.train_batch_size(baseline, slots=spec.slots_per_trial)
        same = [trial.number for trial in measured if batches[trial.number] == batch]
        chosen += [number for number in same[:1] if not set(same) & set(chosen)]
    return [*chosen, *own]


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


def _is_below(number: int, best: int, estimate: JointEstimate, *, sds: float, tie: float) -> bool:
    """Whether a trial is worse than a tie with the best by ``sds`` standard deviations."""
    log_ratio, sd = estimate.log_ratio(number, best)
    return log_ratio + sds * sd < math.log1p(-tie)


def _launch_s(trial: FrozenTrial, spec: StudySpec) -> float:
    """Return the recorded duration of a trial's launch, in seconds; 1 if none was recorded."""
    step_s, overhead_s = attributes.step_and_overhead_s(trial) or (0.0, 1.0)
    return overhead_s + spec.end_profile_step * step_s


def _gain_of_rounds(number: int, best: int, estimate: JointEstimate, *, noise: float) -> float:
    """Return the expected gain of comparing a trial with the best trial, in the metric's logarithm.

    This is the expected improvement from learning their ratio in ``MIN_ROUNDS`` rounds of both with this noise.
    """
    log_ratio, sd = estimate.log_ratio(number, best)
    learnt = learnt_spread(np.array(max(sd, _LEAST_SD) ** 2), 2 * noise**2 / MIN_ROUNDS)
    return float(expected_improvement(np.array(log_ratio), learnt))


def confirmation_request(spec: StudySpec, trial: FrozenTrial, *, round_number: int) -> LaunchRequest:
    """Return the launch of a finalist in a round: alone, with more steps than a trial."""
    request = launch_request(
        spec,
        launch_id=f"confirm-{trial.number:04d}-round-{round_number}",
        purpose="confirm",
        overlay=trial.user_attrs[attributes.OVERLAY],
        config=trial.user_attrs[attributes.CONFIG],
        end_profile_step=confirmation_end(spec),
    )
    return request if request.timeout_s is None else replace(request, timeout_s=5 * request.timeout_s)


def measure_again(
    spec: StudySpec,
    request: LaunchRequest,
    *,
    launcher: Launcher,
    on_step: Callable[[GlobalStep], None],
    on_event: Callable[[Event], None] = lambda _: None,
    noise: float = 0.0,
    wait: SlotWait | None = None,
) -> tuple[LaunchRecord, LaunchReport]:
    """Launch a finalist until its step time is known; return the record of its ranks and the report.

    Args:
        spec: The study.
        request: Its launch.
        launcher: Where to launch.
        on_step: Called with each global step.
        on_event: Called with each event.
        noise: Relative standard deviation between launches; 0 if unknown. Limits the precision of the step time.
        wait: As for ``follow``.

    Raises:
        DeviceError: If other processes occupy the slots for longer than ``wait`` allows.
    """
    tolerance = max(_STEP_TOLERANCE, _SHARE_OF_NOISE * noise)

    def enough(steps: Sequence[GlobalStep]) -> bool:
        return is_certain(steps, tolerance=tolerance) or (spec.adaptive_steps is None and _is_long(steps))

    return follow(launcher, request, on_event, enough=enough, on_step=on_step, wait=wait)


def round_launch(
    record: LaunchRecord,
    report: LaunchReport,
    *,
    spec: StudySpec,
    number: int,
    round_number: int,
    metric: str,
    profile: ModelProfile,
    config: Mapping[str, Any],
) -> RoundLaunch:
    """Return a finalist's launch as stored; if the script's data ended early, the steps of a trial suffice."""
    short_of_data = report.outcome is Outcome.OUT_OF_DATA and len(record.counted) >= max(2, _trial_steps(spec))
    measured = report.outcome is Outcome.MEASURED or short_of_data
    flops = profile.flops_per_sample
    interval = (
        confidence_interval(record.counted, metric, flops_per_sample=flops, world_size=record.world_size)
        if measured
        else None
    )
    counted = record.metrics(flops_per_sample=flops) if measured else {}
    return RoundLaunch(
        round=round_number,
        number=number,
        value=None if interval is None else interval.value,
        low=None if interval is None else interval.low,
        high=None if interval is None else interval.high,
        metrics=with_utilisation(counted, profile=profile, config=config),
        steps=len(record.counted),
        outcome=report.outcome.value,
        message=report.message,
        held_s=report.held_s,
        conditions=report.conditions,
    )


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
    own = attributes.user_config_trial(trials)
    failed = [number for number in rounds.chosen if rounds.failure(number) is not None]
    if last not in failed or (own is not None and last == own.number) or len(failed) > spec.confirm:
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
    own = None if verdict.baseline is None else verdict.baseline.number
    out = refuted(rounds, trials, spec=spec)
    compared = {number for number in rounds.chosen if number != own}
    heard = {launch.number for launch in rounds.launches if launch.round >= rounds.since} - {own}
    if compared - out or len(heard | compared) >= 2 * spec.confirm:
        return rounds
    values = {candidate.number: float(candidate.values[0]) for candidate in candidates}

    def claims_more(number: int) -> bool:
        claimed = speed_up(values[number], values.get(own), maximize=spec.maximize) if own is not None else None
        return claimed is not None and claimed > 1 + spec.tie

    waiting = [number for number in values if number not in {own, *compared, *heard, *out} and claims_more(number)]
    if not waiting:
        return rounds
    kept = [number for number in rounds.chosen if number == own or rounds.failure(number) is not None]
    return replace(rounds, chosen=(*kept, waiting[0]))
