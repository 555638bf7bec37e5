"""The rounds of a confirmation as stored with the study, and the statistics of their launches.

Each round launches the user's config and every finalist once, in a new random order. The order depends only on stored
values, so any worker can resume an unfinished round.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from optuna_dsat.config.record import Record
from optuna_dsat.guided.joint_estimate import JointEstimate
from optuna_dsat.launch.protocol import Conditions
from optuna_dsat.metrics import Interval, student_t_975
from optuna_dsat.outcome import Outcome
from optuna_dsat.trials import attributes
from optuna_dsat.words import things_in_words

MIN_ROUNDS = 3
"""Minimum number of rounds before any decision; one less for a winner whose launches hardly differ."""
_MOST_FAILURES = 2
"""Launches that may fail with a transient error (a stall, a lost connection) before a configuration is dropped."""


@dataclass(frozen=True, kw_only=True)
class RoundLaunch(Record):
    """A launch of a confirmation."""

    round: int
    """From 1."""
    number: int
    """Number of the measured trial."""
    value: float | None
    """The metric over its counted steps; None if it was not measured."""
    low: float | None
    """Lower end of the 95% interval over its steps; None if ``value`` is."""
    high: float | None
    """Upper end of the interval."""
    metrics: Mapping[str, float]
    """All metrics by name; empty if it was not measured."""
    steps: int
    """Counted steps."""
    outcome: str
    message: str
    held_s: float = 0.0
    """Seconds for which it held its devices."""
    conditions: Conditions = field(default_factory=Conditions)
    """Conditions of the machine during the launch."""
    sample_size: float | None = None
    """Mean elements of a sample, padding included, if inputs vary in size; None otherwise."""
    script_values: Mapping[str, Any] = field(default_factory=dict)
    """As of ``attributes.SCRIPT_VALUES``."""


@dataclass(frozen=True, kw_only=True)
class CheckedSettings(Record):
    """Settings that change numbers, and the comparison of their losses with those of the user's config."""

    settings: Mapping[str, Any]
    """Knob -> value, as of ``config.differences.lossy_settings``."""
    number: int
    """Number of the trial whose config was launched."""
    check: Mapping[str, Any]
    """A ``loss_check.LossCheck`` as a dictionary."""

    @property
    def agrees(self) -> bool:
        """Whether the losses agree."""
        return self.check["agrees"] is True


