"""What the tuner tells whoever watches: plain values, one class per kind of news."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from optuna_dsat.memory import ModelProfile
from optuna_dsat.outcome import Outcome

__all__ = [
    "FinalistMeasured",
    "Message",
    "News",
    "Observer",
    "ProfileFinished",
    "ProfileStarted",
    "SearchEnded",
    "SearchStarted",
    "TrialFinished",
    "TrialStarted",
    "TrialStepped",
]


@dataclass(frozen=True, kw_only=True)
class News:
    """Base of all news."""


Observer = Callable[[News], None]


@dataclass(frozen=True, kw_only=True)
class Message(News):
    """Something worth a line."""

    text: str


@dataclass(frozen=True, kw_only=True)
class ProfileStarted(News):
    """A profile launch begins."""

    rung: str


@dataclass(frozen=True, kw_only=True)
class ProfileFinished(News):
    """The profile is known."""

    profile: ModelProfile
    rung: str
    reused: bool
    largest_micro_batches: Mapping[int, int]
    """ZeRO stage (no offload) -> largest micro-batch that the memory model predicts, 0 where none fits."""


@dataclass(frozen=True, kw_only=True)
class SearchStarted(News):
    """The search begins or goes on."""

    study: str
    metric: str
    maximize: bool
    max_trials: int
    launched: int
    """Launches that earlier runs of this study made."""


@dataclass(frozen=True, kw_only=True)
class TrialStarted(News):
    """A trial was launched."""

    number: int
    words: str
    """Its configuration in words."""
    attempt: int
    end_profile_step: int


@dataclass(frozen=True, kw_only=True)
class TrialStepped(News):
    """A trial finished a global step."""

    number: int
    step: int
    samples_per_s: float


@dataclass(frozen=True, kw_only=True)
class TrialFinished(News):
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


@dataclass(frozen=True, kw_only=True)
class FinalistMeasured(News):
    """A finalist was measured again with more steps."""

    number: int
    words: str
    value: float | None
    low: float | None
    high: float | None
    message: str


@dataclass(frozen=True, kw_only=True)
class SearchEnded(News):
    """The search is over."""

    reason: str
    summary: Mapping[str, Any]
