"""The rounds of a confirmation as they are stored with the study, and what is launched next in them.

In each round the user's config and the finalists are launched once, in an order drawn anew. All follows from what is
stored, so that whoever resumes the study goes on with the round that was begun.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from optuna_dsat.launch.protocol import Conditions
from optuna_dsat.metrics import student_t_975
from optuna_dsat.outcome import Outcome
from optuna_dsat.trials import attributes

__all__ = [
    "MIN_ROUNDS",
    "PRECISION",
    "JointEstimate",
    "Noise",
    "Ratio",
    "RoundLaunch",
    "Rounds",
    "is_precise",
    "mean_in_rounds",
    "noise_of_search",
    "order_of_round",
    "paired_ratio",
    "pooled_noise",
]

# What the search and the rounds together say of the finalists.
#
# Three rounds tell finalists apart by no better than the noise; a method with a posterior knows of each what all
# launches of its search say of it, neighbours included. Both count by how sure they are.

_LEAST_NOISE = 1e-3
"""Relative standard deviation that launches of one configuration differ by at least: few rounds may agree by chance."""


@dataclass(frozen=True, kw_only=True)
class JointEstimate:
    """Normal distribution of n trials' log objectives, without noise: logarithms of the metric, larger is better."""

    numbers: tuple[int, ...]
    """Numbers of the trials."""
    means: tuple[float, ...]
    """Shape (n,)."""
    covariance: tuple[tuple[float, ...], ...]
    """Shape (n, n)."""

    def __post_init__(self) -> None:
        count = len(self.numbers)
        if len(self.means) != count or [len(row) for row in self.covariance] != [count] * count:
            raise ValueError(f"an estimate of {count} trials has {count} means and {count} x {count} covariances")
        if not all(map(math.isfinite, [*self.means, *(one for row in self.covariance for one in row)])):
            raise ValueError("means and covariances are finite numbers")

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> JointEstimate:
        """Build from the output of ``to_json``.

        Raises:
            ValueError: If shapes do not agree, or a number is not finite.
        """
        return cls(
            numbers=tuple(map(int, record["numbers"])),
            means=tuple(map(float, record["means"])),
            covariance=tuple(tuple(map(float, row)) for row in record["covariance"]),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the input of ``from_json``."""
        return asdict(self)

    def given(self, values: Mapping[int, Mapping[int, float]], *, noise: float, maximize: bool) -> JointEstimate:
        """Return the distribution given launches in rounds; what all launches of a round have in common is unknown.

        Bayesian linear regression (Bishop 2006, section 3.3) with a flat prior on each round's effect.

        Args:
            values: Trial -> round -> metric; of other trials than these nothing is learnt.
            noise: Relative standard deviation from launch to launch.
            maximize: Whether a larger metric is better.
        """
        count, variance = len(self.numbers), max(noise, _LEAST_NOISE) ** 2
        precision, weighted = np.zeros((count, count)), np.zeros(count)
        for one in {one for number in self.numbers for one in values.get(number, {})}:
            ran = np.array([one in values.get(number, {}) for number in self.numbers])
            logs = np.array([math.log(values[number][one]) for number in np.array(self.numbers)[ran]])
            precision[np.ix_(ran, ran)] += (np.eye(len(logs)) - 1 / len(logs)) / variance
            weighted[ran] += (logs - logs.mean()) * (1 if maximize else -1) / variance
        prior = np.array(self.covariance)
        gained = np.eye(count) + prior @ precision
        means = np.linalg.solve(gained, np.array(self.means) + prior @ weighted)
        covariance = np.linalg.solve(gained, prior)
        return JointEstimate(
            numbers=self.numbers,
            means=tuple(means.tolist()),
            covariance=tuple(tuple(row) for row in covariance.tolist()),
        )

    def among(self, numbers: Sequence[int]) -> JointEstimate:
        """Return the distribution of some of these trials."""
        places = [self.numbers.index(number) for number in numbers]
        return JointEstimate(
            numbers=tuple(numbers),
            means=tuple(self.means[place] for place in places),
            covariance=tuple(tuple(self.covariance[row][place] for place in places) for row in places),
        )

    def log_ratio(self, number: int, other: int) -> tuple[float, float]:
        """Return by how much a trial is better than another, as a logarithm, with its standard deviation.

        Args:
            number: Number of the trial.
            other: Number of the other.
        """
        one, two = self.numbers.index(number), self.numbers.index(other)
        of = self.covariance
        variance = of[one][one] + of[two][two] - of[one][two] - of[two][one]
        return self.means[one] - self.means[two], math.sqrt(max(0.0, variance))


MIN_ROUNDS = 3
"""Rounds before anything is decided by them."""
_MOST_FAILURES = 2
"""Launches of a configuration that end with what may pass (a stall, a lost connection) before it leaves."""


@dataclass(frozen=True, kw_only=True)
class RoundLaunch:
    """One launch of a confirmation."""

    round: int
    """From 1."""
    number: int
    """Number of the trial that it measures again."""
    value: float | None
    """The metric over its counted steps; None if it was not measured."""
    low: float | None
    """Lower end of the 95% interval over its steps; None if ``value`` is."""
    high: float | None
    """Its upper end."""
    metrics: Mapping[str, float]
    """All metrics by name; empty if it was not measured."""
    steps: int
    """Counted steps."""
    outcome: str
    message: str
    held_s: float = 0.0
    """Seconds for which it held its devices."""
    conditions: Conditions = field(default_factory=Conditions)
    """What went on beside it."""

    def to_json(self) -> dict[str, Any]:
        """Return the input of ``from_json``."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> RoundLaunch:
        """Build from the output of ``to_json``."""
        return cls(**{**record, "conditions": Conditions.from_json(record.get("conditions", {}))})


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """The confirmation of one study so far."""

    chosen: tuple[int, ...] = ()
    """Numbers of the trials that are compared, the user's config among them; those that took another's place last."""
    measured: int = 0
    """Measured trials when they were chosen: they are chosen again once there are more."""
    since: int = 1
    """The first round of those that were chosen last."""
    estimate: JointEstimate | None = None
    """What the search says of those that are compared; None if its method has no posterior."""
    launches: tuple[RoundLaunch, ...] = field(default=())
    """In the order in which they ran."""

    @classmethod
    def of(cls, study_attributes: Mapping[str, Any]) -> Rounds:
        """Read the rounds from a study's user attributes; those of older versions are one round."""
        record = study_attributes.get(attributes.CONFIRMATION)
        if record is not None:
            launches = tuple(RoundLaunch.from_json(one) for one in record["launches"])
            kept = {name: record[name] for name in ("measured", "since")}
            said = record.get("estimate")
            estimate = None if said is None else JointEstimate.from_json(said)
            return cls(chosen=tuple(record["chosen"]), launches=launches, estimate=estimate, **kept)
        older = study_attributes.get(attributes.FINALISTS, [])
        return cls(launches=tuple(RoundLaunch(round=1, **one) for one in older))

    def to_json(self) -> dict[str, Any]:
        """Return the value of the study attribute ``CONFIRMATION``."""
        return {
            "chosen": list(self.chosen),
            "measured": self.measured,
            "since": self.since,
            "estimate": None if self.estimate is None else self.estimate.to_json(),
            "launches": [one.to_json() for one in self.launches],
        }

    def with_launch(self, launch: RoundLaunch) -> Rounds:
        """Return these rounds and one more launch."""
        return replace(self, launches=(*self.launches, launch))

    @property
    def last(self) -> int:
        """The latest round; 0 before the first."""
        return max((one.round for one in self.launches), default=0)

    @property
    def spent_s(self) -> float:
        """Seconds that the launches of those that were chosen last held their devices."""
        return sum(one.held_s for one in self.launches if one.round >= self.since)

    def values(self) -> dict[int, dict[int, float]]:
        """Return trial number -> round -> metric, of the launches that were measured."""
        found: dict[int, dict[int, float]] = {}
        for one in self.launches:
            if one.value is not None:
                found.setdefault(one.number, {})[one.round] = one.value
        return found

    def failure(self, number: int) -> RoundLaunch | None:
        """Return the launch for which a trial is not compared any more; None if it is still compared."""
        failed = [one for one in self.launches if one.number == number and one.value is None]
        lasting = [one for one in failed if not Outcome(one.outcome).retryable]
        if lasting:
            return lasting[0]
        return failed[-1] if len(failed) >= _MOST_FAILURES else None

    def begun(self, round_number: int) -> Sequence[int]:
        """Return the trials that a round has launched."""
        return [one.number for one in self.launches if one.round == round_number]


def order_of_round(numbers: Sequence[int], *, round_number: int, seed: int) -> list[int]:
    """Return the order of a round: drawn anew for each, the same for whoever continues it.

    Args:
        numbers: The trials that are launched in it.
        round_number: From 1.
        seed: Of the study.
    """
    order = sorted(numbers)
    random.Random(f"{seed}/round/{round_number}").shuffle(order)
    return order


# Statistics of launches in rounds: paired ratios with their intervals, and the noise from launch to launch.
#
# Metrics differ from launch to launch by a factor, so all is computed on logarithms. Two configurations are compared
# by their differences within rounds (NIST/SEMATECH e-Handbook, 7.3.1.1, analysis of paired observations): what slows a
# whole round cancels.

PRECISION = 0.02
"""Half the width of the interval of a speed-up's logarithm at which it counts as known."""


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """How many times as good as another a configuration is; above 1 is better whatever the metric."""

    value: float
    low: float | None
    """Lower end of the 95% confidence interval; None if fewer than two rounds, or the search alone, compare them."""
    high: float | None
    """Its upper end."""
    rounds: int
    """Rounds in which both were measured; 0 for values of the search."""

    @property
    def half_width(self) -> float:
        """Half the width of the interval of the ratio's logarithm; infinite without an interval."""
        if self.low is None or self.high is None:
            return math.inf
        return (math.log(self.high) - math.log(self.low)) / 2

    @property
    def surely_above_1(self) -> bool:
        """Whether the whole interval lies above 1."""
        return self.low is not None and self.low > 1

    def surely_below(self, value: float) -> bool:
        """Whether the whole interval lies below a ratio."""
        return self.high is not None and self.high < value


@dataclass(frozen=True, kw_only=True)
class Noise:
    """What launches of one configuration differ by, drift between rounds taken out."""

    relative_sd: float
    """Standard deviation of the metric's logarithm: relative to the metric."""
    launches: int
    """Launches that it comes from."""
    degrees: int
    """Its degrees of freedom."""


def paired_ratio(
    values: Mapping[int, float], others: Mapping[int, float], *, maximize: bool, t: float | None = None
) -> Ratio | None:
    """Return how many times as good as another a configuration is, by the rounds in which both were measured.

    The geometric mean of the ratios within rounds, with Student's t interval of their logarithms.

    Args:
        values: Round -> metric of the configuration.
        others: Round -> metric of the other.
        maximize: Whether a larger metric is better.
        t: Quantile of Student's t; None for that of a 95% interval.

    Returns:
        The ratio; None if no round measured both.
    """
    sign = 1.0 if maximize else -1.0
    logs = [sign * math.log(values[one] / others[one]) for one in sorted(values.keys() & others.keys())]
    if not logs:
        return None
    mean, count = statistics.fmean(logs), len(logs)
    if count < 2:
        return Ratio(value=math.exp(mean), low=None, high=None, rounds=count)
    half = (student_t_975(count - 1) if t is None else t) * statistics.stdev(logs) / math.sqrt(count)
    return Ratio(value=math.exp(mean), low=math.exp(mean - half), high=math.exp(mean + half), rounds=count)


def mean_in_rounds(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Return the geometric mean of one configuration's launches with its 95% interval (Student's t, on logarithms).

    The ends are None for a single launch.
    """
    logs = [math.log(value) for value in values]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return math.exp(mean), None, None
    half = student_t_975(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def pooled_noise(values: Mapping[int, Mapping[int, float]], *, reference: int) -> Noise | None:
    """Return the noise from launch to launch, pooled over the configurations that were launched in rounds.

    The variance of a difference within rounds is twice that of a launch; variances are weighted by their degrees of
    freedom. What a whole round has in common (a drift of the machine) is in none of them.

    Args:
        values: Configuration -> round -> metric.
        reference: The configuration with which the others are paired.

    Returns:
        The noise; None before any configuration was paired in two rounds.
    """
    squares, degrees, used = 0.0, 0, set()
    for number, own in values.items():
        common = own.keys() & values[reference].keys()
        if number == reference or len(common) < 2:
            continue
        squares += statistics.variance([math.log(own[one] / values[reference][one]) for one in common]) * (
            len(common) - 1
        )
        degrees += len(common) - 1
        used |= {(number, one) for one in common} | {(reference, one) for one in common}
    if not degrees:
        return None
    return Noise(relative_sd=math.sqrt(squares / degrees / 2), launches=len(used), degrees=degrees)


def noise_of_search(values: Mapping[int, Mapping[int, float]], searched: Mapping[int, float]) -> Noise | None:
    """Return the noise of the search: the root mean square of what its measurements differ by from the rounds.

    It contains what the machine as a whole changed by, and what a few steps of a launch do not show.

    Args:
        values: Configuration -> round -> metric.
        searched: Configuration -> metric of the search.

    Returns:
        The noise; None without a configuration that was measured in both.
    """
    logs = [
        math.log(searched[number]) - statistics.fmean(map(math.log, own.values()))
        for number, own in values.items()
        if own and searched.get(number, 0.0) > 0
    ]
    if not logs:
        return None
    square = statistics.fmean(one**2 for one in logs)
    return Noise(relative_sd=math.sqrt(square), launches=len(logs), degrees=len(logs))


def is_precise(ratio: Ratio, noise: Noise | None) -> bool:
    """Whether a ratio is known, by its own rounds and by the noise of all: few rounds may agree by chance."""
    if noise is None or not ratio.rounds:
        return False
    pooled = student_t_975(noise.degrees) * noise.relative_sd * math.sqrt(2 / ratio.rounds)
    return max(ratio.half_width, pooled) <= PRECISION


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A configuration that was measured in rounds."""

    number: int
    """Number of its trial."""
    train_batch_size: int
    """Its global batch, in samples."""
    differing: int
    """Settings that differ from the user's own, batch sizes included."""
    rounds: int
    """Rounds in which it was measured."""
    value: float
    """Geometric mean of the metric over its rounds."""
    low: float | None
    """Lower end of the 95% interval of ``value``, from launch to launch; None for a single round."""
    high: float | None
    """Its upper end."""
    ratio: Ratio | None
    """How many times as good as the user's own config it is, paired; None if the two were never measured together."""
    left: str
    """Why it is not compared any more; empty while it is."""


@dataclass(frozen=True, kw_only=True)
class SpeedUp:
    """How many times as good as the user's own config the best configuration at one global batch is."""

    number: int
    """Number of its trial."""
    train_batch_size: int
    """The global batch, in samples."""
    ratio: Ratio


@dataclass(frozen=True, kw_only=True)
class Undecided:
    """A configuration that the rounds do not distinguish from the result, and that does not count as equal to it."""

    number: int
    """Number of its trial."""
    train_batch_size: int
    """Its global batch, in samples."""
    below: float
    """Share by which its metric is expected to be worse than that of the trial ``best``."""
    best: int
    """Number of the best trial of those that may be the result."""
    allowed: float
    """Share up to which it would count as equal to ``best``. If ``below`` is not larger, it is not surely better than
    the user's own config."""
