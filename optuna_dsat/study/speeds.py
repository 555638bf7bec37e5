"""How fast the configurations of a study are, for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optuna_dsat.cost.memory import ModelProfile
from optuna_dsat.cost.utilisation import utilisation
from optuna_dsat.launch.measurement import LaunchRecord
from optuna_dsat.metrics import Speed

__all__ = ["Speeds"]


class Speeds:
    """Makes speeds of metrics; tokens per sample are learnt from launches, where all their inputs are tokens.

    Args:
        profile: The study's profile; None if what it tells is not needed.
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
        tokens_per_s = metrics.get("tokens_per_s")  # where inputs vary in size
        if tokens_per_s is None and self._tokens_per_sample is not None:
            tokens_per_s = samples_per_s * self._tokens_per_sample
        share = None if self._profile is None else utilisation(self._profile, config, metrics)
        return Speed(samples_per_s=samples_per_s, tokens_per_s=tokens_per_s, utilisation=share)
