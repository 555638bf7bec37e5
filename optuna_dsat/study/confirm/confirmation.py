"""Confirmation in rounds: finalists and the user's config are launched again until their ratio is known.

The next launch and the end depend only on the stored rounds, so any worker can resume the study.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from optuna.trial import FrozenTrial

from optuna_dsat.guided.joint_estimate import JointEstimate
from optuna_dsat.launch.follow import follow
from optuna_dsat.launch.measurement import GlobalStep, LaunchRecord, confidence_interval, input_variation, is_certain
from optuna_dsat.launch.protocol import LaunchReport
from optuna_dsat.metrics import Z_975
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.events import Event
from optuna_dsat.study.confirm.finalists import (
    USUAL_NOISE,
    choose_finalists,
    confirmation_end,
    refuted,
    trial_steps,
    with_next_best,
    without_failed,
)
from optuna_dsat.study.confirm.measured import Measured
from optuna_dsat.study.confirm.rounds import (
    MIN_ROUNDS,
    Noise,
    RoundLaunch,
    Rounds,
    is_precise,
    order_of_round,
    paired_ratio,
    precision_of,
)
from optuna_dsat.study.confirm.speeds import speed_of, with_efficiency
from optuna_dsat.study.confirm.verdict import Verdict, VerdictKind, noise_in_rounds, verdict_of
from optuna_dsat.study.context import SearchContext
from optuna_dsat.study.progress import FinalistMeasured, FinalistStarted
from optuna_dsat.study.requests import launch_request
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.trials import attributes

SEARCH_SHARE = 0.25
"""Share of the search's device time for rounds beyond the first few, unless ``--confirm-time`` allows more.

The full device time, and at least ``_ROUNDS_TO_TELL`` rounds, if only the small number of rounds leaves it open whether
the best is faster than the user's config.
"""
_ROUNDS_TO_TELL = 2 * MIN_ROUNDS
"""Number of rounds that is no longer small: the factor on the standard error is then 2.6, after 3 rounds 4.3."""
_LIKELY = 1.0
"""Standard errors by which a config must be faster in the rounds so far for more of them."""
_MOST_ROUNDS = 100
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

_FEWEST_DEGREES = 3
"""Degrees of freedom from which the noise of the rounds sets the required precision of a launch's step time."""


