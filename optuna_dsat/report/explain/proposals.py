"""Proposals to change or buy something that makes a study's winner faster, as far as machine and study allow.

Gains are predicted by the models fitted to the study's launches, with a single change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from optuna.trial import FrozenTrial

from optuna_dsat.config.knobs import OFFLOAD_OPTIMIZER, OFFLOAD_PARAM
from optuna_dsat.guided.planner import GuidedPlanner
from optuna_dsat.metrics import LARGER_IS_BETTER
from optuna_dsat.trials import attributes
from optuna_dsat.trials.lineage import MICRO_BATCH, visible_params, without_batch
from optuna_dsat.words import faster_in_words

_WORTH_SAYING = 0.02
"""Minimum relative gain of a proposed change."""
_FULL = 0.85
"""Minimum share of used device memory at which memory is assumed to limit the micro-batch."""
_IDLE_GPU = 0.3
"""Share of a GPU's peak FLOPS below which a step bound by computation is limited by the model, not by the GPU."""
_COMPUTE_BOUND = 0.7
"""Minimum share of a step at which computation is assumed to be the bottleneck."""
_MORE_STEPS = 4
"""Proposed factor on the accumulation steps."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """A winner on its machine."""

    planner: GuidedPlanner
    trials: Sequence[FrozenTrial]
    """The study's trials."""
    winner: FrozenTrial
    bounds: Mapping[str, float]
    """compute, link, host, memory, overhead -> share of the winner's step."""
    utilisation: float | None
    """Achieved share of the GPU's peak FLOPS; None if unknown."""

    @property
    def on_gpus(self) -> bool:
        """Whether the ranks run on GPUs."""
        return self.planner.problem.hardware.device != "cpu"

    @property
    def ranks(self) -> int:
        """Data-parallel ranks."""
        return self.planner.problem.hardware.world_size

    @cached_property
    def knobs(self) -> dict[str, Any]:
        """The winner's knobs without its batch sizes."""
        return without_batch(visible_params(self.winner))

    @property
    def size(self) -> int:
        """The winner's micro-batch."""
        return int(visible_params(self.winner)[MICRO_BATCH])

    @property
    def offloads(self) -> bool:
        """Whether the winner keeps anything off its GPUs."""
        return any(self.knobs.get(name, "none") != "none" for name in (OFFLOAD_OPTIMIZER, OFFLOAD_PARAM))

    def allows(self, *, micro_batch: int, more_steps: int = 1) -> bool:
        """Whether metric, batch and data allow a micro-batch with ``more_steps`` times its accumulation steps."""
        space = self.planner.problem.space
        steps = space.accumulation(micro_batch) * more_steps
        samples = micro_batch * steps
        if steps < 1 or (space.samples_per_rank is not None and samples != space.samples_per_rank):
            return False
        is_larger = samples > self.size * space.accumulation(self.size)
        if is_larger and self.planner.problem.metric not in LARGER_IS_BETTER:  # its step takes longer
            return False
        if space.micro_batch_values is not None and micro_batch not in space.micro_batch_values:
            return False
        limits = (space.max_samples_per_rank, attributes.data_limit(self.trials))
        return all(limit is None or samples <= limit for limit in limits)

    def rate_gain(self, *, larger_batch: int = 1, more_steps: float = 1) -> float:
        """Return the predicted relative gain in samples per second of a change of batch sizes."""
        row = self.planner.problem.table.row_index(self.knobs)
        if row is None:
            return 0.0
        changed = {"larger_batch": larger_batch, "more_steps": more_steps}
        return self.planner.rate_ratio(self.trials, row, self.size, **changed) - 1  # type: ignore[arg-type]


def proposals_by_name(now: Situation) -> dict[str, str]:
    """Return name -> what to change or buy next, largest gain first."""
    gains = sorted(_changes(now), key=lambda change: change[1], reverse=True)
    result = {name: f"{text}: about {faster_in_words(gain)}." for name, gain, text in gains if gain >= _WORTH_SAYING}
    return {**result, **dict(_on_computation(now))}


def _on_computation(now: Situation) -> Iterator[tuple[str, str]]:
    """Yield proposals for a compute-bound step, which no DeepSpeed setting can speed up."""
    share = now.bounds.get("compute", 0)
    if share < _COMPUTE_BOUND:
        return
    if now.utilisation is not None and now.utilisation < _IDLE_GPU:
        yield (
            "model",
            f"Computation takes {share:.0%} of a step but reaches {now.utilisation:.0%} of the GPU's peak: look at the "
            "model itself (fused attention, half precision, shapes that are multiples of 64, torch.compile).",
        )
        return
    remedy = "faster or more GPUs do" if now.on_gpus else "faster or more processors do, or a GPU"
    yield (
        "compute",
        f"Computation takes {share:.0%} of a step: no setting of DeepSpeed changes that much; {remedy}, and less "
        "recomputation where memory allows.",
    )


def _changes(now: Situation) -> Iterator[tuple[str, float, str]]:
    """Yield name, predicted relative gain in samples per second and text of each change that is possible."""
    problem, size = now.planner.problem, now.size
    peak = now.winner.user_attrs.get(attributes.PEAK_BYTES) or 0
    if peak > _FULL * problem.device_bytes and now.allows(micro_batch=2 * size):
        steps = problem.space.accumulation(2 * size) / problem.space.accumulation(size)
        what = "devices" if now.on_gpus else "a machine, or a --device-memory,"
        text = f"Memory stops the micro-batch at {size}; {what} with room for {2 * size} samples"
        yield "memory", now.rate_gain(larger_batch=2, more_steps=steps), text
    link, host = now.bounds.get("link", 0), now.bounds.get("host", 0)
    if now.ranks > 1 and link > 0:
        if now.on_gpus:
            several = now.ranks > problem.hardware.ranks_per_node
            what = "A network between the hosts" if several else "A link between the GPUs"
            yield "link", 1 / (1 - link / 2) - 1, f"{what} of twice the bandwidth"
        if now.allows(micro_batch=size, more_steps=_MORE_STEPS):
            stage = int(now.knobs.get("zero_stage", 0))
            why = (
                f"ZeRO {stage} then exchanges less per sample"
                if stage < 2
                else f"ZeRO {stage} still reduces gradients at each of them, but updates once"
            )
            text = (
                f"Four times the gradient accumulation steps, where the larger global batch suits the training ({why})"
            )
            yield "accumulation", now.rate_gain(more_steps=_MORE_STEPS), text
    if now.on_gpus and now.offloads and host > 0:
        yield "host", 1 / (1 - host) - 1, "GPUs enough to hold what is offloaded"
