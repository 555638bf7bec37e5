"""Metrics of a launch from the measured steps of its ranks: pure functions.

Throughput is end to end: samples of the counted steps divided by the wall time between their boundaries, including data
loading. ``engine_throughput`` counts the engine's phases only. Steps that the loss scaler skipped do not count.

If the inputs of the counted steps differ in size (dynamic padding), speed is also reported per element, intervals are
computed by ratio estimators, and launches never end early. Configurations of the same batch size then count the same
steps, which contain the same data if the script's order is reproducible.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from optuna_dsat.metrics import PER_ELEMENT, Interval, student_t_975
from optuna_dsat.runtime.events import (
    BatchSourcesFound,
    CheckpointLoaded,
    CheckpointsOff,
    ConfigDiffers,
    EngineReady,
    EnvironmentSet,
    Event,
    ModulesImported,
    ProfileMeasured,
    RankFailed,
    StepMeasured,
    TrainerFound,
)
from optuna_dsat.runtime.trial_config import PartitionedModelError

LEAST_VARIATION = 0.05
"""Relative variation (range divided by mean) up to which input sizes count as equal."""

_FEWEST_STEPS = 3
"""Minimum number of steps for a step time to be certain: two may agree by chance."""


@dataclass(frozen=True, kw_only=True)
class GlobalStep:
    """An optimizer step over all ranks. Durations are in seconds, of a rank on average."""

    step: int
    """Number among the counted steps, from 1; a skipped step has the number of the next step."""
    latency_s: float
    forward_s: float
    backward_s: float
    step_s: float
    samples: float
    """Samples consumed by all data-parallel ranks."""
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    rss_bytes: int
    loss: float | None
    """Mean over the ranks that reported a finite loss; None if none did."""
    evaluation_s: float = 0.0
    """Part of ``latency_s`` in which the script evaluated or generated."""
    skipped: bool = False
    """Whether the loss scaler skipped it."""
    elements: float = 0.0
    """Input elements of all data-parallel ranks, including padding; 0 if not observed."""
    elements_are_tokens: bool = False
    """Whether ``elements`` counts tokens."""


def merge_ranks(steps: Sequence[StepMeasured], *, data_parallel_size: int, configured_samples: int) -> GlobalStep:
    """Merge the measurements of a global step, given once per rank.

    ``data_parallel_size`` is the number of ranks with different samples; ranks of a model-parallel group see the same
    samples. ``configured_samples``, the engine's train batch size, counts if no rank observed its input.

    Durations are means: ranks wait for each other, so the wall time of several steps is the same on each. The largest
    of each step would add up to more, and the largest phases to more than their step.
    """
    seen = [s.samples for s in steps if s.samples > 0]
    losses = [s.loss for s in steps if s.loss is not None and math.isfinite(s.loss)]
    # Later stages of a pipeline receive activations instead of tokens.
    sized = [s for s in steps if s.elements_are_tokens] or [s for s in steps if s.elements > 0]
    latency_s = statistics.fmean(s.latency_s for s in steps)
    return GlobalStep(
        step=steps[0].number,
        latency_s=latency_s,
        forward_s=statistics.fmean(s.forward_s for s in steps),
        backward_s=statistics.fmean(s.backward_s for s in steps),
        step_s=statistics.fmean(s.step_s for s in steps),
        samples=statistics.fmean(seen) * data_parallel_size if seen else float(configured_samples),
        peak_allocated_bytes=max(s.peak_allocated_bytes for s in steps),
        peak_reserved_bytes=max(s.peak_reserved_bytes for s in steps),
        rss_bytes=max(s.rss_bytes for s in steps),
        loss=statistics.fmean(losses) if losses else None,
        evaluation_s=min(latency_s, max(s.evaluation_s for s in steps)),  # the other ranks wait for one that evaluates
        skipped=any(s.skipped for s in steps),
        elements=statistics.fmean(s.elements for s in sized) * data_parallel_size if sized else 0.0,
        elements_are_tokens=any(s.elements_are_tokens for s in sized),
    )


def without_rare_evaluation(steps: Sequence[GlobalStep]) -> list[GlobalStep]:
    """Subtract evaluation and generation time from the steps, unless every step but the first includes it.

    Work in every step is part of the training; before the first, scripts evaluate once.
    """
    evaluates = [step.evaluation_s > 0 for step in steps]
    if all(evaluates[1:]) or not any(evaluates):
        return list(steps)
    return [replace(step, latency_s=step.latency_s - step.evaluation_s, evaluation_s=0.0) for step in steps]


def input_variation(steps: Sequence[GlobalStep]) -> float:
    """Return the variation of elements per sample between steps: largest minus smallest, relative to their mean.

    0 up to 5%, or if inputs were not observed. A step of fewer samples, such as an epoch's last, is not a variation.
    """
    sizes = [step.elements / step.samples for step in steps if step.samples > 0 and step.elements > 0]
    if not sizes or len(sizes) < len(steps):
        return 0.0
    variation = (max(sizes) - min(sizes)) / statistics.fmean(sizes)
    return variation if variation > LEAST_VARIATION else 0.0


def per_element_metric(steps: Sequence[GlobalStep]) -> str | None:
    """Return the metric in ``PER_ELEMENT`` for these steps; None if inputs are not tokens and have equal size."""
    tokens, elements = PER_ELEMENT
    if steps and all(step.elements_are_tokens and step.elements > 0 for step in steps):
        return tokens
    return elements if input_variation(steps) else None


def metrics_of(steps: Sequence[GlobalStep], *, flops_per_sample: float, world_size: int) -> dict[str, float]:
    """Return the metrics of the counted steps; ``flops_per_sample`` is of forward and backward.

    Returns:
        ``throughput`` (samples/s over all ranks), ``FLOPS_per_gpu`` (FLOP/s per rank), ``latency``, ``forward``,
        ``backward``, ``step`` (seconds per optimizer step), ``engine_throughput`` (samples/s counting the engine's
        phases only), ``peak_allocated_bytes``, ``peak_reserved_bytes``, ``rss_bytes``; also ``tokens_per_s`` if inputs
        are tokens, or ``elements_per_s`` if other inputs vary in size (over all ranks, including padding).

    Raises:
        ValueError: If ``steps`` is empty or their wall time is not positive.
    """
    wall_s = sum(s.latency_s for s in steps)
    if not steps or wall_s <= 0:
        raise ValueError(f"{len(steps)} counted steps took {wall_s} s; at least one step of positive length is needed")
    samples = sum(s.samples for s in steps)
    phases_s = sum(s.forward_s + s.backward_s + s.step_s for s in steps)
    throughput = samples / wall_s
    count = len(steps)
    name = per_element_metric(steps)
    per_element = {} if name is None else {name: sum(s.elements for s in steps) / wall_s}
    return {
        "throughput": throughput,
        "FLOPS_per_gpu": flops_per_sample * throughput / world_size,
        "latency": wall_s / count,
        "forward": sum(s.forward_s for s in steps) / count,
        "backward": sum(s.backward_s for s in steps) / count,
        "step": sum(s.step_s for s in steps) / count,
        "engine_throughput": samples / phases_s if phases_s > 0 else throughput,
        "peak_allocated_bytes": float(max(s.peak_allocated_bytes for s in steps)),
        "peak_reserved_bytes": float(max(s.peak_reserved_bytes for s in steps)),
        "rss_bytes": float(max(s.rss_bytes for s in steps)),
        **per_element,
    }


_RESAMPLES = 1000


def confidence_interval(
    steps: Sequence[GlobalStep], metric: str, *, flops_per_sample: float, world_size: int
) -> Interval:
    """Return the metric over all steps with a 95% percentile-bootstrap interval over steps (Efron 1979).

    Whole steps are resampled, so throughput remains a ratio of sums. With few steps the interval is somewhat too
    narrow (about 5% at ten steps). Deterministic: the resampling is seeded.

    If inputs vary in size, the interval is computed by a ratio estimator instead (``_ratio_interval``). The interval of
    samples/s then includes the variation of the data, while for tokens/s each step's seconds are compared with the
    tokens of the same step.
    """
    value = metrics_of(steps, flops_per_sample=flops_per_sample, world_size=world_size)[metric]
    pairs = [_RATIOS[metric](step) for step in steps]
    total, weight = _sums(pairs)
    if total <= 0 or weight <= 0:
        return Interval(value=value, low=value, high=value)  # a phase without duration in a pipeline
    if input_variation(steps) and len(steps) > 1:
        return _ratio_interval(value, pairs)
    rng = random.Random(0)
    draws = sorted(y / x for y, x in (_sums(rng.choices(pairs, k=len(pairs))) for _ in range(_RESAMPLES)))
    scale = value / (total / weight)
    low, high = draws[int(0.025 * _RESAMPLES)], draws[int(0.975 * _RESAMPLES) - 1]
    return Interval(value=value, low=scale * low, high=scale * high)


def _sums(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    numerators, denominators = zip(*pairs, strict=True)
    return sum(numerators), sum(denominators)


_RATIOS: dict[str, Callable[[GlobalStep], tuple[float, float]]] = {
    "throughput": lambda step: (step.samples, step.latency_s),
    "FLOPS_per_gpu": lambda step: (step.samples, step.latency_s),
    "tokens_per_s": lambda step: (step.elements, step.latency_s),
    "elements_per_s": lambda step: (step.elements, step.latency_s),
    "engine_throughput": lambda step: (step.samples, step.forward_s + step.backward_s + step.step_s),
    "latency": lambda step: (step.latency_s, 1.0),
    "forward": lambda step: (step.forward_s, 1.0),
    "backward": lambda step: (step.backward_s, 1.0),
    "step": lambda step: (step.step_s, 1.0),
}
"""Metric -> numerator and denominator of a step; the metric is proportional to the ratio of their sums."""


def _ratio_interval(value: float, pairs: Sequence[tuple[float, float]]) -> Interval:
    """Return the 95% interval of the ratio of sums of independent positive pairs, by residuals and Student's t.

    With r = sum(y) / sum(x), the variance of r is the variance of the mean of y - r x, divided by the squared mean of x
    (Cochran, Sampling Techniques, 3rd edition 1977, chapter 6, without finite population correction). Computed on the
    logarithm of r, so that the interval is positive. Known error: the variance is too small by the order of 1/n.
    """
    total, weight = _sums(pairs)
    residuals = [y - total / weight * x for y, x in pairs]
    half = student_t_975(len(pairs) - 1) * statistics.stdev(residuals) * math.sqrt(len(pairs)) / total
    return Interval(value=value, low=value * math.exp(-half), high=value * math.exp(half))


def step_time_uncertainty(steps: Sequence[GlobalStep]) -> float:
    """Return half the width of the 95% confidence interval of the mean step time, relative to the mean.

    Student's t for independent steps: a drift widens it, an equal delay of all steps does not. Infinite below two
    steps.
    """
    if len(steps) < 2:
        return math.inf
    times = [step.latency_s for step in steps]
    return student_t_975(len(times) - 1) * statistics.stdev(times) / math.sqrt(len(times)) / statistics.fmean(times)


def is_certain(steps: Sequence[GlobalStep], *, tolerance: float) -> bool:
    """Return whether the step time is known well enough to end a launch before its last profile step.

    Never if inputs vary in size: configurations are then compared over the same steps.
    """
    if len(steps) < _FEWEST_STEPS or input_variation(steps):
        return False
    return step_time_uncertainty(steps) <= tolerance


class LaunchRecord:
    """Events of a launch so far; steps are merged over ranks, and count from ``start_profile_step`` on."""

    def __init__(self, *, world_size: int, start_profile_step: int) -> None:
        self.world_size = world_size
        self.start_profile_step = start_profile_step
        self.engine: EngineReady | None = None
        self.config_differences: Mapping[str, list[Any]] = {}
        """As ``EngineReady.config_differences``; also known if a launch failed before it had an engine."""
        self.profile: ProfileMeasured | None = None
        self.trainer: TrainerFound | None = None
        self.imported: ModulesImported | None = None
        self.batch_sources: BatchSourcesFound | None = None
        self.needs_zero_3 = False
        """Whether a rank failed because the script builds its model within ``deepspeed.zero.Init`` below ZeRO 3."""
        self.checkpoint = ""
        """Folder of the checkpoint that the script has loaded."""
        self.checkpoints = False
        """Whether the script checkpoints activations itself, which the launch has switched off."""
        self.environment: dict[str, str] = {}
        """Variables that the runtime set for the script: name -> value."""
        self.boundaries: list[GlobalStep] = []
        """All steps, including steps skipped by the loss scaler."""
        self.events: list[StepMeasured] = []
        self._waiting: dict[int, list[StepMeasured]] = defaultdict(list)

    @property
    def steps(self) -> list[GlobalStep]:
        """Steps that the loss scaler did not skip."""
        return [step for step in self.boundaries if not step.skipped]

    @property
    def flops_ranks(self) -> int:
        """Ranks by which the FLOPs of all samples are divided; a pipeline's profile has the FLOPs of a stage."""
        return self.engine.data_parallel_size if self.engine is not None and self.engine.pipeline else self.world_size

    def outside_steps_s(self, held_s: float) -> float:
        """Return the seconds outside of steps of a launch that held its devices for ``held_s`` seconds."""
        return max(0.0, held_s - sum(step.latency_s for step in self.steps))

    @property
    def skipped_steps(self) -> int:
        """Number of steps that the loss scaler skipped."""
        return sum(step.skipped for step in self.boundaries)

    @property
    def steps_completed(self) -> int:
        """Batches completed by the training up to the last step, including batches before a resume."""
        return max((event.steps_completed for event in self.events[-self.world_size :]), default=0)

    @property
    def input_variation(self) -> float:
        """Size variation of the inputs of the counted steps; 0 for none (see ``input_variation``)."""
        return input_variation(self.counted)

    @property
    def counted(self) -> list[GlobalStep]:
        """Steps after the warm-up, without evaluation time unless every step evaluates."""
        return [step for step in without_rare_evaluation(self.steps) if step.step >= self.start_profile_step]

    @property
    def left_out(self) -> float:
        """Share of the time of the counted steps that evaluation between some of them takes, which is not counted."""
        whole_s = sum(step.latency_s for step in self.steps if step.step >= self.start_profile_step)
        return 1.0 - sum(step.latency_s for step in self.counted) / whole_s if whole_s > 0 else 0.0

    @property
    def stored_events(self) -> list[StepMeasured]:
        """Steps of all ranks, without the evaluation that is left out; the other ranks wait for one that evaluates."""
        longest_s = dict.fromkeys((event.step for event in self.events), 0.0)
        for event in self.events if self.left_out else ():
            longest_s[event.step] = max(event.evaluation_s, longest_s[event.step])
        return [replace(event, latency_s=max(0.0, event.latency_s - longest_s[event.step])) for event in self.events]

    @property
    def observed_micro_batch(self) -> int | None:
        """Largest batch fed to an engine, in samples per rank and forward pass; None if none was observed."""
        seen = [event.observed_micro_batch for event in self.events if event.observed_micro_batch is not None]
        return max(seen, default=None)

    @property
    def is_ambiguous(self) -> bool:
        """Whether another dimension of the inputs than the one counted may be that of samples."""
        return any(event.is_ambiguous for event in self.events)

    def differing_micro_batches(self, *, samples: int | None) -> tuple[int, ...]:
        """Return the sizes of the batches fed to an engine if they differ between steps, else an empty tuple.

        The last batch of an epoch may be smaller. If the end of an epoch is unknown, batches count as equal if at least
        half of them have the largest size, including the first batch of each rank.
        """
        seen = [event for event in self.events if event.observed_micro_batch is not None]
        sizes = tuple(event.observed_micro_batch for event in seen if event.observed_micro_batch is not None)
        ranks = {event.rank for event in seen}
        fed = max((sum(event.samples for event in seen if event.rank == rank) for rank in ranks), default=0)
        if samples is not None and fed < samples:
            return sizes if len(set(sizes)) > 1 else ()
        first = {event.rank: event.observed_micro_batch for event in reversed(seen)}
        largest = self.observed_micro_batch
        alike = 2 * sizes.count(largest or 0) >= len(sizes) and set(first.values()) <= {largest}
        return () if alike else sizes

    @property
    def passes_per_micro_batch(self) -> int:
        """Forward passes of full micro-batches in each counted step, divided by the engine's accumulation steps.

        More than 1 if the script accumulates itself; 1 if unknown.
        """
        if self.engine is None or self.engine.pipeline or self.observed_micro_batch is None:
            return 1
        full = self.engine.gradient_accumulation_steps * self.observed_micro_batch
        fed = {event.samples for event in self.events if event.step >= self.start_profile_step}
        samples = fed.pop() if len(fed) == 1 else 0
        return max(samples // full, 1) if samples % full == 0 else 1

    @property
    def peak_bytes(self) -> int:
        """Peak allocated bytes of the worst rank over all steps; 0 before the first step."""
        return max((step.peak_allocated_bytes for step in self.boundaries), default=0)

    def add(self, event: Event) -> GlobalStep | None:
        """Add an event; return the global step that it completes, or None without one or if it was skipped."""
        if isinstance(event, EngineReady):
            if self.engine is None:
                self.engine = event
                self.config_differences = self.config_differences or event.config_differences
            elif event.rank == self.engine.rank:  # the script trains with another engine than first assumed
                self.engine = event
                self.config_differences = event.config_differences
        elif isinstance(event, ConfigDiffers):
            self.config_differences = self.config_differences or event.differences
        elif isinstance(event, TrainerFound):
            self.trainer = self.trainer or event
        elif isinstance(event, ModulesImported):
            self.imported = event
        elif isinstance(event, BatchSourcesFound):
            self.batch_sources = event
        elif isinstance(event, CheckpointLoaded):
            self.checkpoint = event.folder
        elif isinstance(event, CheckpointsOff):
            self.checkpoints = True
        elif isinstance(event, EnvironmentSet):
            self.environment = dict(event.variables)
        elif isinstance(event, ProfileMeasured):
            self.profile = _worst_profile(self.profile, event)
        elif isinstance(event, RankFailed):
            self.needs_zero_3 |= event.error_type == PartitionedModelError.__name__
        elif isinstance(event, StepMeasured):
            self.events.append(event)
            ranks = self._waiting[event.step]
            ranks.append(event)
            if len(ranks) == self.world_size:
                del self._waiting[event.step]
                merged = merge_ranks(
                    ranks,
                    data_parallel_size=self.engine.data_parallel_size if self.engine else self.world_size,
                    configured_samples=self.engine.train_batch_size if self.engine else 0,
                )
                self.boundaries.append(merged)
                return None if merged.skipped else merged
        return None

    def data_seen(self, batch: int) -> int:
        """Return the samples per rank of all steps; without a step less than ``batch``, those of a step and rank."""
        ranks = self.world_size if self.engine is None else self.engine.data_parallel_size
        return int(sum(step.samples / ranks for step in self.boundaries)) if self.boundaries else batch - 1

    def metrics(self, *, flops_per_sample: float) -> dict[str, float]:
        """Return the metrics of the counted steps (see ``metrics_of``)."""
        return metrics_of(self.counted, flops_per_sample=flops_per_sample, world_size=self.flops_ranks)


def _worst_profile(known: ProfileMeasured | None, new: ProfileMeasured) -> ProfileMeasured:
    """Return the profile with the most activation bytes: its rank is the first to run out of memory."""
    if known is None or new.activation_bytes_per_sample > known.activation_bytes_per_sample:
        return new
    return known
