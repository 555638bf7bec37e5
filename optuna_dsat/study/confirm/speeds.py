"""How fast the configurations of a study are, for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from optuna_dsat.cost.memory import ModelProfile
from optuna_dsat.cost.utilisation import utilisation
from optuna_dsat.metrics import LARGER_IS_BETTER, UTILISATION, Speed
from optuna_dsat.words import metric_in_words, speed_in_words

if TYPE_CHECKING:
    from optuna_dsat.launch.measurement import LaunchRecord

__all__ = ["Speeds", "samples_in_words", "speed_at", "value_in_words", "with_utilisation"]


class Speeds:
    """Makes speeds of metrics; tokens per sample are learnt from launches, where all their inputs are tokens.

    Args:
        profile: The study's profile; None if it is not needed.
    """

    def __init__(self, profile: ModelProfile | None) -> None:
        self._profile = profile
        self._tokens_per_sample: float | None = None

    def learn(self, record: LaunchRecord) -> None:
        """Note how many tokens the samples of a launch have."""
        counted = [step for step in record.counted if step.samples > 0]
        if counted and all(step.elements_are_tokens and step.elements > 0 for step in counted):
            tokens = sum(step.elements for step in counted)
            self._tokens_per_sample = tokens / sum(step.samples for step in counted)

    def of(self, metrics: Mapping[str, float], config: Mapping[str, Any]) -> Speed | None:
        """Return the speed that metrics tell; None if they lack it.

        Args:
            metrics: The metrics of a configuration.
            config: Its DeepSpeed config.
        """
        samples_per_s = metrics.get("throughput")
        if not samples_per_s:
            return None
        tokens_per_s = metrics.get("tokens_per_s")  # older studies have it where inputs vary in size
        if tokens_per_s is None and self._tokens_per_sample is not None:
            tokens_per_s = samples_per_s * self._tokens_per_sample
        share = metrics.get(UTILISATION)
        if share is None and self._profile is not None:
            share = utilisation(self._profile, config, metrics)
        return Speed(samples_per_s=samples_per_s, tokens_per_s=tokens_per_s, utilisation=share)


def with_utilisation(
    metrics: Mapping[str, float], *, profile: ModelProfile, config: Mapping[str, Any]
) -> dict[str, float]:
    """Return the metrics of a launch with the share of the GPU's peak that they come to, where that is known.

    Args:
        metrics: The metrics.
        profile: The study's profile.
        config: The DeepSpeed config of the launch.
    """
    share = utilisation(profile, config, metrics)
    return {**metrics} if share is None else {**metrics, UTILISATION: share}


def speed_at(metrics: Mapping[str, float], value: float, *, metric: str) -> Speed | None:
    """Return how fast a configuration is where its metric has a value; None if its metrics do not tell.

    What a launch measured goes together: samples/s grow as FLOPS do, and as the duration of a step shrinks.

    Args:
        metrics: All metrics of one launch of it.
        value: The metric of others, such as the mean of rounds.
        metric: The metric that is optimised.
    """
    speed, measured = Speeds(None).of(metrics, {}), metrics.get(metric)
    if speed is None or not measured or not value:
        return None
    if metric in LARGER_IS_BETTER:
        return speed.times(value / measured)
    if metric == "latency":
        return speed.times(measured / value)
    return speed if value == measured else None


def value_in_words(metrics: Mapping[str, float], value: float, *, metric: str, device: str) -> str:
    """Return how fast a configuration is, samples/s first, where its metric has a value; the metric alone if unknown.

    Args:
        metrics: As for ``speed_at``.
        value: As for ``speed_at``.
        metric: As for ``speed_at``.
        device: ``cuda`` or ``cpu``.
    """
    speed = speed_at(metrics, value, metric=metric)
    if speed is None:
        return metric_in_words(metric, value, device=device)
    return speed_in_words(speed, metric=metric, value=value, device=device)


def samples_in_words(metrics: Mapping[str, float], value: float, *, metric: str, device: str) -> str:
    """Return the same as ``value_in_words``, of what grows with samples/s only these: for columns of a table."""
    speed = speed_at(metrics, value, metric=metric) if metric in LARGER_IS_BETTER else None
    if speed is None:
        return value_in_words(metrics, value, metric=metric, device=device)
    return metric_in_words("throughput", speed.samples_per_s)
