"""How fast the configurations of a study are, for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from optuna_dsat.cost.gpus import utilisation
from optuna_dsat.cost.memory import ModelProfile
from optuna_dsat.metrics import LARGER_IS_BETTER, PER_JOULE, POWER, SMALLER_IS_BETTER, UTILISATION, Interval
from optuna_dsat.words import metric_in_words, range_in_words

_PHASES = {"latency": "per step", "forward": "forward", "backward": "backward", "step": "in the optimizer"}
"""Metric of a duration -> the phase that it measures."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The speed of a configuration: its metric, and samples/s where these are known."""

    metric: str
    """The metric that is optimised."""
    value: float
    """The metric of the configuration."""
    samples_per_s: float | None = None
    """Over all ranks; None if unknown."""
    tokens_per_s: float | None = None
    """Over all ranks; None if the inputs are not known to be tokens."""
    utilisation: float | None = None
    """Share of the device's peak FLOPS (MFU); None if the peak is unknown."""
    device: str = "cuda"
    """``cuda`` or ``cpu``."""

    @property
    def text(self) -> str:
        """Samples/s, other known speeds (FLOPS as MFU if the peak is known), another metric; the metric if unknown."""
        if self.samples_per_s is None:
            return self._metric(self.value)
        parts = [metric_in_words("throughput", self.samples_per_s)]
        if self.tokens_per_s is not None:
            parts.append(metric_in_words("tokens_per_s", self.tokens_per_s))
        if self.utilisation is not None:
            parts.append(f"{self.utilisation:.0%} MFU")
        elif self.metric == "FLOPS_per_gpu":
            parts.append(self._metric(self.value))
        if self.metric in SMALLER_IS_BETTER:
            parts.append(f"{self._metric(self.value)} {_PHASES[self.metric]}")
        return ", ".join(parts)

    @property
    def brief(self) -> str:
        """The speed for a column of a table: samples/s alone for a metric that grows with them."""
        if self.samples_per_s is None or self.metric not in LARGER_IS_BETTER:
            return self.text
        return metric_in_words("throughput", self.samples_per_s)

    def between(self, interval: Interval) -> str:
        """Return the ends of an interval of the metric, in samples/s if the metric grows with them; empty without."""
        if interval.low is None or interval.high is None:
            return ""
        ends = (interval.low, interval.high)
        low, high = (self.at(end).brief if self.metric in LARGER_IS_BETTER else self._metric(end) for end in ends)
        return f"95% CI {range_in_words(low, high)}"

    def at(self, value: float) -> Speed:
        """Return the speed at another value of the metric: samples/s grow as FLOPS do, and as a step gets shorter."""
        if self.metric in LARGER_IS_BETTER and self.value:
            return self._times(value / self.value, value)
        if self.metric == "latency" and value:
            return self._times(self.value / value, value)
        return self if value == self.value else Speed(metric=self.metric, value=value, device=self.device)

    def _times(self, factor: float, value: float) -> Speed:
        samples, tokens, share = (
            None if item is None else item * factor
            for item in (self.samples_per_s, self.tokens_per_s, self.utilisation)
        )
        return replace(self, value=value, samples_per_s=samples, tokens_per_s=tokens, utilisation=share)

    def _metric(self, value: float) -> str:
        return metric_in_words(self.metric, value, device=self.device)


def speed_of(metrics: Mapping[str, float], value: float, *, metric: str, device: str) -> Speed:
    """Return the speed of a configuration at a value of its metric, by all metrics of one of its launches."""
    measured, samples_per_s = metrics.get(metric), metrics.get("throughput")
    if not measured or not value or not samples_per_s:
        return Speed(metric=metric, value=value, device=device)
    return Speed(
        metric=metric,
        value=measured,
        samples_per_s=samples_per_s,
        tokens_per_s=metrics.get("tokens_per_s"),
        utilisation=metrics.get(UTILISATION),
        device=device,
    ).at(value)


def with_efficiency(
    metrics: Mapping[str, float], *, profile: ModelProfile, config: Mapping[str, Any], power_w: float | None = None
) -> dict[str, float]:
    """Return the metrics of a launch with the share of the GPU's peak and, by its power, samples/J if known."""
    result, share = dict(metrics), utilisation(profile, config, metrics)
    if share is not None:
        result[UTILISATION] = share
    if power_w and metrics:
        result |= {POWER: power_w, PER_JOULE: metrics["throughput"] / power_w}
    return result
