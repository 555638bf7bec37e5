"""Step-time model: seconds of a training step as a formula with unknown coefficients, fitted to measured steps.

Symbols: P parameters, T of them trainable, N ranks, b bytes of a parameter, m the micro-batch, g accumulation steps.
The four phases of a step are

- forward: ``g (c (m + h) + hooks + gathers)``: seconds per sample ``c``, and a fixed part ``c h`` for the device's
  under-utilisation at small batches; hooks in Python, of ZeRO 3 in both passes, of ZeRO 2 in the backward pass;
- backward: the same with a different ``c``, the checkpointed share of the forward pass and of ZeRO 3's gathers again
  (Chen et al., arXiv:1604.06174: at most a forward pass more), and the reduction of the gradients:
  ``T b (N - 1) / N`` bytes over the link for a reduce-scatter, twice that for an all-reduce, and a latency per bucket.
  ZeRO 2 and 3 reduce in every micro-step, 0 and 1 once. ZeRO 3 gathers the parameters in both passes, from the host if
  they are offloaded; with a second copy in each node (``zero_hpz_partition_size``) only the first gather after an
  optimizer step leaves it;
- step: the optimizer on the device, or copies both ways over PCIe and the update on the host's CPUs; ZeRO 1 and 2 then
  gather all parameters once, ZeRO 3 works in sub-groups, of which some may be updated on the device
  (``offload_optimizer.ratio``); copies from memory that is not page-locked take twice as long. The ranks of a node
  share its NVMe: with the optimizer there, states and gradients are read and written once a step (ZeRO-Infinity,
  Rajbhandari et al., arXiv:2104.07857); parameters there are read in each gather and written once a step;
- other: data loading and Python.

On several nodes a ring of all ranks passes through the network of each node, so the time of a byte is the longer of
the times on the links in a node and on the network between nodes. With ``overlap_comm`` a share of the computation
hides communication, except the last message, and is slowed by it.

Sources: communication volumes are from ZeRO (Rajbhandari et al., arXiv:1910.02054, section 7) and ZeRO-Offload (Ren
et al., arXiv:2101.06840, section 3), a message costs latency plus bytes over bandwidth (Hockney 1994). Coefficients are
estimated by maximum a posteriori with log-normal priors (positive, and wide if machines differ by orders of magnitude);
their covariance is the inverse curvature at the maximum (Laplace's approximation; MacKay 2003, chapter 27). Known
errors: layers are assumed equal, and so are ranks; messages have the same latency in a node and between nodes.
``optuna_dsat.guided.residual_gp`` models the remaining error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

import numpy as np

from optuna_dsat.config import ds_config
from optuna_dsat.cost.memory import Hardware, ModelProfile, estimate, zero_settings
from optuna_dsat.cost.numbers import Numbers
from optuna_dsat.cost.zero_states import STAGE0_REDUCE_ELEMENTS, ZeroSettings

PHASES = ("forward", "backward", "step", "other")

_PRIORS = {
    "speed": (5e13, 1.5),  # FLOP/s per rank
    "idle": (1.5, 1.3),  # h, in samples
    "backward": (2.0, 0.3),  # computation of the backward pass over computation of the forward pass
    "pressure": (0.03, 1.0),  # slow-down of the computation when memory is full
    "steepness": (5.0, 0.6),  # power of the filled share with which the slow-down grows
    "edge": (0.03, 1.0),  # slow-down of the computation in the last per cent of memory
    "link": (5e-11, 1.5),  # seconds per byte of a collective in a node
    "latency": (1e-4, 1.2),  # seconds per message
    "scatter": (1.2, 0.25),  # volume of stage 1's and 2's reduce-scatter over the ideal volume
    "memory": (1e-12, 0.6),  # seconds per byte of the device's memory
    "hidden": (0.6, 0.3),  # share of the computation that can hide communication
    "contention": (0.1, 0.7),  # seconds lost per hidden second
    "modules": (200.0, 0.5),  # weights that are gathered separately
    "ahead": (2.0, 0.7),  # weights that must be prefetched to hide all gathers
    "hooks": (0.02, 1.2),  # seconds per pass that ZeRO 3 spends on fetching and releasing
    "fetch": (0.01, 1.2),  # seconds per pass, in addition to the copies, if parameters are offloaded
    "pcie": (1e-10, 0.5),  # seconds per byte between device and host
    "adam": (1e-9, 0.7),  # seconds per parameter and node of an optimizer on the host
    "nvme": (5e-10, 0.7),  # seconds per byte that a node reads from NVMe or writes to it
    "group": (1e-3, 1.0),  # seconds per sub-group of the optimizer step
    "other": (5e-3, 1.5),  # seconds per micro-batch outside the engine
    "network": (1e-10, 1.5),  # seconds per byte of a collective between nodes
}
"""Coefficient -> median and spread (standard deviation of its logarithm) of the log-normal prior.

