"""Why a study's winner wins: against the user's own config, knob by knob, and what would make it faster still.

A knob's contribution is the winner's metric over the metric with the user's value of this knob and the winner's values
of all others. Where launches of the winner's structure differ in this knob only, it is measured
(``optuna_dsat.report.explain.pairs``). Elsewhere it is predicted by the models that guided search fits to all launches
of the study, whatever method searched; a prediction whose 95% interval contains 1 is not claimed: the knob was not
measured separately.

Such contributions alone need not multiply to the measured speed-up. What knobs do together beyond what each does alone
is a factor, by the fitted formula of the step time. What is still missing is the remainder: knobs that were not
measured separately, launches that differ by more than their settings, as on a machine that others became busy on, and
errors of the models. All factors multiply to the measured speed-up. A speed-up that its factors contradict (a remainder
that is not 1 with 95% certainty, though every knob has a factor) is not claimed.

What bounds the winner is its predicted step by resource (``StepTimeModel.bounds``). What to change or buy next is the
same model evaluated with one thing changed (``optuna_dsat.report.explain.proposals``), so it holds as far as the model
does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from optuna.trial import FrozenTrial

from optuna_dsat.cost.step_time import ERROR
from optuna_dsat.cost.utilisation import utilisation
from optuna_dsat.errors import UsageError
from optuna_dsat.guided.planner import GuidedPlanner
from optuna_dsat.metrics import LARGER_IS_BETTER
from optuna_dsat.report.explain.pairs import Pairs
from optuna_dsat.report.explain.proposals import Situation, proposals
from optuna_dsat.study.confirm.rounds import Ratio, Rounds
from optuna_dsat.study.confirm.rows import configuration_of
from optuna_dsat.study.confirm.standing import Standing, compared, speed_up_over
from optuna_dsat.study.confirm.words import how_known
from optuna_dsat.study.stored import StoredStudy
from optuna_dsat.trials import attributes
from optuna_dsat.trials.lineage import MICRO_BATCH, visible_params
from optuna_dsat.words import bytes_in_words

__all__ = ["REMAINDER", "TOGETHER", "Contribution", "Explanation", "explain", "explain_study", "explained"]

TOGETHER, REMAINDER = "together", "remainder"
"""Sources of the two factors that belong to no single knob."""
NOT_SEPARATE = "not measured separately"
"""Why a knob has no factor of which the launches do not show the effect."""
_Z95 = 1.96
"""Standard deviations on either side that hold 95% of a normal distribution."""


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """The effect of one knob, or what no single knob explains."""

    knob: str
    user: Any
    """The user's value."""
    winner: Any
    factor: float | None
    """The winner's metric over that with the user's value, above 1 if the winner's is better; None if the user's value
    would not run, or the launches do not show its effect.
    """
    low: float | None
    high: float | None
    """Ends of the 95% interval; None without ``factor``."""
    source: str
    """``measured`` or ``model``; ``together`` or ``remainder`` for what no single knob explains."""
    pairs: int = 0
    """Pairs of configurations that were compared; 0 if predicted."""
    note: str = ""
    """Why there is no factor; empty if there is one."""
    brings: tuple[str, ...] = ()
    """Other settings in ``factor``: with this one they come to apply, or no longer do."""

    @property
    def spread(self) -> float:
        """Standard deviation of a normal distribution with this 95% interval of the logarithm; 0 without a factor."""
        return 0.0 if self.low is None or self.high is None else (math.log(self.high) - math.log(self.low)) / 2 / _Z95


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Why the winner wins."""

    metric: str
    device: str
    """``cuda`` or ``cpu``."""
    winner: int
    """Number of the trial."""
    value: float
    """Its metric."""
    how_known: str = "by the few steps of the search, not confirmed"
    """Whether ``value`` comes from rounds or from the search, in words."""
    is_own: bool
    """Whether it is the user's own config."""
    user_value: float | None
    """The metric of the user's own config; None if it was not measured."""
    metrics: Mapping[str, float]
    """All metrics of the winner, as the search measured it."""
    user_metrics: Mapping[str, float]
    """Those of the user's own config; empty if it was not measured."""
    speed_up: float | None
    """The measured ratio, above 1 if the winner is better; None if the user's own config was not measured."""
    contributions: tuple[Contribution, ...]
    """One for each knob in which the two differ, largest effect first."""
    together: Contribution | None
    """What the knobs do together beyond what each does alone; None with fewer than two factors, or where the formula
    does not reach.
    """
    remainder: Contribution | None
    """What of ``speed_up`` no other factor explains; None if there is nothing to explain."""
    bounds: Mapping[str, float]
    """compute, link, host, memory, overhead -> share of the winner's step; empty where the model does not reach."""
    peak_bytes: int | None
    """Measured peak of the worst rank; None if it was not measured."""
    device_bytes: int
    """Memory of one device."""
    utilisation: float | None
    """Share of the GPU's peak FLOPS; None for a GPU that is not in the table."""
    noise: float
    """Relative standard deviation from launch to launch that the intervals assume."""
    is_noise_measured: bool
    """Whether ``noise`` comes from configurations that were launched more than once; otherwise it is assumed."""
    proposals: tuple[str, ...]
    """What to change or buy next, largest gain first."""

    @property
    def factors(self) -> tuple[Contribution, ...]:
        """All that have a factor; these multiply to ``speed_up``."""
        every = (*self.contributions, self.together, self.remainder)
        return tuple(one for one in every if one is not None and one.factor is not None)

    @property
    def explained(self) -> Contribution | None:
        """The product of all factors but the remainder; None without a remainder."""
        return None if self.remainder is None else _product([one for one in self.factors if one is not self.remainder])

    @property
    def contradicted(self) -> bool:
        """Whether the factors contradict ``speed_up``: with 95% certainty they multiply to something else.

        A knob without a factor may explain any remainder.
        """
        left = self.remainder
        if left is None or left.low is None or left.high is None:
            return False
        return all(one.factor is not None for one in self.contributions) and not left.low <= 1 <= left.high

    @property
    def bound(self) -> str | None:
        """The largest of ``bounds``; None without any."""
        return max(self.bounds, key=lambda name: self.bounds[name], default=None)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        explained = self.explained
        return {
            **asdict(self),
            "explained": None if explained is None else explained.factor,
            "contradicted": self.contradicted,
            "bound": self.bound,
        }


