"""The metric of a configuration, and its speed-up: confirmed metrics are compared with confirmed ones only."""

from __future__ import annotations

from dataclasses import dataclass

from optuna.trial import FrozenTrial

from optuna_dsat.metrics import speed_up

__all__ = ["Standing", "compared", "speed_up_over"]


@dataclass(frozen=True, kw_only=True)
class Standing:
    """A measured trial and its metric: the confirmed one if it was measured again."""

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
    """Return the two metrics to compare: the confirmed ones if both are confirmed, else those of the search.

    Returns:
        The baseline's, the other's.
    """
    if baseline.confirmed and standing.confirmed:
        return baseline.value, standing.value
    return baseline.searched_value, standing.searched_value


def speed_up_over(baseline: Standing, standing: Standing, *, maximize: bool) -> float | None:
    """Return how many times as good as the baseline a configuration is; None if either metric is 0."""
    before, after = compared(baseline, standing)
    return speed_up(after, before, maximize=maximize)