@dataclass(frozen=True, kw_only=True)
class Rounds(Record):
    """The confirmation of a study so far."""

    chosen: tuple[int, ...] = ()
    """Numbers of the compared trials, including the user's config; replacements come last."""
    measured: int = 0
    """Number of measured trials at the time of the choice; finalists are chosen again once there are more."""
    since: int = 1
    """First round of the latest choice of finalists."""
    estimate: JointEstimate | None = None
    """Estimate of the compared trials by the search; None if its method has no posterior."""
    launches: tuple[RoundLaunch, ...] = field(default=())
    """Launches in the order in which they ran."""
    losses: tuple[CheckedSettings, ...] = ()
    """Comparisons of losses for settings that change numbers (``--allow lossy``)."""

    @classmethod
    def of(cls, study_attributes: Mapping[str, Any]) -> Rounds:
        """Read the rounds from a study's user attributes."""
        return cls.from_json(study_attributes.get(attributes.CONFIRMATION, {}))

    def with_launch(self, launch: RoundLaunch) -> Rounds:
        """Return a copy of the rounds with another launch."""
        return replace(self, launches=(*self.launches, launch))

    def checked(self, settings: Mapping[str, Any]) -> CheckedSettings | None:
        """Return the comparison of losses for settings that change numbers; None without one."""
        return next((checked for checked in self.losses if checked.settings == settings), None)

    @property
    def last(self) -> int:
        """The latest round; 0 before the first."""
        return max((launch.round for launch in self.launches), default=0)

    @property
    def spent_s(self) -> float:
        """Seconds of device time of the launches since the latest choice of finalists."""
        return sum(launch.held_s for launch in self.launches if launch.round >= self.since)

    def values(self) -> dict[int, dict[int, float]]:
        """Return trial number -> round -> metric of the measured launches."""
        result: dict[int, dict[int, float]] = {}
        for launch in self.launches:
            if launch.value is not None:
                result.setdefault(launch.number, {})[launch.round] = launch.value
        return result

    def data_error(self, *numbers: int) -> float:
        """Return the half-width due to the data in the 95% interval of a trial, or of the ratio of two.

        If inputs vary in size and the script draws its data in the same order each time, rounds do not average the data
        out: samples have the same mean size in each round. The interval of a launch contains their variation, which
        cancels in the ratio of two trials with the same data.
        """
        sizes, errors = list[set[float | None]](), list[float]()
        for number in numbers:
            launches = [launch for launch in self.launches if launch.number == number and launch.value is not None]
            sizes.append({launch.sample_size for launch in launches})
            if len(sizes[-1]) == 1 and None not in sizes[-1]:
                widths = [Interval(value=1.0, low=launch.low, high=launch.high).half_width for launch in launches]
                errors.append(statistics.fmean(widths))
        return 0.0 if len(sizes) > 1 and sizes[0] == sizes[1] else math.hypot(*errors)

    def failure(self, number: int) -> RoundLaunch | None:
        """Return the failed launch due to which a trial was dropped; None if it is still compared."""
        failed = [launch for launch in self.launches if launch.number == number and launch.value is None]
        lasting = [launch for launch in failed if not Outcome(launch.outcome).retryable]
        if lasting:
            return lasting[0]
        return failed[-1] if len(failed) >= _MOST_FAILURES else None

    def finalists(self) -> list[dict[str, Any]]:
        """Return the launches of each trial together, in launch order: ``finalists`` of ``best_ds_metrics.json``."""
        rows = []
        for number in dict.fromkeys(launch.number for launch in self.launches):
            launches = [launch for launch in self.launches if launch.number == number]
            measured = [launch for launch in launches if launch.value is not None]
            failed = self.failure(number)
            shown = failed or (measured or launches)[-1]
            row: dict[str, Any] = {"number": number, "value": None, "low": None, "high": None, "metrics": {}}
            if measured and failed is None:
                mean = mean_in_rounds([launch.value for launch in measured if launch.value is not None])
                mean = mean.widened(self.data_error(number))
                ends = (measured[0].low, measured[0].high) if mean.low is None else (mean.low, mean.high)
                row |= {"value": mean.value, "low": ends[0], "high": ends[1], "metrics": mean_metrics(measured)}
            steps = sum(launch.steps for launch in launches)
            facts = {"steps": steps, "outcome": shown.outcome, "message": shown.message, "rounds": len(measured)}
            rows.append(row | facts)
        return rows

    def failures_in_words(self) -> str:
        """Return the trials that could not be measured, with their errors; empty without any."""
        failed = [f"trial {row['number']} ({row['message']})" for row in self.finalists() if row["value"] is None]
        return f"Could not be measured again, with more steps: {', '.join(failed)}." if failed else ""

    def begun(self, round_number: int) -> Sequence[int]:
        """Return the trials that were already launched in a round."""
        return [launch.number for launch in self.launches if launch.round == round_number]


def order_of_round(numbers: Sequence[int], *, round_number: int, seed: int) -> list[int]:
    """Return the random order of a round; the same for every worker that continues it."""
    order = sorted(numbers)
    random.Random(f"{seed}/round/{round_number}").shuffle(order)
    return order


# Statistics of launches in rounds: paired ratios with their intervals, and the noise from launch to launch.
#
# Metrics vary between launches by a factor, so all statistics use logarithms. Two configurations are compared by their
# differences within rounds: a slowdown of a whole round cancels out. Rounds are the blocks of a randomized block design
# (NIST/SEMATECH e-Handbook, 5.3.3.2), so that the launches of all configurations determine the noise. It is assumed to
# be equal: in the recorded landscapes it differs by 1.4 times between the fastest and the slowest quarter of
# configurations, and 92 to 95 of 100 intervals with their noise contain the true ratio (tests/study/test_paired.py).

PRECISION = 0.02
"""Half-width of the interval of a log speed-up at which the speed-up is precise enough."""
_PRECISION_OF_GAIN = 0.15
"""The same relative to the log speed-up: nobody decides by whether a config is 1.8 or 2.2 times as fast."""


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Variation between launches of a configuration, without drift between rounds."""

    relative_sd: float
    """Standard deviation of the metric's logarithm, i.e. relative to the metric."""
    launches: int
    """Number of launches in the estimate."""
    degrees: int
    """Degrees of freedom of the estimate."""


