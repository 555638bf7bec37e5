"""Explanation of the winner as rows and sentences of the report."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass

from optuna_dsat.cost.step_time import PHASES
from optuna_dsat.report.explain.explanation import REMAINDER, TOGETHER, Contribution, Explanation, explained
from optuna_dsat.report.explain.prediction_gap import PredictionGap, prediction_gap
from optuna_dsat.report.view import StudyView
from optuna_dsat.words import bytes_in_words, metric_in_words, setting_in_words, things_in_words, times_in_words

_WORTH_A_ROW = 0.005
"""Minimum effect of a setting, relative to 1, for a separate row."""
_COMPUTE_BOUND = 0.7
"""Minimum share of a step at which computation is assumed to be the bottleneck."""
_IDLE_GPU = 0.3
"""Share of a GPU's peak FLOPS below which such a step is limited by the model, not by the GPU."""


@dataclass(frozen=True)
class FactorRow:
    """Contribution of a setting to the speed-up, or of several."""

    setting: str
    _: KW_ONLY
    own: str = ""
    """The user's value in the syntax of ``--fix``; empty if it does not apply there."""
    best: str = ""
    factor: str
    """Empty without a factor."""
    between: str = ""
    """Its 95% interval; empty without a factor."""
    by: str
    """Source of the factor, or the reason for a missing factor."""
    is_setting: bool = False
    """Whether ``setting`` is the name of a setting."""


@dataclass(frozen=True, kw_only=True)
class Why:
    """Explanation of the winner and its bottlenecks."""

    rows: tuple[FactorRow, ...]
    """Largest effect first; empty without a baseline."""
    told: tuple[str, ...]
    """Bottlenecks of the winner, and limitations of the numbers."""
    gap: PredictionGap | None
    """Comparison with the prediction from the device's data sheet; None without a prediction."""
    phases: tuple[tuple[str, str, str], ...]
    """Name, measured and predicted time of the parts of both steps."""


def why_of(view: StudyView) -> Why | None:
    """Return the explanation of a study's winner; None before a launch was measured."""
    explanation = explained(view)
    if explanation is None:
        return None
    gap = prediction_gap(view)
    return Why(
        rows=tuple(factor_rows(explanation)),
        told=tuple(told_of(explanation)),
        gap=gap,
        phases=() if gap is None else tuple(_phases(gap)),
    )


def _phases(gap: PredictionGap) -> Iterator[tuple[str, str, str]]:
    parts = [(name, gap.measured_phases[name], gap.predicted_phases[name]) for name in PHASES]
    for name, measured, predicted in [*parts, ("whole step", gap.measured_s, gap.predicted_s)]:
        shown = "outside these" if name == "other" else name
        yield shown, metric_in_words("latency", measured), metric_in_words("latency", predicted)


def factor_rows(explanation: Explanation) -> list[FactorRow]:
    """Return the factors of the speed-up, largest effect first; empty without a baseline."""
    if explanation.remainder is None or explanation.speed_up is None:
        return []
    small = [
        contribution
        for contribution in explanation.contributions
        if contribution.factor is not None and abs(contribution.factor - 1) < _WORTH_A_ROW
    ]
    if len(small) == 1:
        small = []
    rows = [_row(part) for part in explanation.contributions if part not in small]
    if small:
        names, product = ", ".join(part.knob for part in small), math.prod(part.factor or 1.0 for part in small)
        rows.append(FactorRow(f"{len(small)} more", factor=times_in_words(product), by=f"hardly any effect: {names}"))
    rows += [_row(part) for part in (explanation.together, explanation.remainder) if part is not None]
    return [*rows, FactorRow("all together", factor=times_in_words(explanation.speed_up), by="measured")]


def _row(contribution: Contribution) -> FactorRow:
    by = things_in_words(contribution.pairs, "measured pair") if contribution.source == "measured" else "fitted model"
    if contribution.brings and contribution.factor is not None:
        apply = "apply" if len(contribution.brings) > 1 else "applies"
        by += f"; with {', '.join(contribution.brings)}, which {apply} to one of them only"
    low, high = contribution.low, contribution.high
    return FactorRow(
        contribution.knob,
        own="" if contribution.user is None else setting_in_words(contribution.user),
        best="" if contribution.winner is None else setting_in_words(contribution.winner),
        factor="" if contribution.factor is None else times_in_words(contribution.factor),
        between="" if low is None or high is None else f"{times_in_words(low)} to {times_in_words(high)}",
        by=contribution.note or by,
        is_setting=contribution.source not in (TOGETHER, REMAINDER),
    )


def told_of(facts: Explanation) -> list[str]:
    """Return sentences on the winner's bottlenecks, memory use, GPU utilisation, and doubts about the speed-up."""
    largest = sorted(facts.bounds.items(), key=lambda part: -part[1])
    shares = ", ".join(f"{name} {share:.0%}" for name, share in largest if share >= _WORTH_A_ROW)
    parts = [f"A step of the winner is {shares} (fitted model): bound by {facts.bound}."] if shares else []
    if facts.peak_bytes is not None and facts.device_bytes > 0:
        device = bytes_in_words(facts.device_bytes)
        parts.append(f"Peak memory, fullest rank: {bytes_in_words(facts.peak_bytes)} of {device} (measured).")
    if facts.utilisation is not None:
        parts.append(f"It reaches {facts.utilisation:.0%} of the GPU's peak FLOPS (measured).")
    if facts.bounds.get("compute", 0.0) >= _COMPUTE_BOUND:
        parts.append(_on_computation(facts))
    if facts.contradicted and facts.remainder is not None and facts.remainder.factor is not None:
        parts.append(
            f"A factor of {times_in_words(facts.remainder.factor)} remains that no setting explains, such as a machine "
            "that was busier at one of the two: do not rely on the speed-up before both are measured again."
        )
    return parts


def _on_computation(facts: Explanation) -> str:
    """Return what speeds up a step bound by computation, which no DeepSpeed setting does."""
    if facts.utilisation is not None and facts.utilisation < _IDLE_GPU:
        return (
            "Computation uses little of the GPU: look at the model itself (fused attention, half precision, shapes "
            "that are multiples of 64, torch.compile)."
        )
    remedy = "faster or more processors do, or a GPU" if facts.device == "cpu" else "faster or more GPUs do"
    return f"No setting of DeepSpeed changes much of computation; {remedy}, and less recomputation where memory allows."