def explain_study(study: StoredStudy) -> tuple[Explanation, str]:
    """Return why a study's winner wins, and its configuration in words.

    Raises:
        UsageError: If nothing of it was measured, or its profile is gone.
    """
    found = explained(study)
    if found is None or study.best is None:
        raise UsageError(f"Nothing of the study {study.record.name!r} was measured: there is nothing to explain.")
    return found, configuration_of(study.best.trial)


def explained(study: StoredStudy) -> Explanation | None:
    """Return why a study's winner wins; None if nothing of it was measured, or its profile is gone."""
    if study.best is None or study.planner is None:
        return None
    found = explain(
        study.trials,
        planner=study.planner,
        winner=study.best,
        baseline=study.baseline,
        paired=study.paired_ratio(study.best),
        rounds=study.rounds,
    )
    if study.verdict is None:
        return found
    return replace(
        found,
        user_value=study.verdict.user_value,
        how_known=how_known(study.verdict),
        utilisation=_utilisation(study.planner, study.best, study.metrics_of(study.best)),
    )


def explain(
    trials: Sequence[FrozenTrial],
    *,
    planner: GuidedPlanner,
    winner: Standing,
    baseline: Standing | None,
    paired: Ratio | None = None,
    rounds: Rounds | None = None,
) -> Explanation:
    """Explain a study's winner.

    Args:
        trials: The study's trials.
        planner: The guided planner of the study's space.
        winner: The winning trial.
        baseline: The user's own config; None if it was not measured.
        paired: The ratio of the two in rounds that measured both; None if there are none.
        rounds: The confirmation; None if there is none.
    """
    larger = planner.problem.metric in LARGER_IS_BETTER
    user = {} if baseline is None else visible_params(baseline.trial)
    best = visible_params(winner.trial)
    pairs = Pairs(trials, rounds or Rounds(), maximize=larger, assumed_noise=planner.noise(trials))
    found = list(_contributions(trials, planner, pairs, winner=best, user=user))
    found.sort(key=lambda one: -abs(math.log(one.factor)) if one.factor else 0.0)
    together = _together(trials, planner, winner=best, user=user, found=found)
    ratio = None if baseline is None else _ratio(baseline, winner, paired, pairs, maximize=larger)
    own = baseline is not None and baseline.trial.number == winner.trial.number
    searched = MICRO_BATCH in best  # the user's own config has no parameters where it lies outside the space
    expected = planner.predict(trials, [_split(best)])[0] if searched else None
    seconds = {} if expected is None else dict(expected.bounds)
    total = sum(seconds.values())
    bounds = {name: part / total for name, part in seconds.items()} if total else {}
    metrics = winner.trial.user_attrs.get(attributes.METRICS) or {}
    reached = _utilisation(planner, winner, metrics)
    now = Situation(planner=planner, trials=trials, winner=winner.trial, bounds=bounds, utilisation=reached)
    return Explanation(
        metric=planner.problem.metric,
        device=planner.problem.hardware.device,
        winner=winner.trial.number,
        value=winner.value,
        is_own=own,
        user_value=None if baseline is None else compared(baseline, winner)[0],
        metrics=metrics,
        user_metrics={} if baseline is None else baseline.trial.user_attrs.get(attributes.METRICS) or {},
        speed_up=None if ratio is None else ratio[0],
        contributions=tuple(found),
        together=together,
        remainder=None
        if ratio is None or own
        else _remainder(*ratio, [*found, *([] if together is None else [together])]),
        bounds=bounds,
        peak_bytes=winner.trial.user_attrs.get(attributes.PEAK_BYTES),
        device_bytes=planner.problem.device_bytes,
        utilisation=reached,
        noise=pairs.noise,
        is_noise_measured=pairs.is_noise_measured,
        proposals=tuple(proposals(now)) if searched else (),
    )