class Confirmation:
    """Measures the finalists of a study again, in rounds, and stores each launch with the study at once.

    ``storing`` returns a context for storing the named item; it raises if another worker has taken over.
    """

    def __init__(self, context: SearchContext, *, storing: Callable[[str], AbstractContextManager[None]]) -> None:
        self._context = context
        self._spec = context.spec
        self._profile = context.profiled.profile
        self._storing = storing
        self.interrupted = False
        """Whether Ctrl-C ended it."""

    def run(self, trials: Sequence[FrozenTrial], candidates: Sequence[FrozenTrial]) -> Rounds:
        """Launch rounds until the speed-up is known or the time is spent.

        A finalist that fails with more steps is replaced by the next best trial, at most ``--confirm`` times. If no
        finalist is better than the user's config, the next best trial with a better measurement is added
        (``study/confirm/finalists.py``). After an interruption the rounds so far are returned.
        """
        by_number = {trial.number: trial for trial in candidates}
        rounds = self._begun(trials, candidates)
        launches = self._context.store.launches(self._context.study_uuid)
        allowed_s = SEARCH_SHARE * sum(row.report.held_s for row in launches if row.purpose != "confirm")
        try:
            while True:
                rounds, turn = self._next(rounds, trials, candidates, allowed_s=allowed_s)
                if turn is None:
                    break
                noise = self._noise(rounds, trials)
                rounds = self._with_estimate(rounds, trials)
                launch, record, report = self._launch(
                    by_number[turn[1]], round_number=turn[0], noise=noise or 0.0, rounds=rounds
                )
                rounds = without_failed(rounds.with_launch(launch), trials, candidates, spec=self._spec)
                with self._storing("store a launch of the confirmation"):
                    self._context.record_launch(report, record, purpose="confirm", trial_number=launch.number)
                    self._context.study.set_user_attr(attributes.CONFIRMATION, rounds.to_json())
                self._announce(launch, by_number[launch.number])
        except KeyboardInterrupt:
            self.interrupted = True
        return rounds

    def _begun(self, trials: Sequence[FrozenTrial], candidates: Sequence[FrozenTrial]) -> Rounds:
        """Return the stored rounds; choose finalists again if more trials were measured."""
        rounds = Rounds.of(self._context.study.user_attrs)
        if (rounds.chosen and rounds.measured == len(candidates)) or not self._spec.confirm:
            return rounds
        noise = self._noise(rounds, trials)
        out = refuted(rounds, trials, spec=self._spec)
        joint = self._estimate(trials, [candidate.number for candidate in candidates])
        numbers = choose_finalists(trials, candidates, spec=self._spec, noise=noise, estimate=joint, out=out)
        estimate = None if joint is None else joint.among(_compared(numbers, rounds))
        return replace(
            rounds, chosen=tuple(numbers), measured=len(candidates), since=rounds.last + 1, estimate=estimate
        )

    def _with_estimate(self, rounds: Rounds, trials: Sequence[FrozenTrial]) -> Rounds:
        """Return the rounds with the search's estimate of the compared trials, including later additions."""
        if rounds.estimate is not None and set(rounds.chosen) <= set(rounds.estimate.numbers):
            return rounds
        numbers = _compared(rounds.chosen, rounds)
        return replace(rounds, estimate=self._estimate(trials, numbers))

    def _next(
        self, rounds: Rounds, trials: Sequence[FrozenTrial], candidates: Sequence[FrozenTrial], *, allowed_s: float
    ) -> tuple[Rounds, tuple[int, int] | None]:
        """Return the rounds, possibly with another finalist, and their next launch; None if no launch is needed."""
        noise = self._context.method.noise(trials)
        turn = next_in_rounds(rounds, trials, spec=self._spec, allowed_s=allowed_s, noise=noise)
        if turn is not None:
            return rounds, turn
        more = with_next_best(rounds, trials, candidates, spec=self._spec)
        if more == rounds:
            return rounds, None
        words = "None of the finalists is better than your config; the next best of the search is measured."
        self._context.say(words)
        return more, next_in_rounds(more, trials, spec=self._spec, allowed_s=allowed_s, noise=noise)

    def _estimate(self, trials: Sequence[FrozenTrial], numbers: Sequence[int]) -> JointEstimate | None:
        return self._context.method.estimate(trials, numbers, maximize=self._spec.maximize)

    def _noise(self, rounds: Rounds, trials: Sequence[FrozenTrial]) -> float | None:
        """Return the relative standard deviation between launches, by the search before there are enough rounds."""
        noise = noise_in_rounds(trials, rounds, self._spec)
        if noise is None or noise.degrees < _FEWEST_DEGREES:
            return self._context.method.noise(trials)
        return noise.relative_sd

    def _launch(
        self, trial: FrozenTrial, *, round_number: int, noise: float, rounds: Rounds
    ) -> tuple[RoundLaunch, LaunchRecord, LaunchReport]:
        request = launch_request(
            self._spec,
            launch_id=f"confirm-{trial.number:04d}-round-{round_number}",
            purpose="confirm",
            overlay=trial.user_attrs[attributes.OVERLAY],
            config=trial.user_attrs[attributes.CONFIG],
            end_profile_step=confirmation_end(self._spec),
            profiled=self._context.profiled,
        )
        if request.timeout_s is not None:
            request = replace(request, timeout_s=5 * request.timeout_s)
        words, done = trial.user_attrs[attributes.CONFIGURATION], len(rounds.launches)
        least = MIN_ROUNDS * sum(rounds.failure(number) is None for number in rounds.chosen)
        self._context.observer(
            FinalistStarted(
                number=trial.number,
                words=words,
                end_profile_step=request.end_profile_step,
                round=round_number,
                launches=max(least, done + 1),
                done=done,
            )
        )
        tolerance, times = max(_STEP_TOLERANCE, _SHARE_OF_NOISE * noise), list[float]()

        def show(event: Event) -> None:
            times.append(event.time)
            self._context.show_phase(event, trial.number)

        def is_enough(steps: Sequence[GlobalStep]) -> bool:
            if is_certain(steps, tolerance=tolerance):
                return True
            if input_variation(steps) or len(steps) < trial_steps(self._spec):
                return False
            steps_s = sum(step.latency_s for step in steps)
            if len(steps) >= _FEWEST_LONG_STEPS and steps_s >= _LONG_S:
                return True
            fixed_s = max(times) - min(times) - steps_s
            return len(steps) >= steps_worth_their_time(steps, noise=noise, fixed_s=fixed_s)

        record, report = follow(
            self._context.launcher,
            request,
            show,
            enough=is_enough,
            on_step=lambda step: self._context.show_step(step, trial.number, peak_bytes=step.peak_allocated_bytes),
            wait=self._context.wait,
        )
        launch = self._round_launch(trial, record, report, round_number=round_number)
        return launch, record, report

    def _round_launch(
        self, trial: FrozenTrial, record: LaunchRecord, report: LaunchReport, *, round_number: int
    ) -> RoundLaunch:
        """Return a finalist's launch as stored; if the script's data ended early, the steps of a trial suffice."""
        enough = len(record.counted) >= max(2, trial_steps(self._spec))
        measured = report.outcome is Outcome.MEASURED or (report.outcome is Outcome.OUT_OF_DATA and enough)
        flops, interval, metrics = self._profile.flops_per_sample, None, dict[str, float]()
        if measured:
            interval = confidence_interval(
                record.counted, self._context.metric, flops_per_sample=flops, world_size=record.flops_ranks
            )
            metrics = record.metrics(flops_per_sample=flops)
        return RoundLaunch(
            round=round_number,
            number=trial.number,
            value=None if interval is None else interval.value,
            low=None if interval is None else interval.low,
            high=None if interval is None else interval.high,
            metrics=with_efficiency(
                metrics,
                profile=self._profile,
                config=trial.user_attrs[attributes.CONFIG],
                power_w=report.conditions.power_w,
            ),
            steps=len(record.counted),
            sample_size=sum(step.elements for step in record.counted) / sum(step.samples for step in record.counted)
            if measured and record.input_variation
            else None,
            script_values=self._context.profiled.values_at_batch(record.engine),
            outcome=report.outcome.value,
            message=report.message,
            held_s=report.held_s,
            conditions=report.conditions,
        )

    def _announce(self, launch: RoundLaunch, trial: FrozenTrial) -> None:
        self._context.observer(
            FinalistMeasured(
                number=launch.number,
                words=trial.user_attrs[attributes.CONFIGURATION],
                value=launch.value,
                low=launch.low,
                high=launch.high,
                message=launch.message,
                round=launch.round,
                speed=None
                if launch.value is None
                else speed_of(launch.metrics, launch.value, metric=self._context.metric, device=self._spec.device),
            )
        )


