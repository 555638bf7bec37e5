"""Compare the first losses of a faster config and the user's config: it must train alike.

Both are launched with the user's micro-batch and accumulation steps, so each step sees the same samples; only ZeRO,
offload and buckets differ. The user's config is launched twice: the difference between its runs is the randomness of
the script, which is the limit of detection.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from optuna_dsat.config import ds_config
from optuna_dsat.launch.measurement import LaunchRecord
from optuna_dsat.launch.protocol import LaunchReport, LaunchRequest
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.overlay import is_bf16
from optuna_dsat.study.requests import launch_request
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.words import outcome_in_words

STEPS = 5
"""First global steps whose losses are compared."""
STEPS_OF_NUMBERS = 20
"""First global steps that are compared where a config changes numbers: differences accumulate."""

TOLERANCES: Mapping[str, float] = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 2e-2}
"""Precision -> largest relative difference of two losses that it explains. The unit roundoffs are 6e-8, 4.9e-4 and
3.9e-3 (IEEE 754; bfloat16 has 8 bits of precision); another order of summation and a few optimizer steps multiply them.
The factors, about 1,000 in fp32 and 5 to 20 in half precision, are ours.
"""


_LAUNCHES = "loss-"
"""Prefix of the launch identifiers."""


def is_of_losses(launch_id: str) -> bool:
    """Whether a launch compares losses; such launches are stored with the confirmation's launches."""
    return launch_id.startswith(_LAUNCHES)


@dataclass(frozen=True, kw_only=True)
class LossCheck:
    """Losses of the first steps and their comparison."""

    agrees: bool | None
    """None if undecided: a launch failed, the script's losses were not observed, or its own runs differ."""
    message: str
    """The outcome in a sentence."""
    precision: str
    """``fp32``, ``fp16`` or ``bf16``."""
    tolerance: float
    """Largest relative difference that passes."""
    difference: float | None = None
    """Largest relative difference between the best config's losses and the user's; None if they cannot be compared."""
    own_difference: float | None = None
    """Largest relative difference between two runs of the user's config; None if they cannot be compared."""
    losses: Mapping[str, Sequence[float]]
    """``user``, ``user_again``, ``best`` -> loss of each step, the mean over ranks of its last micro-batch."""


