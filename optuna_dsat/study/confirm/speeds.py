"""How fast the configurations of a study are, for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from optuna_dsat.cost.gpus import utilisation
from optuna_dsat.cost.memory import ModelProfile
from optuna_dsat.metrics import LARGER_IS_BETTER, PER_JOULE, POWER, SMALLER_IS_BETTER, UTILISATION, Interval
from optuna_dsat.words import metric_in_words, range_in_words

if TYPE_CHECKING:
    from optuna_dsat.launch.measurement import LaunchRecord

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
    """Return the speed of a configuration at a value of its metric."""
    measured = metrics.get(metric)
    if not measured or not value:
        return Speed(metric=metric, value=value, device=device)
    return Speeds(None, metric=metric, device=device).of(metrics, {}, value=measured).at(value)


class Speeds:
    """Makes speeds; tokens per sample are learnt from launches, where all their inputs are tokens."""

    def __init__(self, profile: ModelProfile | None, *, metric: str, device: str) -> None:
        self._profile = profile
        self._metric = metric
        self._device = device
        self._tokens_per_sample: float | None = None

    def learn(self, record: LaunchRecord) -> None:
        """Note how many tokens the samples of a launch have."""
        counted = [step for step in record.counted if step.samples > 0]
        if counted and all(step.elements_are_tokens and step.elements > 0 for step in counted):
            tokens = sum(step.elements for step in counted)
            self._tokens_per_sample = tokens / sum(step.samples for step in counted)

    def of(self, metrics: Mapping[str, float], config: Mapping[str, Any], *, value: float) -> Speed:
        """Return the speed of a configuration."""
        result = Speed(metric=self._metric, value=value, device=self._device)
        samples_per_s = metrics.get("throughput")
        if not samples_per_s:
            return result
        tokens_per_s = metrics.get("tokens_per_s")  # older studies have it where inputs vary in size
        if tokens_per_s is None and self._tokens_per_sample is not None:
            tokens_per_s = samples_per_s * self._tokens_per_sample
        share = metrics.get(UTILISATION)
        if share is None and self._profile is not None:
            share = utilisation(self._profile, config, metrics)
        return replace(result, samples_per_s=samples_per_s, tokens_per_s=tokens_per_s, utilisation=share)


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