def steps_worth_their_time(steps: Sequence[GlobalStep], *, noise: float, fixed_s: float) -> float:
    """Return the number of counted steps of a launch after which another launch tells more in the same time.

    The mean step time of a launch has the variance v + u / n: that between launches and that of its n steps, of t
    seconds each. It takes f + n t seconds. A total time tells most at n = sqrt(u f / (v t)): Cochran, Sampling
    Techniques, 3rd edition 1977, section 10.6. Known error: the noise of the rounds includes u / n, which makes n
    smaller where launches hardly differ.

    Args:
        steps: Counted steps; a single step tells nothing of the variance between steps, and another one follows.
        noise: Relative standard deviation between launches; 0 if unknown.
        fixed_s: Seconds of the launch besides its counted steps.
    """
    if len(steps) < 2:
        return math.inf
    times = [step.latency_s for step in steps]
    mean = statistics.fmean(times)
    return statistics.stdev(times) / mean / (noise or USUAL_NOISE) * math.sqrt(max(fixed_s, 0.0) / mean)


def _compared(chosen: Sequence[int], rounds: Rounds) -> list[int]:
    """Return the compared trials: the chosen trials and all trials measured in rounds."""
    return sorted({*chosen, *rounds.values()})


def next_in_rounds(
    rounds: Rounds, trials: Sequence[FrozenTrial], *, spec: StudySpec, allowed_s: float, noise: float | None = None
) -> tuple[int, int] | None:
    """Return the round and the trial of the next launch; None if no launch is needed.

    ``allowed_s`` limits the device seconds of rounds beyond the first few, without ``--confirm-time`` and unless the
    best is probably faster than the user's config. ``noise`` is the relative standard deviation between
    launches of the search; None if its method does not know.
    """
    if not rounds.chosen or (spec.confirm_time is not None and rounds.spent_s >= spec.confirm_time):
        return None
    for number in range(max(rounds.since, rounds.last), _MOST_ROUNDS + 1):
        before = replace(rounds, launches=tuple(launch for launch in rounds.launches if launch.round < number))
        numbers = staying(before, trials, spec=spec)
        if number > rounds.last and _is_enough(before, numbers, trials, spec=spec, allowed_s=allowed_s, noise=noise):
            return None
        begun = rounds.begun(number)
        left = [
            item for item in order_of_round(numbers, round_number=number, seed=spec.random_seed) if item not in begun
        ]
        left = [item for item in left if rounds.failure(item) is None]
        if left:
            return number, left[0]
    return None


def staying(rounds: Rounds, trials: Sequence[FrozenTrial], *, spec: StudySpec) -> list[int]:
    """Return the trials of the next round: without trials that failed or are clearly worse than the best.

    The user's config always stays, and with ``--batch both`` the best at its global batch. Another trial is dropped
    after three rounds if its whole interval is below a tie with the best. Once one of the two answers is known, only
    the trials of the other stay.
    """
    present = [number for number in rounds.chosen if rounds.failure(number) is None]
    verdict, values = verdict_of(trials, rounds, spec), rounds.values()
    if verdict is None or verdict.rounds < MIN_ROUNDS or verdict.best.number not in values:
        return present
    best, baseline = verdict.best.number, None if verdict.baseline is None else verdict.baseline.number
    same = verdict.at_user_batch.number if spec.batch == "both" and verdict.at_user_batch else baseline

    def is_worse(number: int) -> bool:
        ratio = paired_ratio(values.get(number, {}), values[best], maximize=spec.maximize, noise=verdict.noise)
        return ratio is not None and ratio.rounds >= MIN_ROUNDS and ratio.surely_below(1 - spec.tie)

    numbers = [number for number in present if number in (baseline, same) or not is_worse(number)]
    unknown = _unknown(verdict, rounds, spec=spec)
    if not unknown or same in (baseline, best, verdict.result.number):
        return numbers
    if unknown == [same]:
        return [number for number in numbers if number in (baseline, same)]
    return [number for number in numbers if number != same or same in unknown]