def _unlike(degrees: int) -> float:
    """Return the ratio of variances that launches of equal noise exceed in 1 of 200 cases.

    By the F distribution of 2 degrees of freedom, as three rounds have, and of these: (d / 2) (p^(-2 / d) - 1).
    """
    return degrees / 2 * (math.pow(0.005, -2 / degrees) - 1)


def paired_ratio(
    values: Mapping[int, float], others: Mapping[int, float], *, maximize: bool, noise: Noise | None = None
) -> Interval | None:
    """Return the geometric mean of two configurations' ratios in common rounds, 95% by Student's t; None without.

    ``noise`` is of all configurations of the rounds. Without it, or if the ratios differ far more (``_unlike``), the
    interval is by the ratios alone.
    """
    sign = 1.0 if maximize else -1.0
    logs = tuple(sign * math.log(values[key] / others[key]) for key in sorted(values.keys() & others.keys()))
    ratio = _mean_of(logs) if logs else None
    if ratio is None or ratio.low is None or noise is None or noise.degrees < len(logs):
        return ratio
    if statistics.variance(logs) > _unlike(noise.degrees) * 2 * noise.relative_sd**2:
        return ratio
    half = student_t_975(noise.degrees) * noise.relative_sd * math.sqrt(2 / len(logs))
    return replace(ratio, low=ratio.value * math.exp(-half), high=ratio.value * math.exp(half))


def mean_in_rounds(values: Sequence[float]) -> Interval:
    """Return the geometric mean of a configuration's launches with its 95% interval (Student's t, on logarithms)."""
    return _mean_of(tuple(math.log(value) for value in values))


@lru_cache(maxsize=1024)  # a verdict, and the next, ask for the same ratios again and again
def _mean_of(logs: tuple[float, ...]) -> Interval:
    mean, count = statistics.fmean(logs), len(logs)
    if count < 2:
        return Interval(value=math.exp(mean), rounds=count)
    half = student_t_975(count - 1) * statistics.stdev(logs) / math.sqrt(count)
    return Interval(value=math.exp(mean), low=math.exp(mean - half), high=math.exp(mean + half), rounds=count)


def mean_metrics(launches: Sequence[RoundLaunch]) -> dict[str, float]:
    """Return all metrics of a configuration over launches: geometric means, the maximum of memory."""
    result: dict[str, float] = {}
    for name in dict.fromkeys(name for launch in launches for name in launch.metrics):
        values = [launch.metrics[name] for launch in launches if name in launch.metrics]
        mean = statistics.geometric_mean if min(values) > 0 else statistics.fmean
        result[name] = max(values) if name.endswith("_bytes") else mean(values)
    return result


def noise_of_rounds(values: Mapping[int, Mapping[int, float]]) -> Noise | None:
    """Return the noise between launches of a configuration; None before two configurations share two rounds.

    ``values`` are metrics by trial number and round. A configuration whose launches differ far more than the others'
    is left out.
    """
    noise = _noise_of(values)
    if noise is None:
        return None
    least = noise
    for left_out in values:
        others = _noise_of({number: rounds for number, rounds in values.items() if number != left_out})
        if others is None or others.degrees == noise.degrees:
            continue
        squares = noise.relative_sd**2 * noise.degrees - others.relative_sd**2 * others.degrees
        is_unlike = squares / (noise.degrees - others.degrees) > _unlike(others.degrees) * others.relative_sd**2
        if is_unlike and others.relative_sd < least.relative_sd:
            least = others
    return least


def _noise_of(values: Mapping[int, Mapping[int, float]]) -> Noise | None:
    """Return the residual standard deviation of a fit of all configurations and rounds."""
    rows = [(number, item, math.log(value)) for number, by_round in values.items() for item, value in by_round.items()]
    numbers, rounds = list(values), sorted({item for _, item, _ in rows})
    design = [
        [*(number == other for other in numbers), *(item == other for other in rounds)] for number, item, _ in rows
    ]
    columns, logs = np.array(design, dtype=float), np.array([log for *_, log in rows])
    if not rows:
        return None
    effects, _, rank, _ = np.linalg.lstsq(columns, logs, rcond=None)
    residuals, degrees = logs - columns @ effects, len(rows) - int(rank)
    if not degrees:
        return None
    return Noise(relative_sd=math.sqrt(float(residuals @ residuals) / degrees), launches=len(rows), degrees=degrees)


