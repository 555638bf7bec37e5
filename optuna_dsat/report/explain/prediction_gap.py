"""Compares the winner's measured step time with the prediction from the data sheet, and looks for causes of a gap.

The prediction is the step time's formula (``optuna_dsat.cost.step_time``) with the coefficients of the device's data
sheet, without fitting; its range is the formula's uncertainty. Causes are reported if they left evidence: phases that
take longer than predicted, time outside them, uneven steps, and other activity on the machine during the launch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from optuna_dsat.config import ds_config
from optuna_dsat.config.structures import Structure
from optuna_dsat.cost.gpus import gpu_of_device, priors_of_device
from optuna_dsat.cost.step_time import PHASES, StepTimeModel, step_inputs
from optuna_dsat.report.view import StudyView
from optuna_dsat.study.space import hardware_of
from optuna_dsat.trials import attributes
from optuna_dsat.words import range_in_words, step_time_in_words, times_in_words

_Z90 = 1.645
"""Half-width of the central 90% of a normal distribution, in standard deviations."""
_WORTH_NAMING = 0.1
"""Minimum share of a step, or of the cores, for a cause."""
_UNEVEN = 1.5
"""Minimum ratio of the slowest to the median step at which steps are called uneven."""
_COMPUTATION = (
    "attention that is not fused, recomputed activations, matrices whose sides are no multiples of 64, fp32 without "
    "TF32, or a micro-batch too small to fill the device"
)
_COLLECTIVES = "collectives over PCIe or sockets where NVLink is expected (`nvidia-smi topo -m`, NCCL_DEBUG=INFO)"


@dataclass(frozen=True, kw_only=True)
class PredictionGap:
    """The winner's measured and predicted step."""

    measured_s: float
    predicted_s: float
    """Median."""
    low_s: float
    high_s: float
    """Ends of the 90% interval."""
    gpu: str
    """The GPU whose data sheet it is."""
    predicted_phases: Mapping[str, float]
    """``PHASES`` -> seconds; ``other`` is the time outside forward, backward and step."""
    measured_phases: Mapping[str, float]
    """Likewise."""
    causes: tuple[str, ...]
    """Causes, likeliest first; empty if the step is not slower than predicted."""

    @property
    def ratio(self) -> float:
        """Measured step time divided by the predicted step time."""
        return self.measured_s / self.predicted_s

    @property
    def verdict(self) -> str:
        """The comparison as a sentence."""
        measured = f"A step takes {step_time_in_words(self.measured_s)}"
        low, high = (step_time_in_words(end, digits=3) for end in (self.low_s, self.high_s))
        expected = f"{step_time_in_words(self.predicted_s, digits=3)} were to be expected ({range_in_words(low, high)})"
        if self.ratio > 1 and not self.low_s <= self.measured_s <= self.high_s:
            end = f", so it is {times_in_words(self.ratio)} times as long, which the prediction does not explain"
        elif self.ratio < 1:
            end = ", so it is no slower than predicted"
        else:
            end = ", so it is within the range of the prediction"
        return f"{measured}; by the data sheet of {self.gpu} {expected}{end}."

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {**asdict(self), "ratio": self.ratio, "verdict": self.verdict}


def prediction_gap(view: StudyView) -> PredictionGap | None:
    """Compare the winner's measured step with its prediction; return None without a data sheet or a measured step."""
    if view.profiled is None or view.best is None:
        return None
    gpu = gpu_of_device(view.profiled.profile.device_name)
    if gpu is None:
        return None
    metrics = view.best.metrics
    config = ds_config.effective(view.best.trial.user_attrs.get(attributes.CONFIG) or {})
    if not metrics.get("latency") or not isinstance(config.get(ds_config.MICRO_BATCH), int):
        return None
    predicted, spread = _predicted(view, config)
    seconds, latency = sum(predicted.values()), metrics["latency"]
    measured = {name: metrics.get(name, 0.0) for name in PHASES[:3]}
    measured["other"] = max(0.0, latency - sum(measured.values()))
    slower = latency > (1 + _WORTH_NAMING) * seconds
    return PredictionGap(
        measured_s=latency,
        predicted_s=seconds,
        low_s=seconds * math.exp(-_Z90 * spread),
        high_s=seconds * math.exp(_Z90 * spread),
        gpu=gpu.name,
        predicted_phases=predicted,
        measured_phases=measured,
        causes=(*_slow_phases(config, predicted, measured), *_beside(view)) if slower else (),
    )


