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
"""A finalist ends once the relative error of its step time is below this."""

_LONG_S, _FEWEST_LONG_STEPS = 5.0, 5
"""A finalist with long steps ends after this many seconds of counted steps, and no fewer than this many steps."""


@dataclass(frozen=True, kw_only=True)
class Finalist:
    """A configuration measured again."""

    number: int
    """Number of the trial that it confirms."""
    value: float | None
    """The metric over all counted steps; None if the launch did not finish."""
    low: float | None
    """Lower end of the 95 % confidence interval; None if ``value`` is."""
    high: float | None
    """Its upper end."""
    metrics: Mapping[str, float]
    """All metrics by name; empty if the launch did not finish."""
    steps: int
    """Counted steps."""
    outcome: str
    message: str

    def to_json(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return asdict(self)


def standing_of(trial: FrozenTrial, finalist: Finalist | None) -> Standing:
    """Return the standing of a measured trial: its confirmed metric, or that of the search if it has none.

    Args:
        trial: A measured trial.
        finalist: Its confirmation; None if there is none.
    """
    if finalist is None or finalist.value is None:
        return Standing(trial=trial, value=float(trial.values[0]))
    return Standing(trial=trial, value=finalist.value, low=finalist.low, high=finalist.high)


def confirmation_steps(spec: StudySpec) -> int:
    """Return the usual limit on the counted steps of a confirmation: five times a trial's, at least ten.

    Long steps end it earlier; ``--adaptive-steps`` allows more while the step time is uncertain.
    """
    return max(10, 5 * _trial_steps(spec))


def _is_known(steps: Sequence[GlobalStep]) -> bool:
    return is_certain(steps, tolerance=_STEP_TOLERANCE)


def _is_known_or_long(steps: Sequence[GlobalStep]) -> bool:
    """Whether the step time is known, or further steps cost more than they improve the estimate."""
    long = len(steps) >= _FEWEST_LONG_STEPS and sum(step.latency_s for step in steps) >= _LONG_S
    return long or _is_known(steps)


def confirmation_end(spec: StudySpec) -> int:
    """Return the last step of a confirmation."""
    return spec.start_profile_step + max(confirmation_steps(spec), spec.adaptive_steps or 0) - 1


def _trial_steps(spec: StudySpec) -> int:
    """Return the number of steps that a trial counts."""
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
    """Launch each candidate once more, alone, with more steps; yield the finalists in the same order.

    Args:
        spec: The study.
        candidates: Measured trials.
        launcher: Where to launch.
        metric: The metric that is optimised.
        flops_per_sample: FLOPs of forward and backward, per sample.
        on_report: Called after each launch.
        on_start: Called before each launch.
        on_step: Called with each global step.
        wait: As for ``follow``.

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
            trial, record, report, metric=metric, flops_per_sample=flops_per_sample, min_steps=_trial_steps(spec)
        )


def _finalist(
    trial: FrozenTrial,
    record: LaunchRecord,
    report: LaunchReport,
    *,
    metric: str,
    flops_per_sample: float,
    min_steps: int,
) -> Finalist:
    """Return the result of a confirmation; if the script's data ended early, ``min_steps`` counted steps suffice."""
    short_of_data = report.outcome is Outcome.OUT_OF_DATA and len(record.counted) >= max(2, min_steps)
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
    """Return the winner: the best finalist, or the best trial if no finalist finished.

    With posterior means, a finalist scores the geometric mean of its posterior mean and its confirmed metric: launches
    vary by one or two per cent, so a posterior that rests on many launches is no less accurate than a single one.

    Args:
        candidates: Measured trials, best first.
        finalists: What was measured again.
        maximize: Whether a larger metric is better.
        posterior_means: Trial number -> posterior mean of the metric; None if the method has no posterior.

    Returns:
        The winning trial and its confirmation, None if it was not confirmed.

    Raises:
        ValueError: If there is no candidate.
    """
    if not candidates:
        raise ValueError("there is no measured trial to choose from")
    finished = [f for f in finalists if f.value is not None]
    if not finished:
        return candidates[0], None
    best = (max if maximize else min)(finished, key=lambda f: _score(f, posterior_means or {}))
    return next(t for t in candidates if t.number == best.number), best


def _score(finalist: Finalist, posterior_means: Mapping[int, float]) -> float:
    confirmed = finalist.value or 0.0
    return math.sqrt(confirmed * posterior_means.get(finalist.number, confirmed))
