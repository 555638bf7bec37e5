"""A measured configuration of a study: the one type that verdict, result, report and commands show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from optuna.trial import FrozenTrial

from optuna_dsat.config.differences import lossy_settings
from optuna_dsat.metrics import Interval
from optuna_dsat.study.confirm.rounds import Rounds
from optuna_dsat.study.confirm.speeds import Speed, speed_of
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.trials import attributes
from optuna_dsat.words import config_in_words, knob_in_words


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
    failed: bool = False
    """Whether that reason is a failed launch."""

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
        return attributes.peak_bytes(self.trial)

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


def lossy_of(trial: FrozenTrial, spec: StudySpec) -> dict[str, Any]:
    """Return the settings of a trial that change numbers, as of ``lossy_settings``; empty if none is allowed."""
    allowed = "lossy" in (spec.allow or ()) and attributes.CONFIG in trial.user_attrs
    return lossy_settings(trial.user_attrs[attributes.CONFIG], spec.ds_config) if allowed else {}


def may_be_result(trial: FrozenTrial, rounds: Rounds, spec: StudySpec) -> bool:
    """Return whether a trial changes no numbers, or its losses were compared and agree."""
    settings = lossy_of(trial, spec)
    checked = rounds.checked(settings)
    return not settings or (checked is not None and checked.agrees)


def lossy_in_words(trials: Sequence[FrozenTrial], rounds: Rounds, spec: StudySpec) -> str:
    """Return the settings of trials that change numbers, with the comparison of their losses; empty without any."""
    texts = []
    for trial in trials:
        settings = lossy_of(trial, spec)
        if (checked := rounds.checked(settings)) is not None:
            texts.append(f"Trial {trial.number} changes numbers ({_settings(settings)}). {checked.check['message']}")
    return " ".join(dict.fromkeys(texts))


def rejected_in_words(rounds: Rounds) -> str:
    """Return the settings whose losses do not agree with those of the user's config; empty without any."""
    return " ".join(
        f"No result has {_settings(checked.settings)}: trial {checked.number} was compared. {checked.check['message']}"
        for checked in rounds.losses
        if not checked.agrees
    )


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(knob_in_words(name, value) for name, value in settings.items())
