"""Explains why a study's winner beats the baseline (the user's own config), knob by knob.

A knob's contribution is the winner's metric divided by the metric with the user's value of this knob and the winner's
values of all others. It is measured if launches of the winner's structure differ in this knob only
(``optuna_dsat.report.explain.pairs``). Otherwise it is predicted by the models that guided search fits to all launches
of the study, for any search method. If the 95% interval of a prediction contains 1, no contribution is claimed: the
knob was not measured separately.

These contributions need not multiply to the measured speed-up. The interaction of the knobs is another factor,
from the fitted formula of the step time. The remainder covers the rest: knobs that were not measured separately,
launches that differ by more than their settings, as on a machine that became busy with other work, and model errors.
All factors multiply to the measured speed-up. A speed-up is not claimed if its factors contradict it (a remainder that
differs from 1 with 95% certainty, though every knob has a factor).

The winner's bottlenecks are its predicted step time by resource (``StepTimeModel.bounds``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from optuna.trial import FrozenTrial

from optuna_dsat.config.ds_config import GRADIENT_ACCUMULATION
from optuna_dsat.cost.gpus import utilisation
from optuna_dsat.cost.step_time import ERROR
from optuna_dsat.errors import UsageError
from optuna_dsat.guided.planner import GuidedPlanner
from optuna_dsat.metrics import LARGER_IS_BETTER, Z_975, Interval
from optuna_dsat.report.explain.pairs import Pairs
from optuna_dsat.study.confirm.measured import Measured
from optuna_dsat.study.confirm.rounds import Rounds
from optuna_dsat.study.confirm.words import how_known
from optuna_dsat.study.stored import StoredStudy
from optuna_dsat.trials import attributes
from optuna_dsat.trials.lineage import MICRO_BATCH, visible_params, without_batch
from optuna_dsat.words import bytes_in_words

TOGETHER, REMAINDER = "together", "remainder"
"""Sources of the two factors that belong to no single knob."""
NOT_SEPARATE = "not measured separately"
"""Reason for a missing factor: the launches do not show the knob's effect."""


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """The effect of a single knob, of all knobs together, or the remainder."""

    knob: str = ""
    user: Any = None
    """The user's value."""
    winner: Any = None
    factor: float | None = None
    """The winner's metric divided by the metric with the user's value, above 1 if the winner's value is better; None if
    the user's value would not run, or the launches do not show its effect.
    """
    low: float | None = None
    high: float | None = None
    """Ends of the 95% interval; None without ``factor``."""
    source: str
    """``measured`` or ``model``; ``together`` or ``remainder`` for factors of no single knob."""
    pairs: int = 0
    """Pairs of configurations that were compared; 0 if predicted."""
    note: str = ""
    """Reason for a missing factor; empty with a factor."""
    brings: tuple[str, ...] = ()
    """Other settings included in ``factor``: this setting switches them on or off."""

    @property
    def spread(self) -> float:
        """Standard deviation of the factor's logarithm, from its 95% interval; 0 without a factor."""
        return 0.0 if self.low is None or self.high is None else (math.log(self.high) - math.log(self.low)) / 2 / Z_975


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Explanation of the winner."""

    metric: str
    device: str
    """``cuda`` or ``cpu``."""
    winner: int
    """Number of the trial."""
    value: float
    """Its metric."""
    how_known: str = ""
    """Source of ``value`` as text: rounds or the search; empty if not stated."""
    is_own: bool
    """Whether the winner is the user's own config."""
    user_value: float | None
    """The metric of the user's own config; None if it was not measured."""
    metrics: Mapping[str, float]
    """All metrics of the winner, of the same launches as ``value``."""
    user_metrics: Mapping[str, float]
    """All metrics of the user's own config; empty if it was not measured."""
    speed_up: float | None
    """The measured ratio, above 1 if the winner is better; None if the user's own config was not measured."""
    contributions: tuple[Contribution, ...]
    """Contributions of the knobs in which the two configs differ, largest effect first."""
    together: Contribution | None
    """Interaction of the knobs beyond their separate effects; None with fewer than two factors, or if the formula does
    not apply.
    """
    remainder: Contribution | None
    """Part of ``speed_up`` that no other factor explains; None if there is nothing to explain."""
    bounds: Mapping[str, float]
    """compute, link, host, memory, overhead -> share of the winner's step; empty if the model does not apply."""
    peak_bytes: int | None
    """Measured peak of the worst rank; None if it was not measured."""
    device_bytes: int
    """Memory of a device."""
    utilisation: float | None
    """Share of the GPU's peak FLOPS; None for a GPU that is not in the table."""
    noise: float
    """Relative standard deviation between launches that the intervals assume."""
    is_noise_measured: bool
    """Whether ``noise`` was measured on repeated launches of a configuration; otherwise it is assumed."""

    @property
    def factors(self) -> tuple[Contribution, ...]:
        """All contributions with a factor; the factors multiply to ``speed_up``."""
        every = (*self.contributions, self.together, self.remainder)
        return tuple(part for part in every if part is not None and part.factor is not None)

    @property
    def explained(self) -> Contribution | None:
        """Product of all factors except the remainder; None without a remainder."""
        left = self.remainder
        return None if left is None else _product([factor for factor in self.factors if factor is not left])

    @property
    def contradicted(self) -> bool:
        """Whether the factors' product surely (95%) differs from ``speed_up``; a knob without one may explain all."""
        left = self.remainder
        if left is None or left.low is None or left.high is None:
            return False
        return all(part.factor is not None for part in self.contributions) and not left.low <= 1 <= left.high

    @property
    def bound(self) -> str | None:
        """Name of the largest entry of ``bounds``; None if empty."""
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
    """Return the explanation and the description of a study's winner; ``UsageError`` without measurement or profile."""
    explanation = explained(study)
    if explanation is None or study.best is None:
        raise UsageError(f"Nothing of the study {study.record.name!r} was measured: there is nothing to explain.")
    return explanation, study.best.words


