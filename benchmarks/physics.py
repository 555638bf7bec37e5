"""What a training step of DeepSpeed costs in time and memory: the arithmetic behind the landscapes.

Written for the benchmark alone, from the papers and from DeepSpeed's source, without a look at the tuner's own memory
model: the tuner is judged by it, so it must not share its mistakes. Symbols: P parameters, N ranks, m the micro-batch,
g gradient accumulation steps. Parameters and gradients have 2 bytes (fp16), master copy and Adam's state 12.

Sources: ZeRO (Rajbhandari et al., arXiv:1910.02054) for model states and communication volumes; ZeRO-Offload (Ren et
al., arXiv:2101.06840) for the optimizer on the host; ring collectives move ``(N - 1) / N`` of a tensor per
reduce-scatter or all-gather and twice that per all-reduce; Hockney's ``latency + bytes / bandwidth`` per message.

Known simplifications: layers are even; what is hidden behind computation is a fixed share of it; no stragglers.
Micro-batches may be arrays, so that a whole range is computed at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.harness.simulated import SimulatedProfile

Numbers = float | NDArray[np.float64]
"""One value, or one for each of several micro-batches."""

_HALF = 2
"""Bytes of an fp16 element."""
_STATES = 12
"""Bytes per parameter of master copy, momentum and variance in fp32."""
_STAGE0_BUCKET = 500_000_000
"""Elements that DeepSpeed reduces at a time without ZeRO."""
_HIDDEN = 0.7
"""Share of a computation behind which collectives on another stream can hide, all together."""
_CONTENTION = 0.15
"""Slow-down of a computation covered by collectives, which take multiprocessors and memory bandwidth."""
_MATRICES_PER_LAYER = 4
_SMALL_SHARE = 0.002
"""Share of the parameters that are biases and norms."""
_LEFT_IN_BACKWARD = 0.3
"""Share of the activations still live when the gradients peak."""
_SUB_GROUP_S = 0.0005
"""Host time of one sub-group of the optimizer step."""
_HOOK_S = 0.001
"""Host time per layer and pass of the hooks with which ZeRO 3 fetches and releases parameters."""
_HOST_COPY_S = 0.0002
"""Per matrix and pass: starting the copy of an offloaded parameter and waiting for it."""


@dataclass(frozen=True, kw_only=True)
class Net:
    """What is trained."""

    params: int
    largest_layer_params: int
    """Parameters of the largest single module (the embedding, mostly)."""
    flops_per_sample: float
    """Forward and backward."""
    activation_bytes: int
    """Per sample, at the end of the forward pass, at a micro-batch of 1."""


@dataclass(frozen=True, kw_only=True)
class Model(Net):
    """The model of a named landscape."""

    layers: int
    matrix_params: int
    """Elements of a typical weight matrix: below the persistence threshold, ZeRO 3 never partitions it."""
    half_batch: float
    """Micro-batch at which the GPU reaches half its speed."""
    other_s: float = 0.002
    """Per micro-batch: data loading and Python."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What it is trained on."""

    kind: str = "cuda"
    """``cuda`` or ``cpu``."""
    gpus: int
    """Devices, or ranks on the CPU."""
    gpus_per_node: int
    device_bytes: int
    """Of one device, or one rank's share of the host's memory."""
    host_bytes: int
    """Of one node."""
    flops: float
    """FLOP/s of one device at large micro-batches, as reached, not as advertised."""
    link_bytes_per_s: float
    """Of one device in a collective over all devices."""
    link_latency_s: float
    """Of one collective."""
    pcie_bytes_per_s: float
    """Of one device."""
    adam_params_per_s: float
    """Parameters that the CPUs of one node update per second."""

    @property
    def nodes(self) -> int:
        """Hosts."""
        return -(-self.gpus // self.gpus_per_node)


@dataclass(frozen=True, kw_only=True)
class Machine(Hardware):
    """The machine of a named landscape."""

    hbm_bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Quirks:
    """What no memory model knows."""

    context_bytes: int = 900 * 2**20
    """CUDA context, libraries and NCCL buffers: not counted by torch's allocator."""
    fragmentation: float = 0.03
    """Share of what is allocated that is lost between blocks."""
    profiled_activations: float = 1.0
    """Activation bytes per sample as the profile launch sees them, relative to the truth."""
    pressure: float = 0.05
    """Slow-down of the computation when memory is full: the allocator flushes its cache, kernels get less workspace."""
    pressure_from: float = 0.92
    """Share of the memory in use at which that begins."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A DeepSpeed config without its micro-batch, as far as it matters.

    Defaults are those of ``deepspeed.runtime.zero.config`` in DeepSpeed 0.19.8.
    """

    accumulation: int
    stage: int
    offload_optimizer: bool
    offload_param: bool
    contiguous: bool
    overlap: bool
    reduce_scatter: bool
    bucket: float
    prefetch: float
    max_live: float
    max_reuse: float
    persistence: float
    sub_group: float
    ratio: float
    """Share of the optimizer that is offloaded, in whole sub-groups."""

    def host_share(self, owned: float) -> float:
        """Return the share of the optimizer on the host, given the parameters that a rank owns; 0 without offload."""
        if not self.offload_optimizer or self.ratio == 1:
            return float(self.offload_optimizer)
        groups = math.ceil(owned / self.sub_group)
        return 1 - math.floor((1 - self.ratio) * groups) / groups

    @classmethod
    def of(cls, ds_config: Mapping[str, Any]) -> Settings:
        """Read a whole DeepSpeed config. The all-gather bucket has no effect with torch 1.13 or newer."""
        zero = ds_config.get("zero_optimization") or {}
        stage = int(zero.get("stage", 0))

        def flag(key: str, default: bool) -> bool:
            value = zero.get(key)
            return default if value is None else bool(value)

        def size(key: str, default: float) -> float:
            value = zero.get(key)
            return default if value is None else float(value)

        def offloaded(key: str) -> bool:
            return bool((zero.get(key) or {}).get("device", "none") != "none")

        offload = stage > 0 and offloaded("offload_optimizer")
        return cls(
            accumulation=int(ds_config.get("gradient_accumulation_steps") or 1),
            stage=stage,
            offload_optimizer=offload,
            offload_param=stage == 3 and offloaded("offload_param"),
            contiguous=flag("contiguous_gradients", True) or (offload and stage < 3),
            overlap=flag("overlap_comm", stage == 3),
            reduce_scatter=flag("reduce_scatter", True),
            bucket=size("reduce_bucket_size", 5e8) if stage else _STAGE0_BUCKET,
            prefetch=size("stage3_prefetch_bucket_size", 5e7),
            max_live=size("stage3_max_live_parameters", 1e9),
            max_reuse=size("stage3_max_reuse_distance", 1e9),
            persistence=size("stage3_param_persistence_threshold", 1e5),
            sub_group=size("sub_group_size", 1e9),
            ratio=float((zero.get("offload_optimizer") or {}).get("ratio", 1.0)) if offload and stage == 3 else 1.0,
        )


class OnHardware:
    """A model on hardware: the common part of named landscapes and machines drawn at random."""

    net: Net
    hardware: Hardware

    @property
    def slots(self) -> int:
        """Devices of one launch."""
        return self.hardware.gpus

    @property
    def nodes(self) -> int:
        """Hosts."""
        return self.hardware.nodes

    @property
    def kind(self) -> str:
        """``cuda`` or ``cpu``."""
        return self.hardware.kind

    @property
    def device_bytes(self) -> int:
        """Memory of one device."""
        return self.hardware.device_bytes

    @property
    def params(self) -> int:
        """Parameters of the model."""
        return self.net.params

    @property
    def flops_per_sample(self) -> float:
        """FLOPs of forward and backward, as profiled."""
        return self.net.flops_per_sample

    def _config(self, zero: Mapping[str, Any], micro_batch: int) -> dict[str, Any]:
        """Return the config that every method starts from; fp16, because the older peers know nothing else."""
        return {
            "train_micro_batch_size_per_gpu": micro_batch,
            "gradient_accumulation_steps": 1,
            "fp16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": dict(zero),
        }

    def _profile(self, *, activations: float, peak_bytes: float) -> SimulatedProfile:
        """Return the profile; ``activations`` is the ratio of measured to true activation bytes."""
        return SimulatedProfile(
            params=self.params,
            trainable_params=self.params,
            largest_layer_params=self.net.largest_layer_params,
            param_bytes=_HALF,
            activation_bytes_per_sample=max(1, int(self.net.activation_bytes * activations)),
            flops_per_sample=max(1, int(self.flops_per_sample)),
            device_memory_bytes=self.device_bytes,
            host_memory_bytes=self.hardware.host_bytes,
            peak_bytes=int(peak_bytes),
        )


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Memory of one rank and of one host, in bytes."""

    states: float
    """On the device before the first step, with context and fragmentation."""
    device: Numbers
    """Peak on the device, with context and fragmentation: what decides whether it fits."""
    allocated: Numbers
    """Peak that torch's allocator reports: what a launch can measure."""
    host: float


def usage(model: Model, machine: Machine, quirks: Quirks, s: Settings, micro_batch: Numbers) -> Usage:
    """Return the memory a configuration takes at one or several micro-batches."""
    owned = model.params / machine.gpus if s.stage else model.params
    persistent, resident = _resident(model, machine, s, owned)
    buckets = 0.0 if s.stage == 0 else s.bucket * _HALF * (int(s.contiguous) + int(s.overlap and s.stage < 3))
    gathered = _gathered(model, s)
    gradients = _gradients(model, s, owned)
    activations = model.activation_bytes * micro_batch
    in_flight = min(s.bucket, model.params) * _HALF if machine.gpus > 1 else 0.0
    kept = gradients if s.accumulation > 1 else 0.0
    forward = persistent + buckets + gathered + kept + activations
    backward = persistent + buckets + gathered / 2 + gradients + in_flight + _LEFT_IN_BACKWARD * activations
    converted = 0.0 if s.host_share(owned) == 1 else 4 * (min(owned, s.sub_group) if s.stage == 3 else owned)
    step = persistent + buckets + gradients + converted
    allocated = np.maximum(np.maximum(forward, backward), step)
    lost = 1 + quirks.fragmentation + (0.0 if s.contiguous else 0.02)
    return Usage(
        states=quirks.context_bytes + lost * (persistent + buckets),
        device=quirks.context_bytes + lost * allocated,
        allocated=allocated,
        host=resident * min(machine.gpus, machine.gpus_per_node),
    )


def _resident(model: Model, machine: Machine, s: Settings, owned: float) -> tuple[float, float]:
    """Return the bytes that live from start to end on one device, and on the host for one rank."""
    device = host = 0.0
    if s.stage < 3:
        device += _HALF * model.params
    elif s.offload_param:
        host += _HALF * model.params / machine.gpus
    else:
        device += _HALF * model.params / machine.gpus
    if s.stage == 3:
        device += _HALF * model.params * _persistent_share(model, s)
    if s.offload_optimizer:
        share = s.host_share(owned)
        host += ((_STATES + 4) * share + _HALF) * owned
        device += _HALF * model.largest_layer_params + (1 - share) * _STATES * owned
    else:
        device += _STATES * owned
        device += _HALF * owned if s.stage == 3 else 0.0
    return device, host


def _gradients(model: Model, s: Settings, owned: float) -> float:
    """Return the bytes of gradients on one device at the end of the backward pass, beside what always lives."""
    if s.stage == 0:
        return float(_HALF * model.params)
    if s.stage == 3:
        return 0.0
    early = s.overlap and s.contiguous and s.accumulation == 1
    if s.stage == 1 and not early:
        return float(_HALF * model.params) + (_HALF * owned if s.contiguous and not s.offload_optimizer else 0.0)
    return 0.0 if s.offload_optimizer else _HALF * owned


def _gathered(model: Model, s: Settings) -> float:
    """Return the bytes of parameters that ZeRO 3 holds gathered at the end of the forward pass."""
    if s.stage < 3:
        return 0.0
    live = model.largest_layer_params + max(_prefetched(model, s), s.max_reuse / 2)
    return _HALF * (min(model.params, live) * (1 - _persistent_share(model, s)) + _prefetched(model, s))


def _prefetched(model: Model, s: Settings) -> float:
    """Return how many elements ZeRO 3 gathers ahead."""
    room = max(0.0, s.max_live - model.params / model.layers)
    return min(s.prefetch, room, float(model.params))


def _persistent_share(model: Model, s: Settings) -> float:
    """Return the share of the parameters that ZeRO 3 leaves whole: too small to be worth a gather."""
    if s.persistence >= model.matrix_params:
        return 1 - min(0.9, model.largest_layer_params / model.params)
    return _SMALL_SHARE if s.persistence > 10_000 else 0.0


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of one optimizer step."""

    forward: Numbers
    backward: Numbers
    step: float
    other: float

    @property
    def total(self) -> Numbers:
        """From one step to the next."""
        return self.forward + self.backward + self.step + self.other


def step_times(model: Model, machine: Machine, quirks: Quirks, s: Settings, micro_batch: Numbers) -> StepTimes:
    """Return the times of one optimizer step of a configuration that fits, at one or several micro-batches."""
    full = usage(model, machine, quirks, s, micro_batch).device / machine.device_bytes
    excess = np.clip((full - quirks.pressure_from) / (1 - quirks.pressure_from), 0.0, 1.0)
    compute = model.flops_per_sample / 3 * (micro_batch + model.half_batch) / machine.flops
    compute = compute * (1 + quirks.pressure * excess**2)
    hooks = model.layers * (_HOOK_S + _MATRICES_PER_LAYER * _HOST_COPY_S * s.offload_param) if s.stage == 3 else 0.0
    forward = compute + hooks + _exposed(_gathers(model, machine, s, share=1.0), compute, overlap=s.overlap)
    kept = min(1.0, s.max_reuse / 2 / model.params)
    gathers = _gathers(model, machine, s, share=1 - kept)
    reduction = _reduction(model, machine, s)
    if s.stage >= 2:
        exposed = _exposed(gathers + reduction, 2 * compute, overlap=s.overlap)
        backward = s.accumulation * (2 * compute + hooks + exposed)
    else:
        overlap = s.overlap and s.stage == 1
        backward = s.accumulation * 2 * compute + _exposed(reduction, 2 * compute, overlap=overlap)
    return StepTimes(
        forward=s.accumulation * forward,
        backward=backward,
        step=_update(model, machine, s),
        other=s.accumulation * model.other_s,
    )


@dataclass(frozen=True, kw_only=True)
class _Traffic:
    """Collectives of one pass."""

    seconds: float = 0.0
    tail: float = 0.0
    """Of these, what nothing can hide: the first gather, the last bucket."""
    covered: float = 1.0
    """Share of the computation that is of use for hiding them."""

    def __add__(self, other: _Traffic) -> _Traffic:
        """Return both, sharing one link and one computation."""
        seconds = self.seconds + other.seconds
        covered = (self.covered * self.seconds + other.covered * other.seconds) / seconds if seconds else 1.0
        return _Traffic(seconds=seconds, tail=self.tail + other.tail, covered=covered)


def _exposed(traffic: _Traffic, compute: Numbers, *, overlap: bool) -> Numbers:
    """Return the seconds of collectives that computation does not hide, and what hiding the others costs it."""
    if not overlap:
        return traffic.seconds
    exposed = np.maximum(traffic.seconds - _HIDDEN * traffic.covered * compute, traffic.tail)
    return exposed + _CONTENTION * (traffic.seconds - exposed)


def _volume(model: Model, machine: Machine) -> float:
    """Return the bytes one rank moves in a reduce-scatter or an all-gather of the whole model."""
    return _HALF * model.params * (machine.gpus - 1) / machine.gpus


def _reduction(model: Model, machine: Machine, s: Settings) -> _Traffic:
    """Return the reduction of all gradients: all buckets but the last can hide.

    Without ``reduce_scatter`` the gradients are all-reduced. Buckets that are not contiguous are flattened first.
    """
    if machine.gpus == 1:
        return _Traffic()
    messages = math.ceil(model.params / min(s.bucket, model.params))
    scattered = s.stage == 3 or (s.stage > 0 and s.reduce_scatter and s.contiguous)
    seconds = _volume(model, machine) * (1 if scattered else 2) / machine.link_bytes_per_s
    seconds += messages * machine.link_latency_s
    if not s.contiguous:
        seconds += 2 * _HALF * model.params / machine.hbm_bytes_per_s
    return _Traffic(seconds=seconds, tail=seconds / messages)


def _gathers(model: Model, machine: Machine, s: Settings, *, share: float) -> _Traffic:
    """Return the gathers of ZeRO 3 in one pass, of a share of the parameters.

    Small prefetch buckets mean a message per matrix, and are the less hidden the smaller they are against a layer.
    Offloaded parameters come over PCIe first.
    """
    if s.stage < 3 or (machine.gpus == 1 and not s.offload_param):
        return _Traffic()
    prefetched = _prefetched(model, s)
    matrices = model.layers * _MATRICES_PER_LAYER
    messages = min(matrices, math.ceil(model.params / max(prefetched, model.params / matrices)))
    seconds = _volume(model, machine) / machine.link_bytes_per_s + messages * machine.link_latency_s
    if s.offload_param:
        seconds += _HALF * model.params / machine.gpus / machine.pcie_bytes_per_s
    seconds *= share * (1 - _persistent_share(model, s))
    covered = min(1.0, prefetched / (model.params / model.layers))
    return _Traffic(seconds=seconds, tail=seconds / messages, covered=covered)


def _update(model: Model, machine: Machine, s: Settings) -> float:
    """Return the seconds from the last gradient to parameters ready for the next step."""
    owned = model.params / machine.gpus if s.stage else model.params
    seconds = (_STATES + 8) * owned / machine.hbm_bytes_per_s
    if s.offload_optimizer:
        share, per_node = s.host_share(owned), model.params / machine.nodes
        seconds *= 1 - share
        seconds += 2 * _HALF * owned / machine.pcie_bytes_per_s + share * per_node / machine.adam_params_per_s
    if s.stage == 3:
        return seconds + math.ceil(owned / s.sub_group) * _SUB_GROUP_S
    if s.stage > 0 and machine.gpus > 1:
        seconds += _volume(model, machine) / machine.link_bytes_per_s + machine.link_latency_s
    return seconds
