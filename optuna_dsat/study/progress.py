"""Progress events of a study: plain values, a class per kind of event."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from optuna_dsat.cost.memory import ModelProfile
from optuna_dsat.outcome import Outcome
from optuna_dsat.signals import ENDING, handling, is_told_again
from optuna_dsat.study.confirm.speeds import Speed


@dataclass(frozen=True, kw_only=True)
class ProgressEvent:
    """Base of all events."""


Observer = Callable[[ProgressEvent], None]


@dataclass(frozen=True, kw_only=True)
class Message(ProgressEvent):
    """A line of text."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Phase(ProgressEvent):
    """The search enters a phase outside launches that may take long."""

    words: str
    """Such as ``building cpu_adam (first use only, may take minutes)``; empty once it is over."""
    said: bool = False
    """Whether a message also reports it."""


@dataclass(frozen=True, kw_only=True)
class ProfileStarted(ProgressEvent):
    """A profile launch begins."""

    words: str
    """Its ZeRO settings."""
    micro_batch: int = 1


@dataclass(frozen=True, kw_only=True)
class ProfileFinished(ProgressEvent):
    """The profile is known."""

    profile: ModelProfile
    measured_with: str
    """ZeRO settings of the launch, in words."""
    reused: bool
    pipeline: bool = False
    largest_micro_batches: Mapping[int, int]
    """ZeRO stage (no offload) -> largest micro-batch that the memory model predicts; 0 if none fits."""


@dataclass(frozen=True, kw_only=True)
class BestSoFar:
    """The best measured trial of a search, before any confirmation."""

    number: int
    words: str
    """Its configuration in words."""
    speed: Speed


@dataclass(frozen=True, kw_only=True)
class SearchStarted(ProgressEvent):
    """The search starts or is resumed."""

    study: str
    metric: str
    max_trials: int
    launched: int
    """Launches of earlier runs of this study."""
    side_by_side: int = 1
    """Maximum number of concurrent launches."""
    finalists: int = 0
    """Launches of the confirmation's first rounds, one at a time."""
    finalist_steps: float = 1.0
    """Ratio of the steps of a confirmation launch to the steps of a trial."""
    timeout_s: float | None = None
    """Seconds after which the search ends; None for no limit."""
    best: BestSoFar | None = None
    """Best trial of earlier runs of this study by the values of the search; None without any."""
    confirmed: BestSoFar | None = None
    """Trial selected by rounds of earlier runs, with its metric in the rounds; None if no rounds decided."""
    user_value: float | None = None
    """Metric of the user's config; None if no earlier run measured it."""
    device: str = "cuda"
    """``cuda`` or ``cpu``."""


@dataclass(frozen=True, kw_only=True)
class TrialStarted(ProgressEvent):
    """A trial was launched."""

    number: int
    words: str
    """Its configuration in words."""
    reason: str = ""
    """Why it was launched; empty if unknown."""
    attempt: int
    end_profile_step: int


@dataclass(frozen=True, kw_only=True)
class TrialPhase(ProgressEvent):
    """A launch enters a phase before its first step."""

    number: int | None
    """Trial; None for a profile."""
    words: str
    """Name of the phase, such as ``importing``."""


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
    """A trial was given to another worker because this worker sent no heartbeats."""

    number: int


@dataclass(frozen=True, kw_only=True)
class TrialFinished(ProgressEvent):
    """A trial's launch is over."""

    number: int
    words: str
    outcome: Outcome
    value: float | None
    speed_up: float | None
    """Relative to the user's config; None if the user's config was not measured."""
    best: bool
    """Whether this is the best so far."""
    message: str
    launched: int
    running: int = 0
    """Launches of the study that still run, other workers' included."""
    own: bool = False
    """Whether this is the user's config."""
    best_so_far: BestSoFar | None = None
    """Best trial of the whole study, other workers' included; None if nothing was measured."""
    user_value: float | None = None
    """Metric of the user's config; None if it was not measured."""
    speed: Speed | None = None
    """Speed of the counted steps; None without any."""


@dataclass(frozen=True, kw_only=True)
class FinalistStarted(ProgressEvent):
    """A finalist is launched again; ``TrialStepped`` follows for each step and ``FinalistMeasured`` at the end."""

    number: int
    words: str
    end_profile_step: int
    round: int = 1
    """Round of the confirmation, from 1."""
    launches: int = 0
    """Minimum number of launches in the rounds of all finalists, including this launch; 0 if unknown."""
    done: int | None = None
    """Finished launches of the rounds, including earlier runs of the study; None if unknown."""


@dataclass(frozen=True, kw_only=True)
class FinalistMeasured(ProgressEvent):
    """A finalist was measured again with more steps, in a round."""

    number: int
    words: str
    value: float | None
    low: float | None
    high: float | None
    message: str
    round: int = 1
    """Round of the confirmation, from 1."""
    speed: Speed | None = None
    """None if it was not measured."""


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay a first termination signal to the end of the block, where its handler is called; a second acts at once.

    Signals are ``ENDING``. Only the main thread receives them; in other threads this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in ENDING}
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        handler = handlers[signal.Signals(number)]
        if came and callable(handler) and not is_told_again(came[0], number):
            handler(number, frame)
        came.append(number)

    try:
        with handling([number for number, handler in handlers.items() if callable(handler)], note):
            yield
    finally:
        for item in came[:1]:
            handler = handlers[signal.Signals(item)]
            if callable(handler):
                handler(item, None)