def explained(study: StoredStudy) -> Explanation | None:
    """Return the explanation of a study's winner; None if nothing was measured, or its profile is gone."""
    if study.best is None or study.verdict is None:
        return None
    params, planner = study.best.trial.params, study.planner
    if GRADIENT_ACCUMULATION in params:  # searched at the user's global batch
        samples = params[MICRO_BATCH] * params[GRADIENT_ACCUMULATION]
        planner = study.planner_over(study.space.at_batch(samples) or study.space)
    if planner is None:
        return None
    explanation = explain(
        study.trials, planner=planner, winner=study.best, baseline=study.baseline, rounds=study.rounds
    )
    return replace(explanation, how_known=how_known(study.verdict))


def explain(
    trials: Sequence[FrozenTrial],
    *,
    planner: GuidedPlanner,
    winner: Measured,
    baseline: Measured | None,
    rounds: Rounds | None = None,
) -> Explanation:
    """Explain a study's winner."""
    larger = planner.problem.metric in LARGER_IS_BETTER
    user = {} if baseline is None else visible_params(baseline.trial)
    best = visible_params(winner.trial)
    pairs = Pairs(trials, rounds or Rounds(), maximize=larger, assumed_noise=planner.noise(trials))
    contributions = list(_contributions(trials, planner, pairs, winner=best, user=user))
    contributions.sort(key=lambda contribution: -abs(math.log(contribution.factor)) if contribution.factor else 0.0)
    together = _together(trials, planner, winner=best, user=user, contributions=contributions)
    ratio = None if baseline is None or winner.speed_up is None else _ratio(winner.speed_up, pairs)
    is_own = baseline is not None and baseline.trial.number == winner.trial.number
    searched = MICRO_BATCH in best  # the user's own config has no parameters if it is outside the space
    expected = planner.predict(trials, [_split(best)])[0] if searched else None
    seconds = {} if expected is None else dict(expected.bounds)
    total = sum(seconds.values())
    bounds = {name: part / total for name, part in seconds.items()} if total else {}
    reached = utilisation(planner.problem.profile, winner.trial.user_attrs.get(attributes.CONFIG) or {}, winner.metrics)
    return Explanation(
        metric=planner.problem.metric,
        device=planner.problem.hardware.device,
        winner=winner.trial.number,
        value=winner.value,
        is_own=is_own,
        user_value=None if baseline is None else baseline.value,
        metrics=winner.metrics,
        user_metrics={} if baseline is None else baseline.metrics,
        speed_up=None if ratio is None else ratio[0],
        contributions=tuple(contributions),
        together=together,
        remainder=None
        if ratio is None or is_own or not user
        else _remainder(*ratio, [*contributions, *([] if together is None else [together])]),
        bounds=bounds,
        peak_bytes=winner.trial.user_attrs.get(attributes.PEAK_BYTES),
        device_bytes=planner.problem.device_bytes,
        utilisation=reached,
        noise=pairs.noise,
        is_noise_measured=pairs.is_noise_measured,
    )