def precision_of(ratio: float) -> float:
    """Return the half-width of the interval of a log ratio at which it is precise enough."""
    return max(PRECISION, _PRECISION_OF_GAIN * abs(math.log(ratio)))


def is_precise(ratio: Interval) -> bool:
    """Whether a ratio is known closely enough to end the rounds."""
    return ratio.half_width <= precision_of(ratio.value)


@dataclass(frozen=True, kw_only=True)
class Undecided:
    """A configuration that the rounds cannot distinguish from the result, but that is not a tie either."""

    number: int
    """Number of its trial."""
    train_batch_size: int
    """Its global batch, in samples."""
    below: float
    """Expected relative loss of the metric against the trial ``best``."""
    best: int
    """Number of the best trial that is eligible as the result."""
    allowed: float
    """Relative loss up to which it ties with ``best``. If ``below`` is not larger, it is not surely better than the
    user's config."""


_DRIFT = 3.0
"""Allowed drift of the user's config between rounds, as a multiple of the noise between launches."""
_SINCE_SEARCH = 0.05
"""Relative difference between search and rounds that is always reported: the search counts few steps."""
_OTHERS_SHARE = 0.05
"""Share of the cores' time that other processes may take."""


def warnings_of(
    rounds: Rounds, *, searched: Mapping[int, float], baseline: int | None, noise: Noise | None, tie: float
) -> tuple[str, ...]:
    """Return the warnings on a confirmation."""
    values = rounds.values()
    least = max(tie, 0.0 if noise is None else _DRIFT * noise.relative_sd)
    names = [] if baseline is None else _drift(values.get(baseline, {}), least=least, noise=noise)
    for number in sorted(searched):
        name = "Your config" if number == baseline else f"Trial {number}"
        names += _since_search(name, values.get(number, {}), searched[number], least=max(least, _SINCE_SEARCH))
    return (*names, *_others(rounds), *_on_gpus(rounds))


def _drift(values: Mapping[int, float], *, least: float, noise: Noise | None) -> list[str]:
    if noise is None or len(values) < 2:
        return []
    mean = statistics.fmean(math.log(value) for value in values.values())
    strays = {number: math.log(value) - mean for number, value in values.items()}
    worst = max(strays, key=lambda number: abs(strays[number]))
    if abs(strays[worst]) <= least:
        return []
    return [
        f"The machine changed while it was measured: in round {worst} your config was {_percent(strays[worst])} "
        f"its mean over {things_in_words(len(values), 'round')}, and the noise of the rounds is "
        f"{noise.relative_sd:.1%}."
    ]


def _since_search(name: str, values: Mapping[int, float], searched: float, *, least: float) -> list[str]:
    if not values or searched <= 0:
        return []
    mean = statistics.fmean(math.log(value) for value in values.values())
    if abs(mean - math.log(searched)) <= least:
        return []
    return [
        f"{name} measured {_percent(mean - math.log(searched))} its value in the search over "
        f"{things_in_words(len(values), 'round')}: only the rounds count."
    ]


def _percent(log: float) -> str:
    return f"{abs(math.expm1(log)):.0%} {'above' if log > 0 else 'below'}"


def _others(rounds: Rounds) -> list[str]:
    shares = [launch.conditions.others_share for launch in rounds.launches]
    busy = [share for share in shares if share is not None and share > _OTHERS_SHARE]
    if not busy:
        return []
    cores = max(launch.conditions.cores or 0 for launch in rounds.launches)
    return [
        f"Other processes took up to {max(busy):.0%} of the time of {things_in_words(cores, 'core')} during "
        f"{len(busy)} of {things_in_words(len(rounds.launches), 'launch')} of the confirmation."
    ]


def _on_gpus(rounds: Rounds) -> list[str]:
    facts, total = [launch.conditions for launch in rounds.launches], len(rounds.launches)
    shared = [fact.gpu_processes for fact in facts if fact.gpu_processes]
    throttled = [fact.throttle_reasons for fact in facts if fact.throttle_reasons]
    names = []
    launches = things_in_words(total, "launch")
    if shared:
        names.append(f"Others used the GPUs during {len(shared)} of {launches}: {_listed(shared)}.")
    if throttled:
        reasons = _listed(throttled)
        names.append(f"The GPUs' clocks were held down during {len(throttled)} of {launches}: {reasons}.")
    return names


def _listed(groups: Sequence[Sequence[str]]) -> str:
    return ", ".join(dict.fromkeys(name for group in groups for name in group))
