"""Effect of changing a single setting, measured by a study's launches that differ in nothing else.

All measurements are fitted by least squares, on logarithms: each configuration has a level, and each round of the
confirmation an effect on all of its launches. A ratio of two configurations is a linear function of the measurements,
so its variance counts each of them once, however many pairs share it. The noise between launches is the residual of
the fit, with its degrees of freedom (Searle 1971, Linear Models, chapter 5).

The search's measurement of a finalist is left out: the finalist was selected by it, so its noise is favourable on
average.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from optuna.trial import FrozenTrial

from optuna_dsat.cost.numbers import Numbers
from optuna_dsat.metrics import student_t_975
from optuna_dsat.study.confirm.rounds import Rounds
from optuna_dsat.trials import attributes
from optuna_dsat.trials.lineage import STRUCTURE, Feasibility, feasibility, score, visible_params

_ELSEWHERE = 0.3
"""Standard deviation of a setting's effect at other values of the other settings, relative to its effect."""
_ASSUMED_DEGREES = 2
"""Degrees of freedom of an assumed noise, which is likely to be wrong by a factor of 2 in either direction."""
_SEARCH = 0
"""Round number of the search's measurements."""


@dataclass(frozen=True, kw_only=True)
class _Measurement:
    key: str
    """Key of its configuration."""
    round: int
    log: float
    """Logarithm of the metric, larger is better."""
    step_variance: float
    """Variance of ``log`` due to the spread of the launch's steps."""


@dataclass(frozen=True, kw_only=True)
class Effect:
    """The measured effect of a setting on the logarithm of the metric."""

    mean: float
    half_width: float
    """Half the width of the 95% interval."""
    pairs: int
    """Pairs of configurations that were compared."""


class Pairs:
    """Measurements of a study, and effects of single settings; ``assumed_noise`` (relative) if none was repeated."""

    def __init__(self, trials: Sequence[FrozenTrial], rounds: Rounds, *, maximize: bool, assumed_noise: float) -> None:
        self._params = {_key(trial): visible_params(trial) for trial in trials}
        measurements = list(_measurements(trials, rounds, maximize=maximize))
        self._places = {key: place for place, key in enumerate(dict.fromkeys(item.key for item in measurements))}
        blocks = [number for number in dict.fromkeys(item.round for item in measurements) if number != _SEARCH]
        design = np.zeros((len(measurements), len(self._places) + len(blocks)))
        for place, measurement in enumerate(measurements):
            design[place, self._places[measurement.key]] = 1
            if measurement.round != _SEARCH:
                design[place, len(self._places) + blocks.index(measurement.round)] = 1
        columns = design[[item.round != _SEARCH for item in measurements]].any(axis=0)
        rows = design[:, columns].any(axis=1)
        tied = design[np.ix_(rows, columns)]  # the level of any other configuration is the mean of its measurements
        self._logs = np.array([item.log for item in measurements])
        self._solution = design.T / design.sum(axis=0)[:, None]
        self._solution[np.ix_(columns, rows)] = solution = np.linalg.pinv(tied)
        self._reproduced = np.eye(len(self._solution))
        self._reproduced[np.ix_(columns, columns)] = solution @ tied
        residuals = self._logs - design @ (self._solution @ self._logs)
        rank = int(np.sum(~columns) + (np.linalg.matrix_rank(tied) if tied.size else 0))
        self._degrees = len(measurements) - rank
        self.is_noise_measured = self._degrees > 0
        """Whether launches of any configuration were repeated."""
        variance = float(residuals @ residuals) / self._degrees if self.is_noise_measured else assumed_noise**2
        self._variances = np.maximum(variance, [item.step_variance for item in measurements])
        self.noise = math.sqrt(variance)
        """Relative standard deviation between launches."""

    @property
    def quantile(self) -> float:
        """Half-width of a mean's 95% interval, in standard errors."""
        return student_t_975(self._degrees if self.is_noise_measured else _ASSUMED_DEGREES)

    def effect(self, winner: Mapping[str, Any], other: Mapping[str, Any]) -> Effect | None:
        """Return the effect of the winner's values of some settings; None if no pair differs in exactly these.

        Only pairs of configurations of the same structure count. Pairs that contain the winner weigh more.

        ``other`` contains the winner's settings, with other values of some.
        """
        differing = {name for name in winner.keys() | other.keys() if winner.get(name) != other.get(name)}
        fixed = [name for name in STRUCTURE if name not in differing]
        sides: dict[str, list[str | None]] = {}
        for key in self._places:
            params = self._params[key]
            if not params or any(params.get(name) != winner.get(name) for name in fixed):
                continue
            rest = _text({name: value for name, value in params.items() if name not in differing})
            for place, side in enumerate((winner, other)):
                if all(params.get(name) == side.get(name) for name in differing):
                    sides.setdefault(rest, [None, None])[place] = key
        here = _text({name: value for name, value in winner.items() if name not in differing})
        ratios = {rest: self._ratio(*pair) for rest, pair in sides.items()}
        known = {rest: ratio for rest, ratio in ratios.items() if ratio is not None}
        return self._combined(list(known.values()), [rest != here for rest in known]) if known else None

    def _ratio(self, name: str | None, other: str | None) -> Numbers | None:
        """Return the weights of the measurements in the logarithm of a ratio; None if they do not determine it."""
        if name is None or other is None:
            return None
        place, of = self._places[name], self._places[other]
        wanted = np.zeros(len(self._solution))
        wanted[place], wanted[of] = 1, -1
        is_known = np.allclose(self._reproduced[place] - self._reproduced[of], wanted)
        return self._solution[place] - self._solution[of] if is_known else None

    def _combined(self, ratios: Sequence[Numbers], elsewhere: Sequence[bool]) -> Effect:
        """Return the mean of ratios, weighted by their precision as estimates of the winner's effect."""
        rows = np.array(ratios)
        means, variances = rows @ self._logs, rows**2 @ self._variances
        spread = np.zeros(len(rows))
        for _ in range(2):  # the second pass uses the spread around the first mean
            weights = 1 / (variances + spread)
            weights /= weights.sum()
            mean = float(weights @ means)
            spread = np.where(elsewhere, (_ELSEWHERE * mean) ** 2, 0.0)
        variance = float((weights @ rows) ** 2 @ self._variances + weights**2 @ spread)
        return Effect(mean=mean, half_width=self.quantile * math.sqrt(variance), pairs=len(rows))


