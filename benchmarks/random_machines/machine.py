"""What becomes of a launch on a machine drawn at random: its times, its memory, or its failure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.random_machines.draw import FLAGS, Drawn, Hardware, Net, draw
from benchmarks.random_machines.forms import Array
from benchmarks.random_machines.settings import Settings, structure_of
from optuna_dsat.outcome import Outcome
from tests.harness.simulated import SimulatedProfile, SimulatedResult

GIB = 2**30
_HALF, _ADAM, _GRADIENTS = 2, 12, 2
"""Bytes per parameter: fp16 parameters; master copy, momentum and variance in fp32; fp16 gradients."""
_ATTEMPTS = 50
_SMALLEST_SIZE = 10_000
"""Elements that the curves over a knob's size begin with."""


@dataclass(frozen=True, kw_only=True)
class RandomMachine:
    """A model on a machine. Implements ``tests.harness.simulated.Landscape``."""

    drawn: Drawn
    user_structure: tuple[int, bool, bool]

    @property
    def name(self) -> str:
        """``machine-<seed>``."""
        return f"machine-{self.drawn.seed}"

    @property
    def about(self) -> str:
        """Model, machine and the forms that decide its times."""
        net, hardware = self.net, self.hardware
        device = "GPUs" if hardware.kind == "cuda" else "CPU ranks"
        return (
            f"{net.family} of {net.params / 1e9:.3g} B parameters on {hardware.gpus} {device} "
            f"of {hardware.device_bytes / GIB:.3g} GiB; compute {self.drawn.compute.form}"
        )

    @property
    def net(self) -> Net:
        """The model."""
        return self.drawn.net

    @property
    def hardware(self) -> Hardware:
        """The devices and their hosts."""
        return self.drawn.hardware

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
        return self.net.flops_per_sample * self.drawn.profiled_flops

    @property
    def user_config(self) -> dict[str, Any]:
        """The DeepSpeed config that every method starts from: a structure that fits, at the user's micro-batch."""
        stage, optimizer, params = self.user_structure
        zero: dict[str, Any] = {"stage": stage}
        if optimizer:
            zero["offload_optimizer"] = {"device": "cpu"}
        if params:
            zero["offload_param"] = {"device": "cpu"}
        return {
            "train_micro_batch_size_per_gpu": self.drawn.user_micro_batch,
            "gradient_accumulation_steps": 1,
            "fp16": {"enabled": True},  # the older peers know nothing else
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": zero,
        }

    @cached_property
    def most(self) -> int:
        """A micro-batch beyond which activations alone fill the device."""
        return int(2 * self.device_bytes / self.net.activation_bytes) + 2

    def profile(self, slots: int) -> SimulatedProfile:  # noqa: ARG002 - a machine has its own number of devices
        """Return what a profile launch measures: activations and FLOPs up to 20 % wrong."""
        peak = self._allocated(Settings.of(self.user_config), np.ones(1))[0]
        return SimulatedProfile(
            params=self.params,
            trainable_params=self.params,
            largest_layer_params=self.net.largest_layer_params,
            param_bytes=_HALF,
            activation_bytes_per_sample=max(1, int(self.net.activation_bytes * self.drawn.profiled_activations)),
            flops_per_sample=max(1, int(self.flops_per_sample)),
            device_memory_bytes=self.device_bytes,
            host_memory_bytes=self.hardware.host_bytes,
            peak_bytes=int(peak),
        )

    def run(self, ds_config: Mapping[str, Any], slots: int) -> SimulatedResult:  # noqa: ARG002 - see profile
        """Return what becomes of a launch, without noise."""
        settings = Settings.of(ds_config)
        sizes = np.array([float(ds_config["train_micro_batch_size_per_gpu"])])
        hardware = self.hardware
        if structure_of(settings) in self.drawn.refused:
            return SimulatedResult(
                outcome=Outcome.INVALID_CONFIG, startup_s=hardware.startup_s * 0.6, message="this is not supported here"
            )
        host = self.host(settings)
        startup_s = hardware.startup_s + 0.03 * host / GIB
        if host > hardware.host_bytes:
            return SimulatedResult(
                outcome=Outcome.HOST_OUT_OF_MEMORY, startup_s=startup_s, message="the host ran out of memory"
            )
        needs = float(self.device(settings, sizes)[0])
        times = self._parts(settings, sizes)
        if needs > hardware.device_bytes:
            states = float(self.device(settings, np.zeros(1))[0]) > hardware.device_bytes
            return SimulatedResult(
                outcome=Outcome.OUT_OF_MEMORY,
                startup_s=0.7 * startup_s if states else startup_s,
                missing_bytes=math.ceil(needs - hardware.device_bytes),
                message="CUDA out of memory",
            )
        forward, backward, step, other = (float(part[0]) for part in times)
        return SimulatedResult(
            startup_s=startup_s,
            forward_s=forward,
            backward_s=backward,
            step_s=step,
            other_s=other,
            peak_bytes=int(self._allocated(settings, sizes)[0]),
        )

    def fits(self, settings: Settings, sizes: Array) -> NDArray[np.bool_]:
        """Return for each micro-batch whether it runs; shape of ``sizes``."""
        runs = structure_of(settings) not in self.drawn.refused and self.host(settings) <= self.hardware.host_bytes
        return (self.device(settings, sizes) <= self.device_bytes) & runs

    def step_s(self, settings: Settings, sizes: Array) -> Array:
        """Return seconds per optimizer step for each micro-batch; shape of ``sizes``."""
        forward, backward, step, other = self._parts(settings, sizes)
        return np.asarray(forward + backward + step + other, dtype=np.float64).reshape(sizes.shape)

    def host(self, settings: Settings) -> float:
        """Return bytes on one host that offload takes."""
        hardware, net = self.hardware, self.net
        owned = net.params / hardware.gpus
        optimizer = (_ADAM + 4) * settings.host_share(owned) + _HALF * settings.offload_optimizer
        per_rank = optimizer * owned + _HALF * owned * settings.offload_param
        return per_rank * min(hardware.gpus, hardware.gpus_per_node)

    def device(self, settings: Settings, sizes: Array) -> Array:
        """Return peak bytes on a device for each micro-batch, with context and fragmentation; shape of ``sizes``."""
        return self.drawn.context_bytes + (1 + self.drawn.fragmentation) * self._allocated(settings, sizes)

    def _allocated(self, settings: Settings, sizes: Array) -> Array:
        net = self.net
        activations = net.activation_bytes * sizes * self.drawn.activations.at(sizes)
        return self._states(settings) + activations

    def _states(self, settings: Settings) -> float:
        """Return bytes of model states and buffers on a device (ZeRO, arXiv:1910.02054, table 1), with a deviation.

        From ZeRO 2 on an offloaded optimizer has the gradients, too (ZeRO-Offload, arXiv:2101.06840).
        """
        params, ranks = self.net.params, self.hardware.gpus
        owned = params / ranks
        weights = _HALF * (owned if settings.stage == 3 else params) * (not settings.offload_param)
        gradients = _GRADIENTS * (owned * (1 - settings.host_share(owned)) if settings.stage >= 2 else params)
        adam = (1 - settings.host_share(owned)) * _ADAM * (owned if settings.stage else params)
        buffers = min(settings.bucket, params) * _HALF * (1 + settings.overlap)
        if settings.stage == 3:
            gathered = self.net.largest_layer_params + min(settings.prefetch, params)
            buffers += _HALF * min(float(params), gathered + min(settings.max_live, settings.max_reuse) / 4)
        return (weights + gradients + adam) * self.drawn.structure_bytes[structure_of(settings)] + buffers

    def _parts(self, settings: Settings, sizes: Array) -> tuple[Array, Array, Array, Array]:
        """Return seconds of forward, backward, optimizer step and the rest of one global step."""
        drawn, hardware, net = self.drawn, self.hardware, self.net
        work = drawn.tiles.work(sizes) if drawn.tiles else sizes
        compute = net.flops_per_sample / hardware.flops * work * drawn.compute.at(sizes)
        compute = compute * (1 + drawn.pressure * self._excess(settings, sizes))
        per_micro, per_step = self._communication(settings)
        exposed = np.maximum(per_micro - drawn.hidden * compute * settings.overlap, 0.1 * per_micro)
        micro = np.maximum(compute * drawn.straggler + exposed + drawn.host_s, drawn.load_s * sizes)
        reduced = per_step if settings.stage < 2 else 0.0  # in the last backward pass, as DeepSpeed does
        step = per_step - reduced + self._update(settings) + drawn.fixed_s
        factor = drawn.structure_times[structure_of(settings)] * self._knobs(settings)
        times = settings.accumulation * micro * factor
        return times * 0.33, times * 0.62 + reduced * factor, np.asarray(step * factor) + 0 * sizes, times * 0.05

    def _excess(self, settings: Settings, sizes: Array) -> Array:
        full = self.device(settings, sizes) / self.device_bytes
        beyond = np.clip((full - self.drawn.pressure_from) / (1 - self.drawn.pressure_from), 0.0, 1.0)
        return np.asarray(np.ceil(beyond) if self.drawn.pressure_step else beyond**2, dtype=np.float64)

    def _communication(self, settings: Settings) -> tuple[float, float]:
        """Return seconds of collectives per micro-batch and per optimizer step; ring collectives of fp16 elements."""
        hardware, net = self.hardware, self.net
        seconds = _HALF * net.params * (hardware.gpus - 1) / hardware.gpus / hardware.link_bytes_per_s
        if not self.drawn.realistic:
            return seconds, seconds
        if hardware.gpus > 1:
            seconds += hardware.link_latency_s * math.ceil(net.params / settings.bucket)
        copied = _HALF * net.params / hardware.gpus / hardware.pcie_bytes_per_s * settings.offload_param
        per_micro = {0: 0.0, 1: 0.0, 2: seconds, 3: 3 * seconds}[settings.stage] + 2 * copied * self.drawn.params_slow
        return per_micro, {0: 2 * seconds, 1: 2 * seconds, 2: seconds, 3: 0.0}[settings.stage]

    def _update(self, settings: Settings) -> float:
        hardware, net = self.hardware, self.net
        owned = net.params / hardware.gpus if settings.stage else float(net.params)
        share, on_device = settings.host_share(owned), 30 * owned / (hardware.flops / 100)
        if not settings.offload_optimizer:
            return on_device
        moved = 2 * _HALF * owned / hardware.pcie_bytes_per_s
        updated = share * net.params / hardware.nodes / hardware.adam_params_per_s
        return (moved + updated) * self.drawn.optimizer_slow + (1 - share) * on_device

    def _knobs(self, settings: Settings) -> float:
        factor = 1.0
        for name in FLAGS:
            if settings.stage and getattr(settings, name):
                factor *= self.drawn.flags.get(name, 1.0)
        for name, curve in self.drawn.sizes.items():
            if settings.stage == 3 or (settings.stage and name == "bucket"):
                factor *= float(curve.at(np.array([getattr(settings, name) / _SMALLEST_SIZE]))[0])
        return factor


@cache
def machine_of(seed: int) -> RandomMachine:
    """Return the machine of a seed; dice are thrown anew until some structure fits the user's micro-batch.

    Raises:
        RuntimeError: If none does in many throws.
    """
    for attempt in range(_ATTEMPTS):
        drawn = draw(seed, attempt)
        for structure in drawn.habits:
            result = RandomMachine(drawn=drawn, user_structure=structure)
            settings = Settings.of(result.user_config)
            if result.fits(settings, np.array([float(drawn.user_micro_batch)]))[0]:
                return result
    raise RuntimeError(f"no machine of seed {seed} runs its model")
