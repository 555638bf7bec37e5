"""Whether the first losses under the best config are those under the user's: training must not change with the speed.

Both are launched with the user's own micro-batch and accumulation, so each step sees the same samples; what differs is
ZeRO, offload and buckets. The user's config is launched twice: how far its two runs are apart is the script's own
randomness, below which nothing can be told.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optuna_dsat.config import ds_config
from optuna_dsat.launch.follow import follow
from optuna_dsat.launch.measurement import LaunchRecord
from optuna_dsat.launch.protocol import Launcher, LaunchReport
from optuna_dsat.launch.waiting import SlotWait
from optuna_dsat.outcome import Outcome
from optuna_dsat.study.launch_requests import launch_request
from optuna_dsat.study.spec import StudySpec

__all__ = ["TOLERANCES", "LossCheck", "check_loss", "compare"]

STEPS = 5
"""First global steps whose losses are compared."""

TOLERANCES: Mapping[str, float] = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 2e-2}
"""Relative difference of two losses that the precision explains. The unit roundoffs are 6e-8, 4.9e-4 and 3.9e-3 (IEEE
754; bfloat16 has 8 bits of precision); sums in another order and a few optimizer steps multiply them. The factors, some
thousand in fp32 and some five to twenty in half precision, are ours.
"""


@dataclass(frozen=True, kw_only=True)
class LossCheck:
    """Losses of the first steps, and what they say."""

    agrees: bool | None
    """None where it cannot be told: a launch failed, the script shows no loss, or its own runs differ."""
    message: str
    """One line for people."""
    precision: str
    """``fp32``, ``fp16`` or ``bf16``."""
    tolerance: float
    """Largest relative difference that passes."""
    difference: float | None
    """Largest relative difference between the best config's losses and the user's."""
    own_difference: float | None
    """The same between two runs of the user's config."""
    losses: Mapping[str, Sequence[float]]
    """``user``, ``user_again`` and ``best``: loss of each step, the mean over ranks of its last micro-batch."""


def check_loss(
    spec: StudySpec,
    best: Mapping[str, Any],
    *,
    data_parallel_size: int,
    launcher: Launcher,
    on_report: Callable[[LaunchReport, LaunchRecord], None],
    wait: SlotWait | None = None,
) -> LossCheck:
    """Launch the user's config twice and the best one once, at the user's batch; compare their first losses.

    Args:
        spec: The study.
        best: The winning DeepSpeed config.
        data_parallel_size: Ranks that consume different samples.
        launcher: Where to launch.
        on_report: Called after each launch.
        wait: Says who holds the slots, and how long that is waited for.

    Raises:
        DeviceError: If others hold the slots for too long.
    """
    user = ds_config.effective(spec.ds_config)
    triangle = ds_config.batch_triangle(user, world_size=data_parallel_size)
    batch = ds_config.batch_overlay(triangle.micro_batch, triangle.gradient_accumulation_steps)
    zero = best.get("zero_optimization", {})
    removed = user.get("zero_optimization", {}).keys() - zero.keys()
    added = {key: value for key, value in best.items() if key not in user}
    overlay = {**added, **batch, "zero_optimization": {**dict.fromkeys(removed), **zero}}
    losses: dict[str, Sequence[float]] = {}
    for name, laid_over in (("user", batch), ("user_again", batch), ("best", overlay)):
        request = launch_request(
            spec,
            launch_id=f"loss-{name.replace('_', '-')}",
            purpose="confirm",
            overlay=laid_over,
            start_profile_step=1,
            end_profile_step=STEPS,
        )
        record, report = follow(launcher, request, wait=wait)
        on_report(report, record)
        if report.outcome is not Outcome.MEASURED:
            return _untold(user, losses, f"the launch {request.launch_id} ended with {report.outcome.value}")
        losses[name] = [step.loss for step in record.steps if step.loss is not None]
    return compare(losses, precision=_precision(user))


def compare(losses: Mapping[str, Sequence[float]], *, precision: str) -> LossCheck:
    """Say whether the losses of ``best`` are those of ``user``, given how far ``user_again`` is from ``user``.

    Args:
        losses: Loss of each step of the three launches.
        precision: ``fp32``, ``fp16`` or ``bf16``.
    """
    counts = {name: len(found) for name, found in losses.items()}
    if len(set(counts.values())) != 1 or not counts["user"]:
        return _untold_at(precision, losses, "the script's losses could not be seen at every step")
    tolerance = TOLERANCES[precision]
    own = _apart(losses["user"], losses["user_again"])
    difference = _apart(losses["user"], losses["best"])
    known: dict[str, Any] = {
        "precision": precision,
        "tolerance": tolerance,
        "difference": difference,
        "own_difference": own,
    }
    if difference <= tolerance:
        message = f"The first {counts['user']} losses agree within {difference:.1e} ({precision} allows {tolerance:g})."
        return LossCheck(agrees=True, message=message, losses=losses, **known)
    if own > tolerance:
        message = (
            f"Whether the losses agree cannot be told: two runs of your own config differ by {own:.1e}. "
            "Have the script set its seeds."
        )
        return LossCheck(agrees=None, message=message, losses=losses, **known)
    message = (
        f"The first losses differ by {difference:.1e}, more than {precision} explains ({tolerance:g}): "
        "look at them before you train with this config."
    )
    return LossCheck(agrees=False, message=message, losses=losses, **known)


def _apart(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the largest relative difference of two rows of losses; infinite where one alone is not a number."""
    return max(_relative(a, b) for a, b in zip(first, second, strict=True))


def _relative(a: float, b: float) -> float:
    if not (math.isfinite(a) and math.isfinite(b)):
        return 0.0 if repr(a) == repr(b) else math.inf
    return abs(a - b) / max(abs(a), abs(b), 1e-12)


def _precision(config: Mapping[str, Any]) -> str:
    enabled = [key for key in ("fp16", "bf16") if (config.get(key) or {}).get("enabled") in (True, ds_config.AUTO)]
    return enabled[0] if enabled else "fp32"


def _untold(config: Mapping[str, Any], losses: Mapping[str, Sequence[float]], why: str) -> LossCheck:
    return _untold_at(_precision(config), losses, why)


def _untold_at(precision: str, losses: Mapping[str, Sequence[float]], why: str) -> LossCheck:
    return LossCheck(
        agrees=None,
        message=f"Whether the losses agree cannot be told: {why}.",
        precision=precision,
        tolerance=TOLERANCES[precision],
        difference=None,
        own_difference=None,
        losses=losses,
    )
