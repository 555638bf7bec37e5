"""The dice: a model, a machine and effects, each absent or strong by chance, from one seed.

Nine of ten machines are realistic: ZeRO stages and offloads cost what communication theory says, times deviations drawn
from the distributions of published measurements (``PUBLISHED``), and the computation's curve over the micro-batch is a
published one. Every tenth is a stress test: its structures follow no law, and its curve has a form made up, maybe with
tiles, or a loss of speed from some share of the memory on.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from benchmarks.random_machines.forms import (
    Curve,
    StepTimes,
    Tiles,
    draw_compute,
    draw_memory,
    draw_published,
    draw_size_effect,
    draw_walk,
)

_T = TypeVar("_T")

GIB = 2**30

STRUCTURES = (
    (0, False, False),
    (1, False, False),
    (1, True, False),
    (2, False, False),
    (2, True, False),
    (3, False, False),
    (3, True, False),
    (3, False, True),
    (3, True, True),
)
"""ZeRO stage, optimizer offload, parameter offload."""
PUBLISHED: Mapping[str, tuple[float, float]] = {
    "rate: stage 1 against 0": (1.01, 0.09),
    "rate: stage 2 against 1": (1.02, 0.19),
    "rate: stage 3 against 2": (1.06, 0.42),
    "rate: offload_optimizer cpu against none": (0.86, 0.54),
    "rate: offload_param cpu against none": (1.06, 0.36),
    "rate: overlap_comm True against False": (1.05, 0.05),
    "rate: per doubling of micro_batch": (0.76, 0.22),
    "rate: per doubling of reduce_bucket_size": (0.99, 0.01),
    "memory: rows, common factor removed": (1.00, 0.13),
}
"""Deviations of published measurements from predictions: median of predicted over measured, and standard deviation of
the logarithm. Source: ``python -m benchmarks.published_measurements``.
"""
_STRESS_EVERY = 10
"""Of so many machines one is a stress test."""
FLAGS = ("contiguous", "overlap", "reduce_scatter")
SIZES = ("bucket", "prefetch", "max_live", "max_reuse", "persistence", "sub_group")
_FAMILIES = {
    # name: log10 of the least and most parameters, of activation bytes and of FLOPs per sample and parameter
    "cnn": (7.3, 8.9, (-0.6, 1.0), (1.5, 3.0)),
    "encoder": (7.6, 9.3, (-1.0, 0.6), (2.2, 3.4)),
    "decoder": (8.0, 10.85, (-1.2, 0.4), (3.0, 4.1)),
    "moe": (8.3, 10.6, (-1.5, 0.0), (2.0, 3.2)),
}
_LONGEST_SAMPLE_S = {"cuda": 5.0, "cpu": 0.5}
"""Seconds of computation for a sample on one device at full speed."""
_LEAST_COMPUTE = 0.1
"""Upper limit of what a first doubling of the micro-batch gains, below a factor of 2."""


@dataclass(frozen=True, kw_only=True)
class Net:
    """What is trained."""

    family: str
    params: int
    largest_layer_params: int
    """Parameters of the largest single module (the embedding, mostly)."""
    flops_per_sample: float
    """Forward and backward."""
    activation_bytes: int
    """Per sample, at the end of the forward pass, at a micro-batch of 1."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What it is trained on."""

    kind: str
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
    startup_s: float
    """Seconds of a launch before its first step."""

    @property
    def nodes(self) -> int:
        """Hosts."""
        return -(-self.gpus // self.gpus_per_node)


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Everything that decides what becomes of a launch."""

    seed: int
    net: Net
    hardware: Hardware
    compute: Curve | StepTimes
    activations: Curve
    tiles: Tiles | None
    pressure: float
    """Slow-down of the computation when memory is full."""
    pressure_from: float
    """Share of the memory at which it begins."""
    pressure_step: bool
    """Whether it comes at once (True) or with the square of what lies beyond."""
    load_s: float
    """Seconds to load a sample, beside the computation; 0 for none."""
    fixed_s: float
    """Per step."""
    host_s: float
    """Per micro-batch: Python, launches of kernels."""
    hidden: float
    """Share of the communication that the computation can hide."""
    straggler: float
    """Slow-down by the slowest rank."""
    structure_times: Mapping[tuple[int, bool, bool], float]
    """Factor on the whole step."""
    structure_bytes: Mapping[tuple[int, bool, bool], float]
    """Factor on model states."""
    realistic: bool
    """Whether structures cost what communication theory says, but for published deviations; else a stress test."""
    flags: Mapping[str, float]
    """Factor on the whole step where the flag is on; absent without effect."""
    sizes: Mapping[str, Curve]
    """Effect of a size; absent without effect."""
    optimizer_slow: float
    """Factor on what offload of the optimizer costs by bandwidth and host."""
    params_slow: float
    """Factor on what offload of the parameters costs by its bandwidth."""
    context_bytes: int
    fragmentation: float
    profiled_activations: float
    """What the profile sees, relative to the truth."""
    profiled_flops: float
    refused: frozenset[tuple[int, bool, bool]]
    """Structures that fail, whatever their size, for a reason that is not memory."""
    noise: float
    """Relative standard deviation from launch to launch."""
    user_micro_batch: int
    habits: tuple[tuple[int, bool, bool], ...]
    """Structures in the order in which the user would have tried them."""


def is_realistic(seed: int) -> bool:
    """Return whether the machine of a seed is realistic; else it is a stress test."""
    return seed % _STRESS_EVERY != _STRESS_EVERY - 1


def draw(seed: int, attempt: int = 0) -> Drawn:
    """Return the machine of a seed and attempt; the same on every platform."""
    dice = random.Random(f"machine-{seed}-{attempt}")
    hardware = _hardware(dice)
    net = _net(dice, hardware)
    seconds = net.flops_per_sample / hardware.flops
    realistic = is_realistic(seed)
    deviations = _published(dice, seconds) if realistic else _lawless(dice)
    drawn = Drawn(
        seed=seed,
        net=net,
        hardware=hardware,
        compute=draw_compute(dice),
        activations=draw_memory(dice),
        tiles=_sometimes(dice, 0.4, Tiles(size=dice.choice((2, 4, 8, 16, 64)), share=dice.uniform(0.1, 0.9))),
        pressure=_sometimes(dice, 0.5, dice.uniform(0.03, 1.0)) or 0.0,
        pressure_from=dice.uniform(0.4, 0.97),
        pressure_step=dice.random() < 0.3,
        load_s=_sometimes(dice, 0.2, seconds * dice.uniform(0.5, 2.0)) or 0.0,
        fixed_s=_sometimes(dice, 0.6, 10 ** dice.uniform(-3, -0.5)) or 0.0,
        hidden=dice.choice((0.0, dice.uniform(0.2, 1.0))),
        straggler=(_sometimes(dice, 0.25, 1 + dice.uniform(0.02, 0.3)) or 1.0) if hardware.gpus > 1 else 1.0,
        realistic=realistic,
        context_bytes=0 if hardware.kind == "cpu" else int(dice.uniform(0.4, 1.6) * GIB),
        fragmentation=dice.choice((0.0, dice.uniform(0.0, 0.1))),
        profiled_activations=dice.uniform(0.8, 1.2),
        profiled_flops=dice.choice((1.0, dice.uniform(0.8, 1.2))),
        refused=_refused(dice, realistic=realistic),
        noise=10 ** dice.uniform(-2.3, -1.3),
        user_micro_batch=dice.choice((1, 1, 2, 4, 8)),
        habits=tuple(dice.sample(STRUCTURES, len(STRUCTURES))),
        **deviations,
    )
    if not realistic:
        return drawn
    capacity = hardware.device_bytes / net.activation_bytes
    curve = draw_published(random.Random(f"curve-{seed}-{attempt}"), capacity)
    return replace(drawn, compute=curve, tiles=None, pressure=0.0)


def _published(dice: random.Random, seconds: float) -> dict[str, Any]:
    """Return deviations as in published measurements, for a sample that takes some seconds at full speed.

    Medians of structures and knobs are left out: they belong to the formulas of ``plan``, and the machine has others.
    No table has a higher stage or an offload that was faster at the same micro-batch. So a stage is slowed down by the
    size of its deviation from the stage below, and an offload's deviation is a factor on what it adds. Model states
    likewise take at least their bytes. A table's common
    factor on memory is left out, too: the profile launch measures most of it, and a part is cache that the allocator
    frees.
    """

    def factor(name: str) -> float:
        return dice.lognormvariate(0, PUBLISHED[name][1])

    def larger(name: str) -> float:
        return math.exp(abs(math.log(factor(name))))

    stages = [1.0]
    for stage in range(3):
        stages.append(stages[-1] * larger(f"rate: stage {stage + 1} against {stage}"))
    median, spread = PUBLISHED["rate: per doubling of micro_batch"]
    # the first doubling gains 2 (1 + h) / (2 + h), if a micro-batch costs h samples' seconds on the host
    gain = min(max(1.0, dice.lognormvariate(-math.log(median), spread)), 2 - _LEAST_COMPUTE)
    walk = PUBLISHED["rate: per doubling of reduce_bucket_size"][1]
    return {
        "structure_times": {structure: stages[structure[0]] for structure in STRUCTURES},
        "structure_bytes": {structure: larger("memory: rows, common factor removed") for structure in STRUCTURES},
        "flags": {name: factor("rate: overlap_comm True against False") for name in FLAGS},
        "sizes": {name: draw_walk(dice, spread=walk) for name in SIZES},
        "optimizer_slow": factor("rate: offload_optimizer cpu against none"),
        "params_slow": factor("rate: offload_param cpu against none"),
        "host_s": seconds * 2 * (gain - 1) / (2 - gain),
    }


def _lawless(dice: random.Random) -> dict[str, Any]:
    """Return deviations without a law: each absent or strong by chance."""
    spread = dice.uniform(0.08, 0.3)
    slow = _sometimes(dice, 0.5, 10 ** dice.uniform(-0.5, 0.7)) or 1.0
    return {
        "structure_times": {structure: dice.lognormvariate(0, spread) for structure in STRUCTURES},
        "structure_bytes": {structure: dice.lognormvariate(0, 0.05) for structure in STRUCTURES},
        "flags": {name: 1 + _either(dice) * 10 ** dice.uniform(-2.3, -1.1) for name in FLAGS if dice.random() < 0.4},
        "sizes": {
            name: draw_size_effect(dice, strength=_either(dice) * 10 ** dice.uniform(-2.3, -0.8))
            for name in SIZES
            if dice.random() < 0.35
        },
        "optimizer_slow": slow,
        "params_slow": slow,
        "host_s": _sometimes(dice, 0.6, 10 ** dice.uniform(-3, -1)) or 0.0,
    }


def _sometimes(dice: random.Random, chance: float, value: _T) -> _T | None:
    return value if dice.random() < chance else None


def _either(dice: random.Random) -> int:
    return dice.choice((-1, 1))


def _refused(dice: random.Random, *, realistic: bool) -> frozenset[tuple[int, bool, bool]]:
    """Return what fails on some machines: ZeRO 3, or an offload; on a stress test any structures."""
    if dice.random() > 0.15:
        return frozenset()
    if not realistic:
        return frozenset(structure for structure in STRUCTURES if dice.random() < 0.3)
    place = dice.randrange(3)
    return frozenset(structure for structure in STRUCTURES if (structure[0] == 3, *structure[1:])[place])


def _hardware(dice: random.Random) -> Hardware:
    if dice.random() < 0.15:
        ranks, host = dice.choice((1, 2, 4)), 2 ** dice.uniform(4, 8) * GIB
        return Hardware(
            kind="cpu",
            gpus=ranks,
            gpus_per_node=ranks,
            device_bytes=int(host / ranks),
            host_bytes=int(host),
            flops=10 ** dice.uniform(10, 12) / ranks,
            link_bytes_per_s=10 ** dice.uniform(8.5, 10),
            link_latency_s=10 ** dice.uniform(-4, -3),
            pcie_bytes_per_s=10 ** dice.uniform(9.5, 10.5),
            adam_params_per_s=10 ** dice.uniform(7.5, 9),
            startup_s=dice.uniform(3, 15),
        )
    gpus = dice.choice((1, 1, 2, 4, 8, 8, 16, 32, 64))
    per_node = min(gpus, dice.choice((1, 2, 4, 8, 8)))
    link = dice.uniform(8.7, 10) if gpus > per_node else dice.uniform(9.3, 11.6)
    return Hardware(
        kind="cuda",
        gpus=gpus,
        gpus_per_node=per_node,
        device_bytes=int(dice.choice((7.5, 11, 15.5, 23, 31, 39, 47, 79, 139)) * GIB),
        host_bytes=int(2 ** dice.uniform(5.5, 11) * GIB),
        flops=10 ** dice.uniform(12.8, 14.7),
        link_bytes_per_s=10**link,
        link_latency_s=10 ** dice.uniform(-4.7, -2.7),
        pcie_bytes_per_s=10 ** dice.uniform(9.6, 10.7),
        adam_params_per_s=10 ** dice.uniform(8.3, 9.5),
        startup_s=dice.uniform(8, 60),
    )


def _net(dice: random.Random, hardware: Hardware) -> Net:
    """Return a model that the machine can hold, and of which a sample takes at most some seconds."""
    while True:
        family = dice.choice(list(_FAMILIES))
        least, most, activations, flops = _FAMILIES[family]
        params = 10 ** dice.uniform(least, most)
        states = 18 * params
        room = hardware.gpus * hardware.device_bytes + 0.5 * hardware.nodes * hardware.host_bytes
        flops_per_sample = params * 10 ** dice.uniform(*flops)
        if states < room and flops_per_sample / hardware.flops < _LONGEST_SAMPLE_S[hardware.kind]:
            break
    return Net(
        family=family,
        params=int(params),
        largest_layer_params=int(params * dice.uniform(0.02, 0.3)),
        activation_bytes=int(params * 10 ** dice.uniform(*activations)),
        flops_per_sample=flops_per_sample,
    )
