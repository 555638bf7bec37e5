"""What every configuration of a space promises after some launches, and which one to launch next.

Memory is foreseen by ``optuna_dsat.memory_belief``, the time of a step by ``optuna_dsat.step_theory``, and what its
formula misses of the metric by ``optuna_dsat.residuals``. So a measured point pulls its own lineage towards it, its
structure a good deal, the others as far as the formula says. ``optuna_dsat.experience`` is what earlier studies taught.

The next launch has the largest expected improvement (Jones et al. 1998) for its seconds (Snoek et al. 2012)::

    P(fits)^2 EI / sqrt(P(fits) T_run + (1 - P(fits)) T_failed)

with EI the expected gain of the metric's logarithm over what is believed to be the best so far, ``T_run`` the start and
the profile steps, and ``T_failed`` the start alone; what a start takes is learnt from the launches so far. The root
tempers the cost: divided by all of it, what is left late in a search goes to cheap small micro-batches that cannot win
(Lee et al. 2020, arXiv:2003.10870, cool it, too). Where no configuration promises a gain worth having any more, the
search is over (as in Jones et al. 1998).

Launches in flight count as if measured as foreseen (the "kriging believer" of Ginsbourger et al. 2010), and their
lineages are left alone.

All of it follows from the finished and pending trials: nothing is kept but what the space and the profile determine.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from optuna.trial import FrozenTrial

from optuna_dsat import history
from optuna_dsat.belief import Belief, Expected
from optuna_dsat.experience import Experience
from optuna_dsat.gpus import priors_of_device
from optuna_dsat.lineage import agrees, lineage_key
from optuna_dsat.lineage_table import Known, LineageTable
from optuna_dsat.memory import Hardware, ModelProfile
from optuna_dsat.search_space import SearchSpace
from optuna_dsat.spec import LARGER_IS_BETTER, METRICS
from optuna_dsat.step_theory import PHASES, Fitted, StepTheory

__all__ = ["Foresight", "Prospect"]

Numbers: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Prospect:
    """A configuration worth a launch."""

    params: Mapping[str, Any]
    """The knobs, without the micro-batch."""
    micro_batch: int
    largest: int
    """Largest micro-batch that the lineage is expected to hold."""
    value: float
    """Expected metric."""
    fits: float
    """Probability that it fits."""


class Foresight:
    """What a space promises.

    Args:
        profile: What the profile launch taught.
        hardware: Where launches run.
        config: The user's DeepSpeed config.
        space: The search space.
        metric: What is optimised: a key of the trials' metrics (``optuna_dsat.history.METRICS``).
        memory_margin: Share of the device's memory that a launch is expected to leave free.
        profile_steps: Steps of a launch, warm-up included.
        min_gain: Relative improvement of the metric that some configuration must be expected to bring to be launched.
        experience: What earlier studies taught.

    Raises:
        ValueError: If the margin does not lie in [0, 1), the least gain is negative or there is no such metric.
    """

    def __init__(
        self,
        *,
        profile: ModelProfile,
        hardware: Hardware,
        config: Mapping[str, Any],
        space: SearchSpace,
        metric: str = "throughput",
        memory_margin: float = 0.05,
        profile_steps: int = 5,
        min_gain: float = 0.0,
        experience: Experience | None = None,
    ) -> None:
        if not 0 <= memory_margin < 1:
            raise ValueError(f"memory_margin must lie in [0, 1), not {memory_margin}: it is a share of the memory")
        if min_gain < 0:
            raise ValueError(f"min_gain must not be negative, as {min_gain} is: with 0 all that may win is tried")
        if metric not in METRICS:
            raise ValueError(f"metric is {metric!r}; it must be one of {', '.join(METRICS)}")
        self.metric = metric
        self.profile = profile
        self.hardware = hardware
        self.space = space
        self.profile_steps = profile_steps
        self.min_gain = min_gain
        ranks = min(hardware.ranks_per_node, hardware.world_size)
        self.device_bytes = hardware.device_memory_bytes
        if hardware.device == "cpu":
            self.device_bytes = min(self.device_bytes, hardware.host_memory_bytes // ranks)
        self.allowed_bytes = (1 - memory_margin) * self.device_bytes
        """What a launch may be expected to take."""
        self.table = LineageTable(profile=profile, hardware=hardware, config=config, space=space)
        self.theory = StepTheory(
            params=profile.params,
            trainable=profile.trainable_params,
            largest_layer=profile.largest_layer_params,
            param_bytes=profile.param_bytes,
            flops_per_sample=profile.flops_per_sample,
            ranks=hardware.world_size,
            ranks_per_node=ranks,
            machine=priors_of_device(profile.device_name, device=hardware.device, ranks=hardware.world_size),
        )
        if experience is not None:
            self.theory = replace(self.theory, prior=experience.prior(self.theory))
        self.past = self.table.recall(() if experience is None else experience.launches, metric=metric)
        """Launches of earlier studies."""
        low, high = space.micro_batches
        self.sizes = np.array(space.micro_batch_values or range(low, high + 1), dtype=np.int64)
        """All micro-batches."""
        self._accumulation = np.array([space.accumulation(int(size)) for size in self.sizes], dtype=np.float64)

        self._answered: tuple[Hashable, Prospect | None] | None = None
        """The last question and its answer: a tuner asks first whether anything is left, then what it is."""

    def next(self, trials: Sequence[FrozenTrial], fixed: Mapping[str, Any] = MappingProxyType({})) -> Prospect | None:
        """Return the configuration to launch next, None where none is left.

        Args:
            trials: The study's trials, without the one that asks.
            fixed: Knobs that the trial has already.
        """
        known = self.table.read(trials)
        samples = history.data_limit([trial for trial in trials if trial.state.is_finished()])
        question = (known.digest(), samples, lineage_key(fixed, micro_batch=""))
        if self._answered is None or self._answered[0] != question:
            self._answered = question, self._choose(known, samples, fixed)
        return self._answered[1]

    def learnt(self, trials: Sequence[FrozenTrial]) -> Fitted:
        """Return the coefficients of the step theory as these trials have them."""
        return self._belief(trials).fitted

    def believed(self, trials: Sequence[FrozenTrial]) -> dict[int, float]:
        """Return for measured trials what their metric is believed to be: trial number -> metric.

        It lies between the measurement, which is noisy, and what all others make expected of the configuration; so
        of several about as good, the luckiest is not taken for the best.
        """
        belief = self._belief(trials)
        return {
            int(number): self.metric_of(float(goodness))
            for number, goodness in zip(belief.ran.number, belief.residuals.believed, strict=False)
        }

    def expect(
        self, trials: Sequence[FrozenTrial], configurations: Sequence[tuple[Mapping[str, Any], int]]
    ) -> list[Expected | None]:
        """Return what is believed of configurations after some trials.

        Args:
            trials: The study's trials.
            configurations: Knobs and micro-batch of each.

        Returns:
            None for a configuration that is not of this space.
        """
        places = [(self.table.row_of(params), size) for params, size in configurations]
        known = [(row, size) for row, size in places if row is not None]
        if not known:
            return [None] * len(places)
        rows, sizes = (np.array(column, dtype=np.int64) for column in zip(*known, strict=True))
        found = iter(self._belief(trials).expect(rows, sizes))
        return [None if row is None else next(found) for row, _ in places]

    def rate_ratio(
        self, trials: Sequence[FrozenTrial], row: int, micro_batch: int, *, larger_batch: int = 1, more_steps: int = 1
    ) -> float:
        """Return how many times the samples per second a change is expected to bring, were memory no matter.

        Args:
            trials: The study's trials.
            row: Lineage, as a row of ``table``.
            micro_batch: Its micro-batch.
            larger_batch: Factor on the micro-batch.
            more_steps: Factor on the accumulation steps.
        """
        columns, fitted = self.table.columns.take(np.array([row, row])), self.learnt(trials)
        size = np.array([1.0, larger_batch]) * micro_batch
        steps = np.array([1.0, more_steps]) * self.space.accumulation(micro_batch)
        seconds = self.theory.phases(fitted.mean, columns, size, steps, np.full(2, 0.5)).sum(axis=0)
        rates = size * steps / seconds
        return float(rates[1] / rates[0])

    def _belief(self, trials: Sequence[FrozenTrial]) -> Belief:
        return Belief(self, self.table.read(trials), samples_limit=None)

    def metric_of(self, goodness: float) -> float:
        """Return the metric of a goodness."""
        return math.exp(goodness if self.metric in LARGER_IS_BETTER else -goodness)

    def _choose(self, known: Known, samples: int | None, fixed: Mapping[str, Any]) -> Prospect | None:
        rows = self._open(known, fixed)
        belief = Belief(self, known, samples_limit=samples)
        rows, sizes = belief.shortlist(rows)
        if not len(rows):
            return None
        worth = belief.merits(rows, sizes)
        best = int(np.argmax(worth.merit))
        if not worth.merit[best] > 0 or (belief.has_measured and worth.gain.max() < self.min_gain):
            return None
        row = int(rows[best])
        return Prospect(
            params=self.table.lineages[row],
            micro_batch=int(sizes[best]),
            largest=int(sizes[rows == row].max()),
            value=self.metric_of(float(worth.goodness[best])),
            fits=float(worth.fits[best]),
        )

    def accumulation(self, micro_batch: Numbers) -> Numbers:
        """Return the accumulation steps that go with micro-batches."""
        found: Numbers = self._accumulation[self.place(micro_batch)]
        return found

    def place(self, micro_batch: Numbers) -> Numbers:
        """Return the position in ``sizes`` of the largest one that is no larger; of the smallest where none is."""
        return np.maximum(0, np.searchsorted(self.sizes, micro_batch, side="right") - 1)

    def goodness(self, phases: Numbers, micro_batch: Numbers) -> Numbers:
        """Return the logarithm of the metric that phases (4, ..., n) make, of its inverse where less is better."""
        total = phases.sum(axis=0)
        if self.metric in ("throughput", "FLOPS_per_gpu"):
            each = self.profile.flops_per_sample if self.metric == "FLOPS_per_gpu" else self.hardware.world_size
            found: Numbers = np.log(max(1, each) * micro_batch * self.accumulation(micro_batch) / total)
            return found
        inverse: Numbers = np.log(total if self.metric == "latency" else phases[PHASES.index(self.metric)])
        return -inverse

    def slope(self, phases: Numbers, slopes: Numbers) -> Numbers:
        """Return the derivatives of the goodness, (k, n), from the phases (4, n) and theirs (4, k, n)."""
        timed = [PHASES.index(self.metric)] if self.metric in PHASES else list(range(len(PHASES)))
        relative: Numbers = slopes[timed].sum(axis=0) / phases[timed].sum(axis=0)
        return -relative

    def _open(self, known: Known, fixed: Mapping[str, Any]) -> Numbers:
        """Return the lineages that may be launched: not broken, not in flight."""
        free = np.ones(len(self.table.lineages), dtype=bool)
        free[known.row[known.pending | known.broken | known.host_too_large]] = False
        names = {tuned.name for tuned in self.space.knobs}
        held = {name: value for name, value in fixed.items() if name in names}
        rows = np.flatnonzero(free)
        if not held:
            return rows
        return rows[[agrees(self.table.lineages[row], held, strict=True) for row in rows]]