def _predicted(view: StudyView, config: Mapping[str, Any]) -> tuple[dict[str, float], float]:
    """Return the predicted seconds of each phase, and the standard deviation of the logarithm of their sum."""
    assert view.profiled is not None
    profile, hardware = view.profiled.profile, hardware_of(view.spec, view.profiled)
    machine = priors_of_device(profile, config, device=hardware.device, ranks=hardware.world_size)
    model = StepTimeModel.of(profile, hardware, machine=machine)
    inputs = step_inputs(profile, hardware, [config], [config[ds_config.MICRO_BATCH]])
    phases, spread = model.expected(model.prior_coefficients(), *inputs)
    return {name: float(phases[row, 0]) for row, name in enumerate(PHASES)}, float(spread[0])


def _slow_phases(
    config: Mapping[str, Any], predicted: Mapping[str, float], measured: Mapping[str, float]
) -> Iterator[str]:
    """Yield a cause for each phase that takes clearly longer than predicted, the largest excess first."""
    total = sum(measured.values())
    excess = {name: measured[name] - predicted[name] for name in PHASES}
    factors = [measured[name] / max(predicted[name], 1e-9) for name in ("forward", "backward")]
    alike = max(factors) < 2 * max(min(factors), 1e-9)
    for name in sorted(PHASES, key=lambda name: -excess[name]):
        if excess[name] <= _WORTH_NAMING * total:
            continue
        if name == "other":
            yield (
                f"{step_time_in_words(measured[name])} of each step ({measured[name] / total:.0%}) pass outside "
                "forward, backward and step: the data loader (more workers, pin_memory, data prepared before), "
                "logging, Python between."
            )
        else:
            took = (
                f"{name} takes {step_time_in_words(measured[name])} where "
                f"{step_time_in_words(predicted[name], digits=3)} were predicted"
            )
            yield f"{took}: look at {_look_at(name, config, both=alike)}."


def _look_at(phase: str, config: Mapping[str, Any], *, both: bool) -> str:
    """Return where to look for a phase's excess time; ``both``: forward and backward pass are alike too slow."""
    structure = Structure.of(config)
    if phase == "step":
        if structure.nvme_count:
            return "the NVMe drive: its speed (optuna-dsat doctor --nvme-path), and what else reads and writes there"
        if structure.offloads:
            return "the optimizer on the host: its cores (OMP_NUM_THREADS), and the NUMA node that the process runs on"
        return "the optimizer: one that is fused, clipping and logging within it, or memory that is almost full"
    if both and structure.stage < 3:
        return _COMPUTATION
    if structure.stage == 3:
        return f"the gathering of parameters, {_COLLECTIVES}, and {_COMPUTATION}"
    return _COLLECTIVES if phase == "backward" else _COMPUTATION


def _beside(view: StudyView) -> Iterator[str]:
    """Yield evidence in the winner's launch of uneven steps and of other activity on the machine."""
    report = None if view.best is None else view.last_report(view.best.trial)
    if report is None:
        return
    steps = view.step_times.get(report.launch_id, ())
    if len(steps) > 2 and max(steps) > _UNEVEN * statistics.median(steps):
        slowest, median = step_time_in_words(max(steps)), step_time_in_words(statistics.median(steps))
        yield (
            f"Steps are uneven: the slowest took {slowest}, the median one {median}, "
            "as where the data loader falls behind, memory is freed and allocated again, or others use the machine."
        )
    beside = report.conditions
    if (beside.others_share or 0.0) > _WORTH_NAMING:
        yield f"Other processes took {beside.others_share:.0%} of the cores while it was measured."
    if beside.gpu_processes:
        yield f"Others used its GPUs: {'; '.join(beside.gpu_processes)}."
    if beside.throttle_reasons:
        yield f"The GPUs' clocks were held down: {'; '.join(beside.throttle_reasons)}."
