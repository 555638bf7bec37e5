"""What the tuner tells whoever watches: plain values, one class per kind of news."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from optuna_dsat.cost.memory import ModelProfile
from optuna_dsat.outcome import Outcome

__all__ = [
    "BestSoFar",
    "FinalistMeasured",
    "FinalistStarted",
    "Message",
    "Observer",
    "ProfileFinished",
    "ProfileStarted",
    "ProgressEvent",
    "SearchStarted",
    "TrialDropped",
    "TrialFinished",
    "TrialStarted",
    "TrialStepped",
]


@dataclass(frozen=True, kw_only=True)
class ProgressEvent:
    """Base of all news."""


Observer = Callable[[ProgressEvent], None]


@dataclass(frozen=True, kw_only=True)
class Message(ProgressEvent):
    """Something worth a line."""

    text: str


@dataclass(frozen=True, kw_only=True)
class ProfileStarted(ProgressEvent):
    """A profile launch begins."""

    words: str
    """Its ZeRO settings."""


@dataclass(frozen=True, kw_only=True)
class ProfileFinished(ProgressEvent):
    """The profile is known."""

    profile: ModelProfile
    measured_with: str
    """ZeRO settings of the launch, in words."""
    reused: bool
    largest_micro_batches: Mapping[int, int]
    """ZeRO stage (no offload) -> largest micro-batch that the memory model predicts, 0 where none fits."""


@dataclass(frozen=True, kw_only=True)
class BestSoFar:
    """The best measured trial of a study, by the few steps of the search."""

    number: int
    words: str
    """Its configuration in words."""
    value: float
    """Of the metric that is optimised."""
    samples_per_s: float | None
    """Over all ranks; None where that is not known."""


@dataclass(frozen=True, kw_only=True)
class SearchStarted(ProgressEvent):
    """The search begins or goes on."""

    study: str
    metric: str
    maximize: bool
    max_trials: int
    launched: int
    """Launches that earlier runs of this study made."""
    side_by_side: int = 1
    """Launches that may be in flight at once."""
    finalists: int = 0
    """Launches at the end that measure the best few again, one at a time."""
    finalist_steps: float = 1.0
    """How many times as many steps such a launch runs."""
    timeout_s: float | None = None
    """Seconds after which the search ends, None for never."""
    best: BestSoFar | None = None
    """What earlier runs of this study found."""
    user_value: float | None = None
    """Of the user's own config, where an earlier run measured it."""


@dataclass(frozen=True, kw_only=True)
class TrialStarted(ProgressEvent):
    """A trial was launched."""

    number: int
    words: str
    """Its configuration in words."""
    attempt: int
    end_profile_step: int


@dataclass(frozen=True, kw_only=True)
class TrialStepped(ProgressEvent):
    """A trial finished a global step."""

    number: int
    step: int
    samples_per_s: float
    peak_bytes: int = 0
    """Peak memory of the worst rank so far."""


@dataclass(frozen=True, kw_only=True)
class TrialDropped(ProgressEvent):
    """A trial was given to another worker, because this one was frozen or cut off for long."""

    number: int


@dataclass(frozen=True, kw_only=True)
class TrialFinished(ProgressEvent):
    """A trial's launch is over."""

    number: int
    words: str
    outcome: Outcome
    value: float | None
    speed_up: float | None
    """Against the user's own config, where that was measured."""
    best: bool
    """Whether this is the best so far."""
    message: str
    launched: int
    own: bool = False
    """Whether this is the user's own config."""
    best_so_far: BestSoFar | None = None
    """Of the whole study, whoever measured it; None while nothing was measured."""
    user_value: float | None = None
    """Of the user's own config, where it was measured."""


@dataclass(frozen=True, kw_only=True)
class FinalistStarted(ProgressEvent):
    """A finalist is launched again; its steps come as ``TrialStepped``, its end as ``FinalistMeasured``."""

    number: int
    words: str
    end_profile_step: int


@dataclass(frozen=True, kw_only=True)
class FinalistMeasured(ProgressEvent):
    """A finalist was measured again with more steps."""

    number: int
    words: str
    value: float | None
    low: float | None
    high: float | None
    message: str