def _utilisation(planner: GuidedPlanner, standing: Standing, metrics: Mapping[str, float]) -> float | None:
    return utilisation(planner.problem.profile, standing.trial.user_attrs.get(attributes.CONFIG) or {}, metrics)


def _split(params: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    knobs = {name: value for name, value in params.items() if name != MICRO_BATCH}
    return knobs, int(params[MICRO_BATCH])


def _reverted(planner: GuidedPlanner, winner: Mapping[str, Any], knob: str, own: Any) -> dict[str, Any]:
    """Return the winner with the user's value of one knob."""
    knobs, size = _split({**winner, knob: own})
    return {**planner.problem.space.completed(knobs), MICRO_BATCH: size}


def _contributions(
    trials: Sequence[FrozenTrial], planner: GuidedPlanner, pairs: Pairs, *, winner: dict[str, Any], user: dict[str, Any]
) -> Iterator[Contribution]:
    """Yield one contribution for each knob in which winner and user differ."""
    if MICRO_BATCH not in winner or not user:
        return
    before = planner.problem.space.completed(user) | {MICRO_BATCH: user.get(MICRO_BATCH)}
    for knob, value in winner.items():
        own = before.get(knob, value)
        if own == value or own is None:
            continue
        other = _reverted(planner, winner, knob, own)
        found = _measured(pairs, winner, other) or _modelled(trials, planner, knob, winner, other)
        brought = (name for name in sorted(_differing(winner, other)) if name != knob)
        yield replace(found, brings=tuple(brought))


def _measured(pairs: Pairs, winner: dict[str, Any], other: dict[str, Any]) -> Contribution | None:
    """Return the measured effect of the settings in which winner and other differ; None if no launches show it."""
    effect = pairs.effect(winner, other)
    if effect is None:
        return None
    knob = _named(winner, other, _differing(winner, other))
    return Contribution(
        knob=knob,
        user=other.get(knob),
        winner=winner.get(knob),
        factor=math.exp(effect.mean),
        low=math.exp(effect.mean - effect.half_width),
        high=math.exp(effect.mean + effect.half_width),
        source="measured",
        pairs=effect.pairs,
    )


def _differing(winner: Mapping[str, Any], other: Mapping[str, Any]) -> set[str]:
    return {name for name in winner.keys() | other.keys() if winner.get(name) != other.get(name)}


def _named(winner: Mapping[str, Any], other: Mapping[str, Any], differing: set[str]) -> str:
    """Return the knob that was changed; others that differ follow from it: they apply to one side only."""
    return next(name for name in winner if name in differing and name in other)


def _modelled(
    trials: Sequence[FrozenTrial], planner: GuidedPlanner, knob: str, winner: dict[str, Any], other: dict[str, Any]
) -> Contribution:
    here, there = planner.predict(trials, [_split(winner), _split(other)])
    unknown = Contribution(
        knob=knob,
        user=other.get(knob),
        winner=winner.get(knob),
        factor=None,
        low=None,
        high=None,
        source="model",
        note="outside the search space",
    )
    if here is None or there is None:
        return unknown
    if there.fits < 0.5 or there.peak_bytes > planner.problem.device_bytes:
        needs = f"{bytes_in_words(there.peak_bytes)} of {bytes_in_words(planner.problem.device_bytes)}"
        return replace(unknown, note=f"model: with it this micro-batch is not expected to fit ({needs})")
    mean, spread = planner.log_ratio(trials, _split(winner), _split(other))
    if abs(mean) < _Z95 * spread:
        return replace(unknown, note=NOT_SEPARATE)
    return Contribution(
        knob=knob,
        user=other.get(knob),
        winner=winner.get(knob),
        factor=math.exp(mean),
        low=math.exp(mean - _Z95 * spread),
        high=math.exp(mean + _Z95 * spread),
        source="model",
    )


def _together(
    trials: Sequence[FrozenTrial],
    planner: GuidedPlanner,
    *,
    winner: dict[str, Any],
    user: dict[str, Any],
    found: Sequence[Contribution],
) -> Contribution | None:
    """Return what the knobs do together, by the formula: its ratio of winner to user over its ratios knob by knob.

    Its spread takes the formula's errors at all these configurations as independent.
    """
    single = [one for one in found if one.factor is not None]
    if len(single) < 2 or len(single) < len(found):
        return None
    before = {**planner.problem.space.completed(user), MICRO_BATCH: user[MICRO_BATCH]}
    reverted = [_reverted(planner, winner, one.knob, one.user) for one in single]
    metrics = planner.formula(trials, [_split(params) for params in (winner, before, *reverted)])
    if metrics is None:
        return None
    sign = 1 if planner.problem.metric in LARGER_IS_BETTER else -1
    best, own, *others = (sign * math.log(value) for value in metrics)
    count = len(others)
    mean = sum(others) - (count - 1) * best - own
    spread = ERROR * math.sqrt(count + (count - 1) ** 2 + 1)
    return _factor(TOGETHER, mean, spread, note="what they do together beyond each alone (model)")


def _ratio(
    baseline: Standing, winner: Standing, paired: Ratio | None, pairs: Pairs, *, maximize: bool
) -> tuple[float, float] | None:
    """Return the measured ratio with the standard deviation of its logarithm; None if either metric is 0."""
    of_two_launches = pairs.quantile * pairs.noise * math.sqrt(2) / _Z95
    if paired is not None:
        return paired.value, of_two_launches if math.isinf(paired.half_width) else paired.half_width / _Z95
    value = speed_up_over(baseline, winner, maximize=maximize)
    ends = (baseline.low, baseline.high, winner.low, winner.high)
    if value is None or None in ends:
        return None if value is None else (value, of_two_launches)
    low, high, best_low, best_high = (math.log(end) for end in ends if end is not None)
    return value, math.hypot(high - low, best_high - best_low) / 2 / _Z95


def _remainder(ratio: float, spread: float, others: Sequence[Contribution]) -> Contribution:
    """Return what of the measured ratio the other factors do not explain."""
    explained = _product(others)
    mean = math.log(ratio) - math.log(explained.factor or 1.0)
    unclaimed = any(one.note == NOT_SEPARATE for one in others)
    note = "the settings that were not measured separately" if unclaimed else "none of the above explains it"
    return _factor(REMAINDER, mean, math.hypot(explained.spread, spread), note=note)


def _product(parts: Sequence[Contribution]) -> Contribution:
    """Return the product of factors; launches that several of them share may err in all, so their spreads add up."""
    known = [one for one in parts if one.factor is not None]
    mean = sum(math.log(one.factor) for one in known if one.factor is not None)
    return _factor("product", mean, sum(one.spread for one in known))


def _factor(source: str, mean: float, spread: float, *, note: str = "") -> Contribution:
    """Return a factor that belongs to no knob, by mean and standard deviation of its logarithm."""
    return Contribution(
        knob=source,
        user=None,
        winner=None,
        factor=math.exp(mean),
        low=math.exp(mean - _Z95 * spread),
        high=math.exp(mean + _Z95 * spread),
        source=source,
        note=note,
    )
