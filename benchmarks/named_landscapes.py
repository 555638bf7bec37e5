"""Seven models on seven machines: what would become of any DeepSpeed configuration on each of them.

Each landscape is named after the property that makes it hard, and ``tests/benchmarks`` checks by enumeration that it
has it. The arithmetic is in :mod:`benchmarks.physics`. Models and machines are typical ones with rounded numbers; none
was fitted to a search method.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.physics import Machine, Model, OnHardware, Quirks, Settings, step_times, usage
from benchmarks.random_machines.machine import RandomMachine
from benchmarks.recorded import Recorded
from optuna_dsat.outcome import Outcome
from tests.harness.simulated import SimulatedProfile, SimulatedResult

GIB = 2**30
_STATE_FAILURE = 0.7
"""Share of the start-up after which model states that do not fit are found out."""
_HOST_COPY_S_PER_GIB = 0.05
"""Seconds to allocate and pin offloaded states."""


@dataclass(frozen=True, kw_only=True)
class Trained(OnHardware):
    """A model on a machine. Implements ``tests.harness.simulated.Landscape``."""

    name: str
    about: str
    """What makes it hard."""
    net: Model
    hardware: Machine
    quirks: Quirks
    user_zero: Mapping[str, Any]
    """The ZeRO section of the user's present config, which runs at micro-batch 1."""

    @property
    def most(self) -> int:
        """A micro-batch beyond which activations alone fill the device."""
        return self.hardware.device_bytes // self.net.activation_bytes + 1

    def fits(self, settings: Settings, sizes: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return for each micro-batch whether it runs; shape of ``sizes``."""
        needs = usage(self.net, self.hardware, self.quirks, settings, sizes)
        return np.asarray((needs.device <= self.hardware.device_bytes) & (needs.host <= self.hardware.host_bytes))

    def step_s(self, settings: Settings, sizes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return seconds per optimizer step for each micro-batch that fits; shape of ``sizes``."""
        return np.asarray(step_times(self.net, self.hardware, self.quirks, settings, sizes).total)

    @property
    def user_config(self) -> dict[str, Any]:
        """The DeepSpeed config that every method starts from."""
        return self._config(self.user_zero, 1)

    def profile(self, slots: int) -> SimulatedProfile:  # noqa: ARG002 - a landscape has its own number of devices
        """Return what a profile launch would measure: activations somewhat off, as in practice."""
        peak = usage(self.net, self.hardware, self.quirks, Settings.of(self.user_config), 1).allocated
        return self._profile(activations=self.quirks.profiled_activations, peak_bytes=float(peak))

    def run(self, ds_config: Mapping[str, Any], slots: int) -> SimulatedResult:  # noqa: ARG002 - see profile
        """Return what would become of a launch, without noise."""
        settings, micro_batch = Settings.of(ds_config), int(ds_config["train_micro_batch_size_per_gpu"])
        needs = usage(self.net, self.hardware, self.quirks, settings, micro_batch)
        startup_s = self.startup_s + _HOST_COPY_S_PER_GIB * needs.host / GIB
        if needs.host > self.hardware.host_bytes:
            return SimulatedResult(
                outcome=Outcome.HOST_OUT_OF_MEMORY, startup_s=startup_s, message="the host ran out of memory"
            )
        times = step_times(self.net, self.hardware, self.quirks, settings, micro_batch)
        if needs.device > self.hardware.device_bytes:
            early = needs.states > self.hardware.device_bytes
            return SimulatedResult(
                outcome=Outcome.OUT_OF_MEMORY,
                startup_s=startup_s * _STATE_FAILURE if early else startup_s + float(times.forward),
                missing_bytes=math.ceil(float(needs.device) - self.hardware.device_bytes),
                message="CUDA out of memory",
            )
        return SimulatedResult(
            startup_s=startup_s,
            forward_s=float(times.forward),
            backward_s=float(times.backward),
            step_s=times.step,
            other_s=times.other,
            peak_bytes=int(needs.allocated),
        )

    @property
    def startup_s(self) -> float:
        """Seconds to start the processes, import, build the model and its engine: 20 s and more with the size."""
        return 20.0 + 6.0 * math.sqrt(self.net.params / 1e9)


Computed = Trained | RandomMachine
"""A landscape that answers every configuration by arithmetic, so that its true best is known."""


def throughput(landscape: Computed | Recorded, ds_config: Mapping[str, Any]) -> float:
    """Return the noise-free samples per second over all GPUs, 0 for what does not run: what a config is worth."""
    result = landscape.run(ds_config, landscape.slots)
    if result.outcome is not Outcome.MEASURED:
        return 0.0
    samples = ds_config["train_micro_batch_size_per_gpu"] * int(ds_config.get("gradient_accumulation_steps") or 1)
    return float(samples) * landscape.slots / result.latency_s


def _gpt(*, params: float, layers: int, hidden: int, activation_gib: float, sequence: int, half_batch: float) -> Model:
    return Model(
        params=int(params),
        layers=layers,
        largest_layer_params=50_000 * hidden,
        matrix_params=4 * hidden * hidden,
        flops_per_sample=6 * params * sequence,
        activation_bytes=int(activation_gib * GIB),
        half_batch=half_batch,
    )


_A100_80 = Machine(
    gpus=8, gpus_per_node=8, device_bytes=79 * GIB, host_bytes=960 * GIB, flops=180e12, hbm_bytes_per_s=1.6e12,
    link_bytes_per_s=200e9, link_latency_s=40e-6, pcie_bytes_per_s=12e9, adam_params_per_s=1.2e9,
)  # fmt: skip
_A100_80_TWO_NODES = Machine(
    gpus=16, gpus_per_node=8, device_bytes=79 * GIB, host_bytes=480 * GIB, flops=180e12, hbm_bytes_per_s=1.6e12,
    link_bytes_per_s=20e9, link_latency_s=80e-6, pcie_bytes_per_s=12e9, adam_params_per_s=1.2e9,
)  # fmt: skip
_A100_EIGHT_NODES = Machine(
    gpus=64, gpus_per_node=8, device_bytes=39 * GIB, host_bytes=960 * GIB, flops=160e12, hbm_bytes_per_s=1.3e12,
    link_bytes_per_s=10e9, link_latency_s=250e-6, pcie_bytes_per_s=12e9, adam_params_per_s=1.2e9,
)  # fmt: skip
_A100_40 = Machine(
    gpus=8, gpus_per_node=8, device_bytes=39 * GIB, host_bytes=480 * GIB, flops=160e12, hbm_bytes_per_s=1.3e12,
    link_bytes_per_s=80e9, link_latency_s=40e-6, pcie_bytes_per_s=12e9, adam_params_per_s=1.2e9,
)  # fmt: skip
_V100_ETHERNET = Machine(
    gpus=16, gpus_per_node=4, device_bytes=31 * GIB, host_bytes=240 * GIB, flops=60e12, hbm_bytes_per_s=0.8e12,
    link_bytes_per_s=1.0e9, link_latency_s=1.5e-3, pcie_bytes_per_s=6e9, adam_params_per_s=0.6e9,
)  # fmt: skip
_RTX3090 = Machine(
    gpus=4, gpus_per_node=4, device_bytes=int(23.5 * GIB), host_bytes=256 * GIB, flops=55e12, hbm_bytes_per_s=0.85e12,
    link_bytes_per_s=10e9, link_latency_s=60e-6, pcie_bytes_per_s=11e9, adam_params_per_s=0.7e9,
)  # fmt: skip

_ALL = (
    Trained(
        name="tiny-many-gpus",
        about="0.06 B parameters on 64 GPUs of 8 nodes: everything fits, latency decides",
        net=_gpt(params=60e6, layers=8, hidden=640, activation_gib=0.11, sequence=512, half_batch=14),
        hardware=_A100_EIGHT_NODES,
        quirks=Quirks(profiled_activations=1.05),
        user_zero={"stage": 1},
    ),
    Trained(
        name="fast-links",
        about="1.3 B parameters on 8 GPUs with NVLink: communication is cheap, the micro-batch decides",
        net=_gpt(params=1.3e9, layers=24, hidden=2048, activation_gib=2.6, sequence=2048, half_batch=1.5),
        hardware=_A100_80,
        quirks=Quirks(profiled_activations=0.95),
        user_zero={"stage": 2},
    ),
    Trained(
        name="slow-links",
        about="1.3 B parameters on 16 GPUs over Ethernet: communication decides",
        net=_gpt(params=1.3e9, layers=24, hidden=2048, activation_gib=1.3, sequence=1024, half_batch=1.0),
        hardware=_V100_ETHERNET,
        quirks=Quirks(profiled_activations=1.06, fragmentation=0.04),
        user_zero={"stage": 2},
    ),
    Trained(
        name="only-zero-3",
        about="42 B parameters on 16 GPUs: fits with ZeRO 3 only: the half-precision parameters alone fill a GPU",
        net=_gpt(params=42e9, layers=56, hidden=7680, activation_gib=3.4, sequence=2048, half_batch=0.6),
        hardware=_A100_80_TWO_NODES,
        quirks=Quirks(profiled_activations=0.94, fragmentation=0.05),
        user_zero={"stage": 3},
    ),
    Trained(
        name="only-offload",
        about="6.7 B parameters on 4 small GPUs: fits only with the optimizer (or parameters) on the host",
        net=_gpt(params=6.7e9, layers=32, hidden=4096, activation_gib=0.9, sequence=1024, half_batch=0.8),
        hardware=_RTX3090,
        quirks=Quirks(profiled_activations=1.04),
        user_zero={"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
    ),
    Trained(
        name="zero-3-larger-batch",
        about="6.7 B parameters on 8 GPUs: ZeRO 2 fits too, but ZeRO 3 wins through a larger micro-batch",
        net=_gpt(params=6.7e9, layers=32, hidden=4096, activation_gib=2.2, sequence=1024, half_batch=3.0),
        hardware=_A100_40,
        quirks=Quirks(profiled_activations=1.03),
        user_zero={"stage": 2},
    ),
    Trained(
        name="peak-inside",
        about="0.3 B convolutional parameters on 4 GPUs: kernels lose their workspace long before memory is full",
        net=Model(
            params=300_000_000, layers=50, largest_layer_params=20_000_000, matrix_params=4_000_000,
            flops_per_sample=120e9, activation_bytes=int(0.16 * GIB), half_batch=10.0,
        ),
        hardware=_RTX3090,
        quirks=Quirks(profiled_activations=0.96, pressure=0.8, pressure_from=0.45),
        user_zero={"stage": 1},
    ),
)  # fmt: skip

LANDSCAPES: Mapping[str, Trained] = MappingProxyType({landscape.name: landscape for landscape in _ALL})
"""By name, in the order of the tables."""

_RTX4090_ONE = replace(_RTX3090, gpus=1, gpus_per_node=1, flops=110e12, pcie_bytes_per_s=20e9)
_CPU_RANKS = Machine(
    kind="cpu", gpus=2, gpus_per_node=2, device_bytes=8 * GIB, host_bytes=16 * GIB, flops=0.1e12, hbm_bytes_per_s=10e9,
    link_bytes_per_s=2e9, link_latency_s=300e-6, pcie_bytes_per_s=10e9, adam_params_per_s=0.3e9,
)  # fmt: skip

_TYPICAL = (
    Trained(
        name="125M, 8 x 40 GB",
        about="0.125 B parameters on 8 GPUs: a small model that fits everywhere",
        net=_gpt(params=125e6, layers=12, hidden=768, activation_gib=0.45, sequence=1024, half_batch=4),
        hardware=_A100_40,
        quirks=Quirks(profiled_activations=1.03),
        user_zero={"stage": 2},
    ),
    replace(LANDSCAPES["fast-links"], name="1.3B, 8 x 80 GB"),
    Trained(
        name="7B, 8 x 80 GB",
        about="6.7 B parameters on 8 GPUs of 80 GB: 16 bytes a parameter, 107 GB, do not fit without ZeRO",
        net=_gpt(params=6.7e9, layers=32, hidden=4096, activation_gib=3.6, sequence=2048, half_batch=0.8),
        hardware=_A100_80,
        quirks=Quirks(profiled_activations=1.03),
        user_zero={"stage": 3},
    ),
    Trained(
        name="13B, 8 x 40 GB",
        about="13 B parameters on 8 GPUs of 40 GB: parameters and gradients alone fill a GPU without ZeRO 3",
        net=_gpt(params=13e9, layers=40, hidden=5120, activation_gib=2.6, sequence=1024, half_batch=0.8),
        hardware=_A100_40,
        quirks=Quirks(profiled_activations=1.03),
        user_zero={"stage": 3},
    ),
    Trained(
        name="7B, one 24 GB GPU",
        about="6.7 B parameters on one GPU of 24 GB: the optimizer has to be on the host",
        net=_gpt(params=6.7e9, layers=32, hidden=4096, activation_gib=0.9, sequence=1024, half_batch=0.8),
        hardware=_RTX4090_ONE,
        quirks=Quirks(profiled_activations=1.03),
        user_zero={"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    ),
    replace(LANDSCAPES["slow-links"], name="1.3B, 16 x 32 GB over Ethernet"),
    Trained(
        name="350M, 64 x 40 GB",
        about="0.35 B parameters on 64 GPUs of 8 nodes: gradients are large for the network",
        net=_gpt(params=350e6, layers=24, hidden=1024, activation_gib=0.9, sequence=1024, half_batch=3),
        hardware=_A100_EIGHT_NODES,
        quirks=Quirks(profiled_activations=1.03),
        user_zero={"stage": 2},
    ),
    Trained(
        name="1.4M, 2 CPU ranks",
        about="1.4 M parameters on two CPU ranks: a try-out, as the demo",
        net=_gpt(params=1.4e6, layers=4, hidden=128, activation_gib=0.004, sequence=64, half_batch=6),
        hardware=_CPU_RANKS,
        quirks=Quirks(context_bytes=0, fragmentation=0.0, profiled_activations=1.05),
        user_zero={"stage": 2},
    ),
)  # fmt: skip

TYPICAL: Mapping[str, Trained] = MappingProxyType({landscape.name: landscape for landscape in _TYPICAL})
"""Eight typical cases, whose first trials an expert would choose alike (``tests/benchmarks/golden``)."""