Medians are rounded figures of data-centre GPUs; a spread of 1.5 covers a factor of twenty in both directions.
"""

COEFFICIENTS = tuple(_PRIORS)
"""Names of the coefficients, in the order of ``LogCoefficients``."""

BOUNDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "link": ("link", "network", "latency", "contention"),
        "host": ("pcie", "adam", "nvme", "fetch"),
        "memory": ("idle", "pressure", "edge", "memory"),
        "overhead": ("hooks", "group", "other"),
    }
)
"""Resource that may bound a step, besides computation -> the coefficients that are zero if it costs nothing.

``memory`` is the device memory: under-utilisation by a small micro-batch, slow-down by a full memory, and the memory
bandwidth of the optimizer.
"""

ERROR = 0.03
"""Relative standard deviation of the model's error of a step, including noise."""
_PHASE_ERROR = 2.0
"""Error of a phase, relative to the error of a step."""
_UNSEEN_ERROR = 0.5
"""Standard deviation of the logarithm of predicted over actual step time, with exact coefficients, of a configuration
that was not launched: with it 90% intervals contain 76 of the 84 published rates that are not set aside
(``python -m benchmarks.published_measurements``).
"""
_FLOOR = 0.005
"""Minimum standard deviation of a phase's error, relative to the whole step."""
_MAX_ITERATIONS = 25
_MAX_CHANGE = 4.0
"""Largest change of a coefficient's logarithm per iteration; contradictory measurements would change it more."""
_EDGE_POWER = 40
"""Power of the filled share: at 0.95 of the memory an eighth of the slow-down at full memory.

Close to the limit torch's caching allocator frees its cache, which synchronises the device, and retries
(``num_alloc_retries`` of ``torch.cuda.memory_stats``).
"""
_REDUCTION_HOOKS = 0.2
"""Seconds of ZeRO 2's hooks per backward pass, relative to ZeRO 3's (``benchmarks/published``)."""
_UNPINNED = 2
"""Seconds of a copy from memory that is not page-locked, relative to page-locked memory: a second copy on the host to
a page-locked buffer (NVIDIA, CUDA C++ Best Practices Guide, section 10.1.1).
"""
_STATES_BYTES = 12
"""Bytes per parameter of master copy and Adam's two moments."""
_GRADIENT_BYTES = 4
"""Bytes per parameter of a gradient in the master's type, which is on NVMe with the optimizer."""
_MEASURED = 0.3
"""Spread of a measured speed: ranks, block sizes and queues differ from the measurement's."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Inputs of the formula for n configurations; each array has length n."""

    stage: Numbers
    offload: Numbers
    nvme: Numbers
    offload_param: Numbers
    swapped: Numbers
    """Share of the offloaded parameters that are on NVMe."""
    contiguous: Numbers
    overlap: Numbers
    scatter: Numbers
    bucket: Numbers
    prefetch: Numbers
    max_live: Numbers
    max_reuse: Numbers
    persistence: Numbers
    sub_group: Numbers
    copy_ranks: Numbers
    """Ranks that share a second copy of the parameters; 1 without a second copy."""
    host_share: Numbers
    """Share of the optimizer's sub-groups on the host."""
    pinned: Numbers
    """Whether offloads are in page-locked host memory."""
    recomputed: Numbers
    """Share of the forward pass that the backward pass repeats."""

    @classmethod
    def of(cls, settings: Sequence[ZeroSettings]) -> Columns:
        """Return the settings as columns: arrays with an entry per configuration."""

        def column(values: Sequence[float]) -> Numbers:
            return np.array(values, dtype=np.float64)

        return cls(
            stage=column([s.stage for s in settings]),
            offload=column([s.offload_optimizer != "none" for s in settings]),
            nvme=column([s.offload_optimizer == "nvme" for s in settings]),
            offload_param=column([s.offload_param != "none" for s in settings]),
            swapped=column([s.swapped_params / max(1, s.param_partition) for s in settings]),
            contiguous=column([s.contiguous for s in settings]),
            overlap=column([s.overlap and s.stage > 0 for s in settings]),
            scatter=column([s.reduce_scatter for s in settings]),
            bucket=column([s.bucket if s.stage else STAGE0_REDUCE_ELEMENTS for s in settings]),
            prefetch=column([s.prefetch for s in settings]),
            max_live=column([s.max_live for s in settings]),
            max_reuse=column([s.max_reuse for s in settings]),
            persistence=column([s.persistence for s in settings]),
            sub_group=column([max(1, s.sub_group) for s in settings]),
            copy_ranks=column([s.copy_ranks for s in settings]),
            host_share=column([s.host_share for s in settings]),
            pinned=column([s.pinned for s in settings]),
            recomputed=column([s.recomputed for s in settings]),
        )

    def take(self, index: Any) -> Columns:
        """Return the configurations at an index array."""
        return Columns(**{field_.name: getattr(self, field_.name)[index] for field_ in fields(self)})