def _is_enough(
    rounds: Rounds,
    numbers: Sequence[int],
    trials: Sequence[FrozenTrial],
    *,
    spec: StudySpec,
    allowed_s: float,
    noise: float | None,
) -> bool:
    """Whether no further round is needed, or none is allowed."""
    values = rounds.values()
    fewest = min((len(values.get(number, {})) for number in numbers), default=0)
    if fewest < MIN_ROUNDS - 1:
        return not numbers
    verdict = verdict_of(trials, rounds, spec)
    if fewest < MIN_ROUNDS:
        return _is_known_by_two(verdict, noise) and is_known(verdict, rounds, spec=spec)
    late = spec.confirm_time is None and rounds.spent_s >= allowed_s
    if late and _is_likely(verdict, rounds, spec=spec):
        late = rounds.last >= _ROUNDS_TO_TELL and rounds.spent_s >= allowed_s / SEARCH_SHARE
    return late or is_known(verdict, rounds, spec=spec)


def _is_known_by_two(verdict: Verdict | None, noise: float | None) -> bool:
    """Whether two rounds of launches of this noise, relative and by the search, are likely to tell a winner's speed-up.

    The rounds' own noise may be small by chance.
    """
    if noise is None or verdict is None or verdict.kind is not VerdictKind.WINNER or verdict.result.speed_up is None:
        return False
    return 1.96 * noise <= precision_of(verdict.result.speed_up.value)


def _is_likely(verdict: Verdict | None, rounds: Rounds, *, spec: StudySpec) -> bool:
    """Whether a config that is not selected is probably faster than the user's: more rounds may confirm it."""
    if verdict is None or verdict.baseline is None or verdict.noise is None:
        return False
    left = [verdict.best] if verdict.kind is VerdictKind.NOT_CONFIRMED else []
    if spec.batch == "both" and verdict.same_batch is not None and verdict.same_batch.is_user_config:
        left += [] if verdict.at_user_batch is None else [verdict.at_user_batch]
    return any(_is_likely_faster(item, verdict.baseline.number, verdict.noise, rounds) for item in left)


def _is_likely_faster(measured: Measured, baseline: int, noise: Noise, rounds: Rounds) -> bool:
    ratio = measured.speed_up
    if ratio is None or not ratio.rounds:
        return False
    data_sd = rounds.data_error(measured.number, baseline) / Z_975
    return math.log(ratio.value) > _LIKELY * math.hypot(noise.relative_sd * math.sqrt(2 / ratio.rounds), data_sd)


def is_known(verdict: Verdict | None, rounds: Rounds, *, spec: StudySpec) -> bool:
    """Whether the speed-ups of the best finalist and of the currently selected config are known.

    With ``--batch both``, the speed-up at the user's global batch as well. The data of their steps stay unknown, since
    further rounds have the same (``Rounds.data_error``).

    Stopping once an interval is narrow makes it slightly too narrow: in simulations, 90 to 95 of 100 intervals cover
    the true value (tests/study/test_paired.py).
    """
    return verdict is None or not _unknown(verdict, rounds, spec=spec)


def _unknown(verdict: Verdict, rounds: Rounds, *, spec: StudySpec) -> list[int]:
    """Return the trials whose speed-ups are still to be known."""
    if verdict.baseline is None:
        return []
    finalists = [
        contender
        for contender in verdict.contenders
        if contender.number != verdict.baseline.number and not contender.left
    ]
    numbers = [finalist.number for finalist in finalists[:1]]
    numbers += [finalist.number for finalist in finalists if finalist.number == verdict.result.number]
    if spec.batch == "both" and verdict.at_user_batch is not None and not verdict.at_user_batch.is_user_config:
        numbers.append(verdict.at_user_batch.number)
    values, noise = rounds.values(), verdict.noise
    baseline = values.get(verdict.baseline.number, {})

    def is_unknown(number: int) -> bool:
        ratio = paired_ratio(values.get(number, {}), baseline, maximize=spec.maximize, noise=noise)
        return ratio is not None and not ratio.surely_below(1) and not is_precise(ratio)

    return [number for number in dict.fromkeys(numbers) if is_unknown(number)]
