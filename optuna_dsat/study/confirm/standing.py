"""The metric of a configuration and its speed-up. Confirmed metrics are compared with confirmed metrics only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from optuna.trial import FrozenTrial

from optuna_dsat.metrics import speed_up
from optuna_dsat.study.confirm.rounds import Rounds, mean_in_rounds

__all__ = ["Finalist", "Standing", "compared", "finalists_of", "speed_up_over", "standing_of"]


@dataclass(frozen=True, kw_only=True)
class Standing:
    """A measured trial and its metric, which is confirmed if the trial was measured again."""

    trial: FrozenTrial
    value: float
    low: float | None = None
    """Lower end of the 95% confidence interval; None if it was not confirmed."""
    high: float | None = None
    """Its upper end."""

    @property
    def confirmed(self) -> bool:
        """Whether it was measured again with more steps."""
        return self.low is not None

    @property
    def searched_value(self) -> float:
        """The metric as the search measured it."""
        return float(self.trial.values[0])


def compared(baseline: Standing, standing: Standing) -> tuple[float, float]:
    """Return the two metrics to compare: confirmed metrics if both are confirmed, else metrics of the search.

    Returns:
        The metric of the baseline, the metric of the other.
    """
    if baseline.confirmed and standing.confirmed:
        return baseline.value, standing.value
    return baseline.searched_value, standing.searched_value


def speed_up_over(baseline: Standing, standing: Standing, *, maximize: bool) -> float | None:
    """Return the ratio of a configuration to the baseline (above 1 is better); None if either metric is 0."""
    before, after = compared(baseline, standing)
    return speed_up(after, before, maximize=maximize)


@dataclass(frozen=True, kw_only=True)
class Finalist:
    """A configuration that was measured again, over all its rounds."""

    number: int
    """Number of the confirmed trial."""
    value: float | None
    """The metric: the geometric mean over its rounds; None if a launch failed for good."""
    low: float | None
    """Lower end of the 95% interval between launches, or over the steps of a single launch; None if ``value`` is."""
    high: float | None
    """Its upper end."""
    metrics: Mapping[str, float]
    """All metrics by name: geometric means over its rounds, maximum of memory; empty if a launch failed for good."""
    steps: int
    """Counted steps of all its launches."""
    outcome: str
    message: str
    rounds: int = 1
    """Rounds in which it was measured."""


def finalists_of(rounds: Rounds) -> dict[int, Finalist]:
    """Return finalists by trial number, in launch order."""
    numbers = dict.fromkeys(one.number for one in rounds.launches)
    return {number: _over_rounds(rounds, number) for number in numbers}


def _over_rounds(rounds: Rounds, number: int) -> Finalist:
    own = [one for one in rounds.launches if one.number == number]
    measured = [one for one in own if one.value is not None]
    failed = rounds.failure(number)
    shown = failed or (measured or own)[-1]
    value, low, high = None, None, None
    if measured and failed is None:
        value, low, high = mean_in_rounds([one.value for one in measured if one.value is not None])
        low, high = (measured[0].low, measured[0].high) if low is None else (low, high)
    return Finalist(
        number=number,
        value=value,
        low=low,
        high=high,
        metrics={} if failed else _mean_metrics([one.metrics for one in measured]),
        steps=sum(one.steps for one in own),
        outcome=shown.outcome,
        message=shown.message,
        rounds=len(measured),
    )


def _mean_metrics(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for metrics in found for name in metrics)
    values = {name: [metrics[name] for metrics in found if name in metrics] for name in names}
    return {name: max(all_) if name.endswith("_bytes") else _mean(all_) for name, all_ in values.items()}


def _mean(values: Sequence[float]) -> float:
    """Return the mean used for the metric, so that samples/s and FLOPS agree; the arithmetic mean if a value is 0."""
    return mean_in_rounds(values)[0] if min(values) > 0 else sum(values) / len(values)


def standing_of(trial: FrozenTrial, finalist: Finalist | None) -> Standing:
    """Return the standing of a measured trial: its confirmed metric, else its metric of the search.

    Args:
        trial: A measured trial.
        finalist: Its confirmation, or None.
    """
    if finalist is None or finalist.value is None:
        return Standing(trial=trial, value=float(trial.values[0]))
    return Standing(trial=trial, value=finalist.value, low=finalist.low, high=finalist.high)