@dataclass(frozen=True, kw_only=True)
class Timings:
    """n measured steps; each array has length n."""

    columns: Columns
    micro_batch: Numbers
    accumulation: Numbers
    fill: Numbers
    """Share of the device's memory in use at the peak."""
    phases: Numbers
    """Seconds, shape (4, n), in the order of ``PHASES``; NaN if only the whole step was measured."""
    latency: Numbers
    """Seconds of the whole step."""


def step_inputs(
    profile: ModelProfile, hardware: Hardware, configs: Sequence[Mapping[str, Any]], micro_batches: Sequence[int]
) -> tuple[Columns, Numbers, Numbers, Numbers]:
    """Return the inputs of the model of n configs: columns, micro-batch, accumulation, share of memory at the peak."""
    columns = Columns.of([zero_settings(profile, config, hardware) for config in configs])
    size = np.array(micro_batches, dtype=np.float64)
    steps = np.array([int(config.get(ds_config.GRADIENT_ACCUMULATION) or 1) for config in configs], dtype=np.float64)
    peaks = [
        estimate(profile, config, micro_batch=each, hardware=hardware).device_bytes
        for config, each in zip(configs, micro_batches, strict=True)
    ]
    return columns, size, steps, np.clip(np.array(peaks) / hardware.device_memory_bytes, 0.01, 1.0)


@dataclass(frozen=True, kw_only=True)
class LogCoefficients:
    """Normal distribution of the coefficients' logarithms: the prior, or Laplace's approximation of the posterior."""

    mean: Numbers
    covariance: Numbers


