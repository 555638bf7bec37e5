"""Eight typical cases, whose first trials an expert would choose alike (``tests/benchmarks/golden``).

Models and machines have rounded numbers, and nothing deviates from what communication theory says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from benchmarks.random_machines.draw import GIB, STRUCTURES, Drawn, Hardware, Net
from benchmarks.random_machines.forms import hyperbolic, linear
from benchmarks.random_machines.machine import RandomMachine

_A100_80 = Hardware(
    kind="cuda", gpus=8, gpus_per_node=8, device_bytes=79 * GIB, host_bytes=960 * GIB, flops=180e12, startup_s=30,
    link_bytes_per_s=200e9, link_latency_s=40e-6, pcie_bytes_per_s=12e9, adam_params_per_s=1.2e9,
)  # fmt: skip
_A100_40 = replace(
    _A100_80, device_bytes=39 * GIB, host_bytes=480 * GIB, flops=160e12, link_bytes_per_s=80e9
)  # fmt: skip
_A100_EIGHT_NODES = replace(
    _A100_40, gpus=64, host_bytes=960 * GIB, startup_s=24, link_bytes_per_s=10e9, link_latency_s=250e-6
)  # fmt: skip
_V100_ETHERNET = Hardware(
    kind="cuda", gpus=16, gpus_per_node=4, device_bytes=31 * GIB, host_bytes=240 * GIB, flops=60e12, startup_s=27,
    link_bytes_per_s=1.0e9, link_latency_s=1.5e-3, pcie_bytes_per_s=6e9, adam_params_per_s=0.6e9,
)  # fmt: skip
_RTX4090 = Hardware(
    kind="cuda", gpus=1, gpus_per_node=1, device_bytes=int(23.5 * GIB), host_bytes=256 * GIB, flops=110e12,
    startup_s=36, link_bytes_per_s=10e9, link_latency_s=60e-6, pcie_bytes_per_s=20e9, adam_params_per_s=0.7e9,
)  # fmt: skip
_CPU_RANKS = Hardware(
    kind="cpu", gpus=2, gpus_per_node=2, device_bytes=8 * GIB, host_bytes=16 * GIB, flops=0.1e12, startup_s=20,
    link_bytes_per_s=2e9, link_latency_s=300e-6, pcie_bytes_per_s=10e9, adam_params_per_s=0.3e9,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on a machine."""

    about: str
    machine: RandomMachine


def _case(
    about: str,
    hardware: Hardware,
    *,
    params: float,
    hidden_size: int,
    sequence: int,
    activation_gib: float,
    half_batch: float,
    structure: tuple[int, bool, bool],
    profiled_activations: float = 1.03,
) -> Case:
    """Return a transformer that a user trains with a structure at micro-batch 1.

    ``half_batch`` is the micro-batch at which a device reaches half its speed.
    """
    net = Net(
        family="decoder",
        params=int(params),
        largest_layer_params=50_000 * hidden_size,
        activation_bytes=int(activation_gib * GIB),
        flops_per_sample=6 * params * sequence,
    )
    is_gpu = hardware.kind == "cuda"
    drawn = Drawn(
        seed=0,
        net=net,
        hardware=hardware,
        compute=hyperbolic(half_batch),
        activations=linear(),
        tiles=None,
        pressure=0.05,
        pressure_from=0.92,
        pressure_step=False,
        load_s=0.0,
        fixed_s=0.0,
        host_s=0.002,
        hidden=0.7,
        straggler=1.0,
        structure_times={each: 1.12 if each[0] == 3 else 1.0 for each in STRUCTURES},  # hooks of its modules
        structure_bytes=dict.fromkeys(STRUCTURES, 1.0),
        realistic=True,
        flags={},
        sizes={},
        optimizer_slow=1.0,
        params_slow=1.0,
        context_bytes=900 * 2**20 * is_gpu,
        fragmentation=0.03 * is_gpu,
        profiled_activations=profiled_activations,
        profiled_flops=1.0,
        refused=frozenset(),
        noise=0.005,
        user_micro_batch=1,
        habits=(structure,),
    )
    return Case(about=about, machine=RandomMachine(drawn=drawn, user_structure=structure))


_1_3B: Mapping[str, Any] = {"params": 1.3e9, "hidden_size": 2048}
_6_7B: Mapping[str, Any] = {"params": 6.7e9, "hidden_size": 4096, "half_batch": 0.8}

TYPICAL: Mapping[str, Case] = MappingProxyType({
    "125M, 8 x 40 GB": _case(
        "0.125 B parameters on 8 GPUs: a small model that fits everywhere",
        _A100_40, params=125e6, hidden_size=768, sequence=1024, activation_gib=0.45, half_batch=4,
        structure=(2, False, False),
    ),
    "1.3B, 8 x 80 GB": _case(
        "1.3 B parameters on 8 GPUs with NVLink: communication is cheap, the micro-batch decides",
        _A100_80, **_1_3B, sequence=2048, activation_gib=2.6, half_batch=1.5,
        structure=(2, False, False), profiled_activations=0.95,
    ),
    "7B, 8 x 80 GB": _case(
        "6.7 B parameters on 8 GPUs of 80 GB: 16 bytes a parameter, 107 GB, do not fit without ZeRO",
        _A100_80, **_6_7B, sequence=2048, activation_gib=3.6,
        structure=(3, False, False),
    ),
    "13B, 8 x 40 GB": _case(
        "13 B parameters on 8 GPUs of 40 GB: parameters and gradients alone fill a GPU without ZeRO 3",
        _A100_40, params=13e9, hidden_size=5120, sequence=1024, activation_gib=2.6, half_batch=0.8,
        structure=(3, False, False),
    ),
    "7B, one 24 GB GPU": _case(
        "6.7 B parameters on one GPU of 24 GB: the optimizer has to be on the host",
        _RTX4090, **_6_7B, sequence=1024, activation_gib=0.9,
        structure=(3, True, True),
    ),
    "1.3B, 16 x 32 GB over Ethernet": _case(
        "1.3 B parameters on 16 GPUs over Ethernet: communication decides",
        _V100_ETHERNET, **_1_3B, sequence=1024, activation_gib=1.3, half_batch=1.0,
        structure=(2, False, False), profiled_activations=1.06,
    ),
    "350M, 64 x 40 GB": _case(
        "0.35 B parameters on 64 GPUs of 8 nodes: gradients are large for the network",
        _A100_EIGHT_NODES, params=350e6, hidden_size=1024, sequence=1024, activation_gib=0.9, half_batch=3,
        structure=(2, False, False),
    ),
    "1.4M, 2 CPU ranks": _case(
        "1.4 M parameters on two CPU ranks: a try-out, as the demo",
        _CPU_RANKS, params=1.4e6, hidden_size=128, sequence=64, activation_gib=0.004, half_batch=6,
        structure=(2, False, False), profiled_activations=1.05,
    ),
})  # fmt: skip
