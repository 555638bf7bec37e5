"""The finalists: the best few configurations measured again with more steps, so that noise does not pick the winner."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from optuna.trial import FrozenTrial

from optuna_dsat.launch.follow import follow
from optuna_dsat.launch.measurement import GlobalStep, LaunchRecord, confidence_interval, is_certain
from optuna_dsat.launch.protocol import Launcher, LaunchReport, LaunchRequest
from optuna_dsat.launch.waiting import SlotWait
from optuna_dsat.outcome import Outcome
from optuna_dsat.study.launch_requests import launch_request
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.study.standing import Standing
from optuna_dsat.trials import attributes

__all__ = ["Finalist", "choose_winner", "confirm", "confirmation_end", "confirmation_steps", "standing_of"]


_STEP_TOLERANCE = 0.005
"""A finalist ends once its step time is known to half a percent, either way."""

_LONG_S, _FEWEST_LONG_STEPS = 5.0, 5
"""Where steps are long, a finalist ends after this many seconds of at least so many counted steps."""


@dataclass(frozen=True, kw_only=True)
class Finalist:
    """A configuration measured again."""

    number: int
    """Number of the trial that it confirms."""
    value: float | None
    """The metric over all counted steps; None where the launch did not finish."""
    low: float | None
    """Lower end of the 95 % confidence interval."""
    high: float | None
    metrics: Mapping[str, float]
    steps: int
    """Counted steps."""
    outcome: str
    message: str

    def to_json(self) -> dict[str, Any]:
        """Return what the constructor takes."""
        return asdict(self)


def standing_of(trial: FrozenTrial, again: Finalist | None) -> Standing:
    """Return where a measured trial stands, by its confirmation where that was measured to its end."""
    if again is None or again.value is None:
        return Standing(trial=trial, value=float(trial.values[0]))
    return Standing(trial=trial, value=again.value, low=again.low, high=again.high)


def confirmation_steps(spec: StudySpec) -> int:
    """Return how many steps a confirmation counts at most: five times a trial's, at least ten.

    Fewer are counted where they are long; ``--adaptive-steps`` allows more to one whose step time is still uncertain.
    """
    return max(10, 5 * _trial_steps(spec))


def _is_known(steps: Sequence[GlobalStep]) -> bool:
    return is_certain(steps, tolerance=_STEP_TOLERANCE)


def _is_known_or_long(steps: Sequence[GlobalStep]) -> bool:
    """Whether the step time is known, or has been measured for long: a further step would cost more than it tells."""
    long = len(steps) >= _FEWEST_LONG_STEPS and sum(step.latency_s for step in steps) >= _LONG_S
    return long or _is_known(steps)


def confirmation_end(spec: StudySpec) -> int:
    """Return the last step of a confirmation."""
    return spec.start_profile_step + max(confirmation_steps(spec), spec.adaptive_steps or 0) - 1


def _trial_steps(spec: StudySpec) -> int:
    """Return how many steps a trial counts."""
    return spec.end_profile_step - spec.start_profile_step + 1


def confirm(
    spec: StudySpec,
    candidates: Sequence[FrozenTrial],
    *,
    launcher: Launcher,
    metric: str,
    flops_per_sample: float,
    on_report: Callable[[LaunchReport, LaunchRecord, FrozenTrial], None],
    on_start: Callable[[FrozenTrial, LaunchRequest], None] = lambda *_: None,
    on_step: Callable[[FrozenTrial, GlobalStep], None] = lambda *_: None,
    wait: SlotWait | None = None,
) -> Iterator[Finalist]:
    """Launch each candidate once more, alone, with more steps; yield what was measured, in the same order.

    Raises:
        DeviceError: If others hold the slots for longer than ``wait`` allows.
    """
    for trial in candidates:
        request = launch_request(
            spec,
            launch_id=f"confirm-{trial.number:04d}",
            purpose="confirm",
            overlay=trial.user_attrs[attributes.OVERLAY],
            config=trial.user_attrs[attributes.CONFIG],
            end_profile_step=confirmation_end(spec),
        )
        if request.timeout_s is not None:
            request = replace(request, timeout_s=5 * request.timeout_s)
        on_start(trial, request)
        enough = _is_known_or_long if spec.adaptive_steps is None else _is_known
        stepped = functools.partial(on_step, trial)
        record, report = follow(launcher, request, enough=enough, on_step=stepped, wait=wait)
        on_report(report, record, trial)
        yield _finalist(
            trial, record, report, metric=metric, flops_per_sample=flops_per_sample, enough=_trial_steps(spec)
        )


def _finalist(
    trial: FrozenTrial,
    record: LaunchRecord,
    report: LaunchReport,
    *,
    metric: str,
    flops_per_sample: float,
    enough: int,
) -> Finalist:
    """Return what a confirmation showed; where the script's data ended early, ``enough`` steps confirm, too."""
    short_of_data = report.outcome is Outcome.OUT_OF_DATA and len(record.counted) >= max(2, enough)
    if report.outcome is not Outcome.MEASURED and not short_of_data:
        return Finalist(
            number=trial.number,
            value=None,
            low=None,
            high=None,
            metrics={},
            steps=len(record.counted),
            outcome=report.outcome.value,
            message=report.message,
        )
    interval = confidence_interval(
        record.counted, metric, flops_per_sample=flops_per_sample, world_size=record.world_size
    )
    return Finalist(
        number=trial.number,
        value=interval.value,
        low=interval.low,
        high=interval.high,
        metrics=record.metrics(flops_per_sample=flops_per_sample),
        steps=len(record.counted),
        outcome=report.outcome.value,
        message=report.message,
    )


def choose_winner(
    candidates: Sequence[FrozenTrial],
    finalists: Sequence[Finalist],
    *,
    maximize: bool,
    posterior_means: Mapping[int, float] | None = None,
) -> tuple[FrozenTrial, Finalist | None]:
    """Return the winner: the best finalist; without any that finished, the best trial.

    Where there is a belief, a finalist counts with the geometric mean of what was believed before and what its launch
    showed: launches differ by a per cent or two from one to the next, and a belief that rests on many of them errs no
    more than one.

    Args:
        candidates: Measured trials, best first.
        finalists: What was measured again.
        maximize: Whether a larger metric is better.
        posterior_means: Trial number -> what the metric was believed to be.

    Raises:
        ValueError: If there is no candidate.
    """
    if not candidates:
        raise ValueError("there is no measured trial to choose from")
    finished = [f for f in finalists if f.value is not None]
    if not finished:
        return candidates[0], None
    best = (max if maximize else min)(finished, key=lambda f: _worth(f, posterior_means or {}))
    return next(t for t in candidates if t.number == best.number), best


def _worth(finalist: Finalist, posterior_means: Mapping[int, float]) -> float:
    shown = finalist.value or 0.0
    return math.sqrt(shown * posterior_means.get(finalist.number, shown))