@dataclass(frozen=True, kw_only=True)
class StepTimeModel:
    """Step-time model of a training model on a machine."""

    params: int
    trainable: int
    largest_layer: int
    param_bytes: int
    flops_per_sample: int
    ranks: int
    ranks_per_node: int
    machine: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Prior of the machine's coefficients: name -> median and spread; wide defaults apply to the others."""
    prior: LogCoefficients | None = None
    """Prior from earlier studies, replaces all medians and spreads; None for the defaults and ``machine``."""

    @classmethod
    def of(
        cls,
        profile: ModelProfile,
        hardware: Hardware,
        *,
        machine: Mapping[str, tuple[float, float]],
        prior: LogCoefficients | None = None,
    ) -> StepTimeModel:
        """Return the step-time model of a profiled model on the hardware of a launch.

        ``machine`` is the prior of its coefficients (name -> median and spread), ``prior`` of earlier studies, if any.
        """
        return cls(
            params=profile.params,
            trainable=profile.trainable_params,
            largest_layer=profile.largest_layer_params,
            param_bytes=profile.param_bytes,
            flops_per_sample=profile.flops_per_sample,
            ranks=hardware.partitions,
            ranks_per_node=hardware.ranks_on_node,
            machine={**machine, **_nvme_prior(hardware)},
            prior=prior,
        )

    def prior_coefficients(self) -> LogCoefficients:
        """Return the prior of the coefficients."""
        if self.prior is not None:
            return self.prior
        known = np.array([self.machine.get(name, prior) for name, prior in _PRIORS.items()])
        return LogCoefficients(mean=np.log(known[:, 0]), covariance=np.diag(known[:, 1] ** 2))

    def phases(self, logs: Numbers, c: Columns, micro_batch: Numbers, accumulation: Numbers, fill: Numbers) -> Numbers:
        """Return the seconds of each phase, shape (4, ..., n).

        ``logs`` are logarithms of the coefficients, shape (coefficients,) or (coefficients, k, 1) for k variants; ``c``
        the n configurations; ``micro_batch`` samples per rank and forward pass; ``fill`` the share of memory used at
        the peak.
        """
        x = dict(zip(_PRIORS, np.exp(logs), strict=True))
        third = c.stage == 3
        per_sample = max(1, self.flops_per_sample) / 3 / x["speed"]
        crowded = x["pressure"] * fill ** x["steepness"] + x["edge"] * fill**_EDGE_POWER
        compute = per_sample * (micro_batch + x["idle"]) * (1 + crowded)
        after = (x["backward"] + c.recomputed) * compute
        reduced, messages = self._reduction(x, c)
        forward_gathers, gathers, gather_messages, covered = self._gathers(x, c, accumulation)
        gathers = gathers * (1 + c.recomputed)
        hooks = third * (x["hooks"] + x["fetch"] * c.offload_param)
        reduction_hooks = np.where(c.stage == 2, _REDUCTION_HOOKS * x["hooks"], hooks)

        share = c.overlap * np.minimum(1.0, x["hidden"])
        saved = 1 - np.minimum(1.0, x["contention"])
        hidden = np.minimum(forward_gathers * (1 - 1 / gather_messages), share * covered * compute)
        gathering = forward_gathers - saved * hidden
        hidden = np.minimum(reduced * (1 - 1 / messages), share * after)
        hidden = hidden + np.minimum(gathers * (1 - 1 / gather_messages), covered * (share * after - hidden))
        communicating = reduced + gathers - saved * hidden
        each_time = c.stage >= 2
        forward = accumulation * (compute + hooks + gathering)
        backward = accumulation * (after + reduction_hooks) + np.where(each_time, accumulation, 1) * communicating
        other = accumulation * x["other"] + 0 * forward
        return np.stack(np.broadcast_arrays(forward, backward, self._update(x, c), other))

    def _reduction(self, x: dict[str, Numbers], c: Columns) -> tuple[Numbers, Numbers]:
        """Return the seconds of the gradients' reduction without overlap, and its messages."""
        messages = np.ceil(self.trainable / np.clip(c.bucket, 1, max(1, self.trainable)))
        scattered = (c.stage > 0) & (c.scatter > 0) & (c.contiguous > 0)
        passes = np.where(c.stage == 3, 1.0, np.where(scattered, np.clip(x["scatter"], 1.0, 2.0), 2.0))
        copies = (1 - c.contiguous) * 2 * self.param_bytes * self.trainable * x["memory"]
        seconds = passes * self._volume(self.trainable) * self._across(x) + messages * x["latency"] + copies
        return (seconds if self.ranks > 1 else 0 * seconds), messages

    def _gathers(
        self, x: dict[str, Numbers], c: Columns, accumulation: Numbers
    ) -> tuple[Numbers, Numbers, Numbers, Numbers]:
        """Return ZeRO 3's gather seconds, forward and backward, messages, and the share of computation that hides them.

        Parameters within half of the reuse distance are kept between the passes. Parameters below the persistence
        threshold are never partitioned. With less prefetching, less communication is hidden. A second copy serves all
        gathers except in the forward pass that follows an optimizer step.
        """
        module = self.params / x["modules"]
        prefetched = np.minimum(c.prefetch, np.maximum(0, c.max_live - module))
        messages = np.maximum(1, self.params / np.maximum(prefetched, module))
        persists = 1 / (1 + (module / np.maximum(1, c.persistence)) ** 3)
        persists = np.where(c.persistence >= self.largest_layer, 1.0, persists)
        late = messages * x["latency"] if self.ranks > 1 else 0
        on_host = c.offload_param * self.param_bytes * self.params
        copied = on_host * (x["pcie"] * (_UNPINNED - c.pinned) + c.swapped * self.ranks_per_node * x["nvme"])
        partitioned = (c.stage == 3) * (1 - persists)
        seconds = partitioned * (self._volume(self.params) * self._across(x) + late + copied / self.ranks)
        shared = self.param_bytes * self.params * (c.copy_ranks - 1) / c.copy_ranks
        near = np.where(c.copy_ranks <= self.ranks_per_node, x["link"], self._across(x))
        from_copy = partitioned * (shared * near + late + copied / c.copy_ranks)
        later = np.where(c.copy_ranks > 1, from_copy, seconds)
        forward = np.where(c.copy_ranks > 1, (seconds + (accumulation - 1) * later) / accumulation, seconds)
        again = 1 - np.minimum(1, c.max_reuse / 2 / max(1, self.params))
        return forward, again * later, messages, np.minimum(1, prefetched / (x["ahead"] * module))

    def _update(self, x: dict[str, Numbers], c: Columns) -> Numbers:
        """Return the seconds of the optimizer step: from reduced gradients to parameters ready for the next step."""
        owned = self.trainable / np.where(c.stage > 0, self.ranks, 1)
        on_device = 2 * (_STATES_BYTES + self.param_bytes) * owned * x["memory"]  # each byte is read and written
        copies = 2 * self.param_bytes * owned * x["pcie"] * (_UNPINNED - c.pinned)
        on_node = owned * self.ranks_per_node
        swapped = c.nvme * 2 * (_STATES_BYTES + _GRADIENT_BYTES) * on_node * x["nvme"]
        on_host = copies + c.host_share * (on_node * x["adam"] + swapped) + (1 - c.host_share) * on_device
        written = c.offload_param * c.swapped * self.param_bytes * on_node * x["nvme"]
        groups = (c.stage == 3) * np.ceil(owned / c.sub_group) * x["group"]
        collected = ((c.stage == 1) | (c.stage == 2)) * (self.ranks > 1)
        result: Numbers = (
            np.where(c.offload > 0, on_host, on_device)
            + written
            + groups
            + collected * (self._volume(self.trainable) * self._across(x) + x["latency"])
        )
        return result

    def _across(self, x: dict[str, Numbers]) -> Numbers:
        """Return the seconds per byte of a collective over all ranks."""
        if self.ranks <= self.ranks_per_node:
            return x["link"]
        return x["network"] if self.ranks_per_node == 1 else np.maximum(x["link"], x["network"])

    def _volume(self, elements: int) -> float:
        """Return the bytes that a rank transfers to gather or to scatter ``elements``."""
        return self.param_bytes * elements * (self.ranks - 1) / self.ranks

    def fit(self, timings: Timings, *, error: float = ERROR) -> LogCoefficients:
        """Return the maximum a posteriori coefficients given measured steps; the prior without measurements.

        Levenberg-Marquardt iterations on the logarithms, from the prior's medians.

        ``error`` is the relative standard deviation of the model's error of a step, including noise.
        """
        prior = self.prior_coefficients()
        start, weight = prior.mean, np.linalg.inv(prior.covariance)
        logs, damping = start, 1e-2
        residuals, jacobian = self._residuals(logs, timings, error)
        for _ in range(_MAX_ITERATIONS if len(timings.latency) else 0):
            normal = jacobian.T @ jacobian + weight
            downhill = jacobian.T @ residuals + weight @ (logs - start)
            change = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), downhill)
            trial = logs - np.clip(change, -_MAX_CHANGE, _MAX_CHANGE)
            trial_residuals, trial_jacobian = self._residuals(trial, timings, error)
            before = residuals @ residuals + (logs - start) @ weight @ (logs - start)
            after = trial_residuals @ trial_residuals + (trial - start) @ weight @ (trial - start)
            if after < before:
                logs, residuals, jacobian, damping = trial, trial_residuals, trial_jacobian, damping / 5
                if before - after < 1e-4 * (1 + after):
                    break
            else:
                damping *= 10
        return LogCoefficients(mean=logs, covariance=np.linalg.inv(jacobian.T @ jacobian + weight))

    def _residuals(self, logs: Numbers, timings: Timings, error: float) -> tuple[Numbers, Numbers]:
        """Return the residuals in standard deviations, and their Jacobian in the logarithms of the coefficients.

        There is one for each whole step, and one for each known phase, of twice the error: a phase that the formula
        does not describe must not outweigh the speed. They are differences of logarithms: relative to the measured
        seconds, a prediction that is far too short is off by at most 1, and the fit would prefer it to one that is
        twice too long.
        """
        step = 1e-4
        variants = np.concatenate([logs[:, None], logs[:, None] + step * np.eye(len(logs))], axis=1)[:, :, None]
        result = self.phases(variants, timings.columns, timings.micro_batch, timings.accumulation, timings.fill)
        known = ~np.isnan(timings.phases)
        phases = np.where(known, timings.phases, 0.0)[:, None, :]
        floor = _FLOOR / error * timings.latency
        by_phase = np.moveaxis(np.log((result + floor) / (phases + floor)), 0, 1)[:, known] / _PHASE_ERROR
        whole = np.log(result.sum(axis=0) / timings.latency)
        values = np.concatenate([by_phase, whole], axis=1) / error
        values = np.clip(values, -1e6, 1e6)
        return values[0], ((values[1:] - values[0]) / step).T

    def slopes(
        self, fitted: LogCoefficients, c: Columns, micro_batch: Numbers, accumulation: Numbers, fill: Numbers
    ) -> tuple[Numbers, Numbers]:
        """Return the phases (4, n) at the mean coefficients, and their derivatives in the logarithms, (4, k, n)."""
        step = 1e-3
        logs = fitted.mean[:, None]
        variants = np.concatenate([logs, logs + step * np.eye(len(fitted.mean))], axis=1)[:, :, None]
        result = self.phases(variants, c, micro_batch, accumulation, fill)
        return result[:, 0], (result[:, 1:] - result[:, :1]) / step

    def expected(
        self, fitted: LogCoefficients, c: Columns, micro_batch: Numbers, accumulation: Numbers, fill: Numbers
    ) -> tuple[Numbers, Numbers]:
        """Return the phases (4, n) without a launch, and the standard deviation (n) of the logarithm of their sum."""
        phases, slopes = self.slopes(fitted, c, micro_batch, accumulation, fill)
        relative = slopes.sum(axis=0) / phases.sum(axis=0)
        return phases, np.sqrt(np.einsum("kn,kl,ln->n", relative, fitted.covariance, relative) + _UNSEEN_ERROR**2)

    def bounds(
        self, logs: Numbers, c: Columns, micro_batch: Numbers, accumulation: Numbers, fill: Numbers
    ) -> dict[str, Numbers]:
        """Return the seconds of a step that each resource of ``BOUNDS`` costs, and the remainder as ``compute``.

        Each is the reduction of the step time if the resource cost nothing: communication hidden behind computation
        counts only by the slow-down it causes.
        """
        zero = np.tile(logs[:, None, None], (1, 1 + len(BOUNDS), 1))
        for column, names in enumerate(BOUNDS.values(), start=1):
            zero[[COEFFICIENTS.index(name) for name in names], column] = -np.inf
        totals = self.phases(zero, c, micro_batch, accumulation, fill).sum(axis=0)
        record = {name: np.maximum(0.0, totals[0] - totals[row]) for row, name in enumerate(BOUNDS, start=1)}
        return {"compute": np.maximum(0.0, totals[0] - sum(record.values())), **record}


def _nvme_prior(hardware: Hardware) -> dict[str, tuple[float, float]]:
    """Return the prior of the coefficient of NVMe if its speed was measured."""
    speed = hardware.nvme_bytes_per_s
    return {} if speed is None else {"nvme": (1 / speed, _MEASURED)}
