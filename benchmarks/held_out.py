"""Five more models on five more machines, made after guided search was finished and not looked at while it was tuned.

They show what its figures on :mod:`benchmarks.named_landscapes` owe to its having been made beside those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from benchmarks.named_landscapes import GIB, Trained, _gpt
from benchmarks.physics import Machine, Quirks

__all__ = ["HELD_OUT"]

_OFFLOAD = {"device": "cpu"}

_H100 = Machine(
    gpus=8, gpus_per_node=8, device_bytes=79 * GIB, host_bytes=1500 * GIB, flops=420e12, hbm_bytes_per_s=2.8e12,
    link_bytes_per_s=330e9, link_latency_s=25e-6, pcie_bytes_per_s=40e9, adam_params_per_s=2.5e9,
)  # fmt: skip
_L4 = Machine(
    gpus=8, gpus_per_node=8, device_bytes=22 * GIB, host_bytes=350 * GIB, flops=60e12, hbm_bytes_per_s=0.25e12,
    link_bytes_per_s=6e9, link_latency_s=120e-6, pcie_bytes_per_s=10e9, adam_params_per_s=0.5e9,
)  # fmt: skip
_ONE = Machine(
    gpus=1, gpus_per_node=1, device_bytes=47 * GIB, host_bytes=250 * GIB, flops=90e12, hbm_bytes_per_s=0.7e12,
    link_bytes_per_s=1e9, link_latency_s=1e-5, pcie_bytes_per_s=14e9, adam_params_per_s=0.9e9,
)  # fmt: skip
_A100_FOUR_NODES = Machine(
    gpus=32, gpus_per_node=8, device_bytes=39 * GIB, host_bytes=900 * GIB, flops=150e12, hbm_bytes_per_s=1.3e12,
    link_bytes_per_s=35e9, link_latency_s=150e-6, pcie_bytes_per_s=12e9, adam_params_per_s=1.1e9,
)  # fmt: skip

_ALL = (
    Trained(
        name="h100-13b",
        about="13 B parameters on 8 fast GPUs",
        model=_gpt(params=13e9, layers=40, hidden=5120, activation_gib=1.7, sequence=2048, half_batch=0.5),
        machine=_H100,
        quirks=Quirks(profiled_activations=1.07, fragmentation=0.02, pressure=0.03, pressure_from=0.95),
        user_zero={"stage": 3},
    ),
    Trained(
        name="l4-2.7b",
        about="2.7 B parameters on 8 GPUs over PCIe, with memory as slow",
        model=_gpt(params=2.7e9, layers=32, hidden=2560, activation_gib=0.5, sequence=1024, half_batch=1.2),
        machine=_L4,
        quirks=Quirks(profiled_activations=0.93, fragmentation=0.06, context_bytes=600 * 2**20),
        user_zero={"stage": 2, "offload_optimizer": _OFFLOAD},
    ),
    Trained(
        name="one-gpu-3b",
        about="3 B parameters on a single GPU: nothing to communicate, offload decides",
        model=_gpt(params=3e9, layers=32, hidden=2560, activation_gib=1.1, sequence=1024, half_batch=1.0),
        machine=_ONE,
        quirks=Quirks(profiled_activations=1.1, pressure=0.02),
        user_zero={"stage": 2, "offload_optimizer": _OFFLOAD},
    ),
    Trained(
        name="32x-20b",
        about="20 B parameters on 32 GPUs of 4 nodes that slow down early as memory fills",
        model=_gpt(params=20e9, layers=44, hidden=6144, activation_gib=1.2, sequence=2048, half_batch=0.4),
        machine=_A100_FOUR_NODES,
        quirks=Quirks(profiled_activations=0.97, fragmentation=0.04, pressure=0.15, pressure_from=0.85),
        user_zero={"stage": 3},
    ),
    Trained(
        name="tight-host",
        about="13 B parameters on 8 small GPUs whose host just holds what is offloaded",
        model=_gpt(params=13e9, layers=40, hidden=5120, activation_gib=0.9, sequence=1024, half_batch=0.8),
        machine=replace(_L4, host_bytes=300 * GIB),
        quirks=Quirks(),
        user_zero={"stage": 3, "offload_optimizer": _OFFLOAD, "offload_param": _OFFLOAD},
    ),
)

HELD_OUT: Mapping[str, Trained] = MappingProxyType({landscape.name: landscape for landscape in _ALL})
"""By name."""