def _split(params: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    return without_batch(params), int(params[MICRO_BATCH])


def _reverted(planner: GuidedPlanner, winner: Mapping[str, Any], knob: str, value: Any) -> dict[str, Any]:
    """Return the winner with the user's value of a knob."""
    space, (knobs, size) = planner.problem.space, _split({**winner, knob: value})
    steps = space.accumulation(size)
    accumulated = {} if steps == space.searched_accumulation(size) else {GRADIENT_ACCUMULATION: steps}
    return {**space.completed(knobs), MICRO_BATCH: size, **accumulated}


def _contributions(
    trials: Sequence[FrozenTrial], planner: GuidedPlanner, pairs: Pairs, *, winner: dict[str, Any], user: dict[str, Any]
) -> Iterator[Contribution]:
    """Yield a contribution for each knob in which winner and user differ."""
    if MICRO_BATCH not in winner or not user:
        return
    before = planner.problem.space.completed(user) | {MICRO_BATCH: user.get(MICRO_BATCH)}
    for knob, value in winner.items():
        reverted = before.get(knob, value)
        if reverted == value or reverted is None:
            continue
        other = _reverted(planner, winner, knob, reverted)
        effect = pairs.effect(winner, other)
        if effect is None:
            contribution = _modelled(trials, planner, winner, other)
        else:
            contribution = _factor("measured", effect.mean, effect.half_width, pairs=effect.pairs)
        names = (winner.keys() | other.keys()) - {knob, GRADIENT_ACCUMULATION}
        brings = tuple(sorted(name for name in names if winner.get(name) != other.get(name)))
        yield replace(contribution, knob=knob, user=other.get(knob), winner=value, brings=brings)


def _modelled(
    trials: Sequence[FrozenTrial], planner: GuidedPlanner, winner: dict[str, Any], other: dict[str, Any]
) -> Contribution:
    here, there = planner.predict(trials, [_split(winner), _split(other)])
    unknown = Contribution(source="model", note="outside the search space")
    if here is None or there is None:
        return unknown
    if there.fits < 0.5 or there.peak_bytes > planner.problem.device_bytes:
        needs = f"{bytes_in_words(there.peak_bytes)} of {bytes_in_words(planner.problem.device_bytes)}"
        return replace(unknown, note=f"model: with it this micro-batch is not expected to fit ({needs})")
    mean, spread = planner.log_ratio(trials, _split(winner), _split(other))
    return replace(unknown, note=NOT_SEPARATE) if abs(mean) < Z_975 * spread else _factor("model", mean, Z_975 * spread)


def _together(
    trials: Sequence[FrozenTrial],
    planner: GuidedPlanner,
    *,
    winner: dict[str, Any],
    user: dict[str, Any],
    contributions: Sequence[Contribution],
) -> Contribution | None:
    """Return the knobs' interaction by the formula: its ratio of winner to user over the product of its knobs' ratios.

    The spread treats the formula's errors at these configurations as independent.
    """
    single = [contribution for contribution in contributions if contribution.factor is not None]
    if len(single) < 2 or len(single) < len(contributions):
        return None
    before = {**planner.problem.space.completed(user), MICRO_BATCH: user[MICRO_BATCH]}
    reverted = [_reverted(planner, winner, contribution.knob, contribution.user) for contribution in single]
    metrics = planner.formula(trials, [_split(params) for params in (winner, before, *reverted)])
    if metrics is None:
        return None
    sign = 1 if planner.problem.metric in LARGER_IS_BETTER else -1
    best, users, *others = (sign * math.log(value) for value in metrics)
    count = len(others)
    mean = sum(others) - (count - 1) * best - users
    spread = ERROR * math.sqrt(count + (count - 1) ** 2 + 1)
    return _factor(TOGETHER, mean, Z_975 * spread, note="interaction between them (model)")


def _ratio(speed_up: Interval, pairs: Pairs) -> tuple[float, float]:
    """Return (measured ratio, standard deviation of its logarithm); without an interval, by the noise of launches."""
    of_two_launches = pairs.quantile * pairs.noise * math.sqrt(2) / Z_975
    return speed_up.value, of_two_launches if math.isinf(speed_up.half_width) else speed_up.half_width / Z_975


def _remainder(ratio: float, spread: float, others: Sequence[Contribution]) -> Contribution:
    """Return the part of the measured ratio that the other factors do not explain."""
    explained = _product(others)
    mean = math.log(ratio) - math.log(explained.factor or 1.0)
    unclaimed = any(contribution.note == NOT_SEPARATE for contribution in others)
    note = "the settings that were not measured separately" if unclaimed else "none of the above explains it"
    return _factor(REMAINDER, mean, Z_975 * math.hypot(explained.spread, spread), note=note)


def _product(parts: Sequence[Contribution]) -> Contribution:
    """Return the product of factors. Spreads are added, because errors of shared launches are correlated."""
    known = [part for part in parts if part.factor is not None]
    mean = sum(math.log(contribution.factor) for contribution in known if contribution.factor is not None)
    return _factor("product", mean, Z_975 * sum(contribution.spread for contribution in known))


def _factor(source: str, mean: float, half_width: float, *, pairs: int = 0, note: str = "") -> Contribution:
    """Return a factor from the mean of its logarithm and half the width of its 95% interval, named by its source."""
    low, high = math.exp(mean - half_width), math.exp(mean + half_width)
    return Contribution(knob=source, factor=math.exp(mean), low=low, high=high, source=source, pairs=pairs, note=note)