def check_loss(
    spec: StudySpec,
    best: Mapping[str, Any],
    *,
    data_parallel_size: int,
    launch: Callable[[LaunchRequest], tuple[LaunchRecord, LaunchReport]],
    name: str = "",
    steps: int = STEPS,
    known: Mapping[str, Sequence[float]] = MappingProxyType({}),
) -> LossCheck:
    """Launch the user's config twice and the best config once, at the user's batch; compare their first losses.

    ``name`` distinguishes several checks of a study; ``known`` are losses of the user's config in an earlier check of
    as many steps.

    Raises:
        DeviceError: If other processes occupy the slots for too long.
    """
    user = ds_config.effective(spec.ds_config)
    triangle = ds_config.batch_triangle(user, world_size=data_parallel_size)
    batch = ds_config.batch_overlay(triangle.micro_batch, triangle.gradient_accumulation_steps)
    zero = best.get("zero_optimization", {})
    best_overlay = {**_changes(user, {"zero_optimization": zero, **best}), **batch}
    if ds_config.precision_of(best) == "bf16" and "fp16" not in best:
        best_overlay["fp16"] = None
    precision = max(_precision(user), _precision(best), key=lambda name: TOLERANCES[name])
    counted = [_steps_of_an_update(ds_config.zero_section(config)) for config in (user, ds_config.merge(user, best))]
    user_every, every = (count // math.gcd(*counted) for count in counted)
    steps = max(steps, user_every * every)
    losses: dict[str, Sequence[float]] = dict(known)
    for which, overlay in (("user", batch), ("user_again", batch), ("best", best_overlay)):
        if which in known:
            continue
        request = launch_request(
            spec,
            launch_id=f"{_LAUNCHES}{name and f'{name}-'}{which.replace('_', '-')}",
            purpose="confirm",
            overlay=overlay,
            start_profile_step=1,
            end_profile_step=steps // (every if which == "best" else user_every),
        )
        record, report = launch(request)
        if report.outcome is not Outcome.MEASURED:
            ended = outcome_in_words(report.outcome)
            why = f"the launch {request.launch_id} ended with {ended} ({report.message})"
            return _undecided(precision, losses, why)
        boundaries = record.boundaries[:steps]  # skipped steps too: the data of each step are the same
        losses[which] = [step.loss for step in boundaries if step.loss is not None]
    for which, factor in (("user", every), ("user_again", every), ("best", user_every)):
        losses[which] = losses[which][factor - 1 :: factor]
    return compare(losses, precision=precision, rounds_weights=is_bf16(best) and not is_bf16(user))


def _changes(user: Mapping[str, Any], best: Mapping[str, Any]) -> dict[str, Any]:
    """Return the overlay that gives the keys of a config its values; None removes what its sections lack."""
    result: dict[str, Any] = {}
    for key, value in best.items():
        present = user.get(key)
        if value != present and isinstance(value, Mapping) and isinstance(present, Mapping):
            result[key] = {**dict.fromkeys(present.keys() - value.keys()), **value}
        elif value != present:
            result[key] = value
    return result


def _steps_of_an_update(zero: Mapping[str, Any]) -> int:
    """Return the steps of the script that DeepSpeed counts as a step: ZenFlow's between updates on the host, else 1."""
    zenflow = zero.get("zenflow")
    interval = zenflow.get("update_interval") if isinstance(zenflow, Mapping) else 1
    return max(1, interval) if isinstance(interval, int) else 1


def nothing_to_compare(spec: StudySpec) -> LossCheck:
    """Return the check for a result that is the user's config, without a launch."""
    precision = _precision(ds_config.effective(spec.ds_config))
    return LossCheck(
        agrees=True,
        message="Your config is the result, so there are no other losses to compare its own with.",
        precision=precision,
        tolerance=TOLERANCES[precision],
        losses={},
    )


def compare(losses: Mapping[str, Sequence[float]], *, precision: str, rounds_weights: bool = False) -> LossCheck:
    """Compare the losses of ``best`` and ``user``, step by step, given the difference between the user's two runs.

    ``rounds_weights``: only the best config rounds its weights to bf16. Updates below half the spacing of bf16 numbers
    act only once they have added up in the optimizer's fp32 copy, so that the loss lags behind. A lag of up to a step,
    the mean change of the user's loss per step, is allowed.
    """
    counts = {name: len(values) for name, values in losses.items()}
    if len(set(counts.values())) != 1 or not counts["user"]:
        return _undecided(precision, losses, "the script's losses could not be seen at every step")
    tolerance = TOLERANCES[precision]
    repeated = _difference(losses["user"], losses["user_again"])
    user = losses["user"]
    late = 0.0
    if rounds_weights and len(user) > 1 and all(map(math.isfinite, user)):
        late = abs(user[0] - user[-1]) / (len(user) - 1)
    difference = _difference(user, losses["best"], late=late)
    agrees: bool | None = False
    message = (
        f"The first losses differ by {difference:.1e}, more than {precision} explains ({tolerance:g}): "
        "look at them before you train with this config."
    )
    if difference <= tolerance:
        alike = f"agree within {difference:.1e} ({precision} allows {tolerance:g})" if difference else "are the same"
        agrees, message = True, f"The first {counts['user']} losses {alike}{', up to a step late' if late else ''}."
    elif repeated > tolerance:
        agrees = None
        message = (
            f"Whether the losses agree is unknown: two runs of your config differ by {repeated:.1e}. "
            "Have the script set its seeds."
        )
    return LossCheck(
        agrees=agrees,
        message=message,
        precision=precision,
        tolerance=tolerance,
        difference=difference,
        own_difference=repeated,
        losses=losses,
    )


def _difference(first: Sequence[float], second: Sequence[float], *, late: float = 0.0) -> float:
    """Return the largest relative difference of two sequences of losses beyond a difference of ``late``.

    Infinite if only one of a pair is finite.
    """
    return max(_relative_difference(a, b, late=late) for a, b in zip(first, second, strict=True))


def _relative_difference(a: float, b: float, *, late: float) -> float:
    if not (math.isfinite(a) and math.isfinite(b)):
        return 0.0 if repr(a) == repr(b) else math.inf
    return max(0.0, abs(a - b) - late) / max(abs(a), abs(b), 1e-12)


def _precision(config: Mapping[str, Any]) -> str:
    enabled = [key for key in ("fp16", "bf16") if (config.get(key) or {}).get("enabled") in (True, ds_config.AUTO)]
    return enabled[0] if enabled else "fp32"


def _undecided(precision: str, losses: Mapping[str, Sequence[float]], why: str) -> LossCheck:
    return LossCheck(
        agrees=None,
        message=f"Whether the losses agree is unknown: {why}.",
        precision=precision,
        tolerance=TOLERANCES[precision],
        losses=losses,
    )