def _key(trial: FrozenTrial) -> str:
    """Return the key of a trial's configuration; the baseline may be outside the space and have no parameters."""
    params = visible_params(trial)
    return _text(params) if params else f"trial {trial.number}"


def _text(params: Mapping[str, Any]) -> str:
    return json.dumps(params, sort_keys=True, default=str)


def _measurements(trials: Sequence[FrozenTrial], rounds: Rounds, *, maximize: bool) -> Iterator[_Measurement]:
    sign = 1 if maximize else -1
    baseline = attributes.user_config_trial(trials)
    again = rounds.values().keys()
    chosen = again - {baseline.number} if baseline is not None and baseline.number in again else set()
    keys = {trial.number: _key(trial) for trial in trials}
    for trial in trials:
        value = score(trial)
        if feasibility(trial) is Feasibility.FITS and value and trial.number not in chosen:
            spread = _step_variance(trial, is_rate=maximize)
            yield _Measurement(key=keys[trial.number], round=_SEARCH, log=sign * math.log(value), step_variance=spread)
    for number, values in rounds.values().items():
        for item, value in values.items():
            if value and number in keys:
                yield _Measurement(key=keys[number], round=item, log=sign * math.log(value), step_variance=0.0)


def _step_variance(trial: FrozenTrial, *, is_rate: bool) -> float:
    """Return the variance of a metric's logarithm due to the spread of its counted steps; 0 for fewer than two steps.

    A trial reports the metric over all counted steps so far, after each of them or some: their mean time, or a rate
    proportional to its inverse.
    """
    steps = np.array(sorted(trial.intermediate_values))
    reported = np.array([trial.intermediate_values[step] for step in steps])
    if len(reported) < 2 or reported.min() <= 0:
        return 0.0
    means, counts = 1 / reported if is_rate else reported, steps - steps[0] + 1
    sizes = np.diff(counts, prepend=0)
    deviations = np.diff(means * counts, prepend=0.0) / sizes - means[-1]
    return float(np.sum(sizes * deviations**2) / (len(steps) - 1) / counts[-1] / means[-1] ** 2)
