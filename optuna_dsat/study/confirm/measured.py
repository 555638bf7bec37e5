"""A measured configuration of a study: the one type that verdict, result, report and commands show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from optuna.trial import FrozenTrial

from optuna_dsat.metrics import Interval
from optuna_dsat.study.confirm.speeds import Speed, speed_of
from optuna_dsat.trials import attributes
from optuna_dsat.words import config_in_words


def configuration_of(trial: FrozenTrial) -> str:
    """Describe a launched trial's configuration, with the knobs that differ from the user's config."""
    stored = trial.user_attrs.get(attributes.CONFIGURATION)
    return str(stored) if stored else config_in_words(trial.user_attrs[attributes.CONFIG])


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A configuration as the rounds measured it, or as the search did."""

    trial: FrozenTrial
    train_batch_size: int
    """Its global batch, in samples."""
    interval: Interval
    """The optimised metric: the geometric mean of its rounds, or the value of the search."""
    metrics: Mapping[str, float]
    """All metrics by name, of the same launches."""
    speed_up: Interval | None = None
    """Ratio to the user's config: paired in rounds, or by the search; None if the user's config was not measured."""
    differing: int = 0
    """Number of settings that differ from the user's config, batch sizes included; counted for finalists."""
    steps: int = 0
    """Counted steps of its launches in rounds."""
    left: str = ""
    """Reason for which it was dropped from the rounds; empty while it is compared."""

    @property
    def number(self) -> int:
        """Number of its trial."""
        return self.trial.number

    @property
    def words(self) -> str:
        """Its configuration."""
        return configuration_of(self.trial)

    @property
    def value(self) -> float:
        """The optimised metric."""
        return self.interval.value

    @property
    def rounds(self) -> int:
        """Rounds that measured it; 0 for a value of the search."""
        return self.interval.rounds

    @property
    def is_user_config(self) -> bool:
        """Whether it is the user's config."""
        return self.trial.user_attrs.get(attributes.PURPOSE) == attributes.USER_CONFIG

    @property
    def samples_per_s(self) -> float | None:
        """Samples/s over all ranks; None if unknown."""
        return self.metrics.get("throughput") or None

    @property
    def step_s(self) -> float | None:
        """Seconds of an optimizer step, end to end; None if unknown."""
        return self.metrics.get("latency") or None

    @property
    def peak_bytes(self) -> int:
        """Peak device memory of the worst rank in the search; 0 if unknown."""
        return int(self.trial.user_attrs.get(attributes.PEAK_BYTES) or 0)

    @property
    def searched_value(self) -> float:
        """The metric as the search measured it."""
        return float(self.trial.values[0])

    @property
    def searched_metrics(self) -> Mapping[str, float]:
        """All metrics as the search measured them."""
        return self.trial.user_attrs.get(attributes.METRICS) or {}

    def speed(self, *, metric: str, device: str) -> Speed:
        """Return its speed."""
        return speed_of(self.metrics, self.value, metric=metric, device=device)

    def to_json(self) -> dict[str, Any]:
        """Return the plain values of a finalist."""
        return {
            "number": self.number,
            "train_batch_size": self.train_batch_size,
            "differing": self.differing,
            "rounds": self.rounds,
            "value": self.value,
            "low": self.interval.low,
            "high": self.interval.high,
            "ratio": None if self.speed_up is None else asdict(self.speed_up),
            "left": self.left,
        }
