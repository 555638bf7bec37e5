"""Plan a model given by its shape, on a machine from the table of GPUs, without launching anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from optuna_dsat.cost.gpus import GpuSpec, machine_priors, peak_flops
from optuna_dsat.cost.memory import Hardware, ModelProfile
from optuna_dsat.plan.prediction import Subject
from optuna_dsat.plan.rows import Plan, plan_rows
from optuna_dsat.plan.transformer import TransformerShape
from optuna_dsat.words import bytes_in_words, count_in_words, params_in_words

_HOST_BYTES_PER_GPU = 128 * 2**30
"""Default host memory per GPU."""
_NETWORK_GBIT_PER_S = 100.0
"""Default network bandwidth of a host."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Hosts with identical GPUs, connected by a network."""

    gpu: GpuSpec
    gpus_per_node: int
    nodes: int
    given_network_gbit_per_s: float | None
    """Network bandwidth of a host; None for the default."""
    given_host_bytes: int | None
    """Memory of a host; None for the default."""

    @property
    def ranks(self) -> int:
        """GPUs of all hosts."""
        return self.gpus_per_node * self.nodes

    @property
    def host_bytes(self) -> int:
        """Memory of a host, in bytes."""
        return self.given_host_bytes or _HOST_BYTES_PER_GPU * self.gpus_per_node

    @property
    def network_gbit_per_s(self) -> float:
        """Network bandwidth of a host."""
        given = self.given_network_gbit_per_s
        return _NETWORK_GBIT_PER_S if given is None else given

    @property
    def assumed(self) -> tuple[str, ...]:
        """Options of this machine that have default values."""
        options = ["--host-memory"] if self.given_host_bytes is None else []
        options += ["--network"] if self.nodes > 1 and self.given_network_gbit_per_s is None else []
        return tuple(options)

    @property
    def words(self) -> str:
        """Description of the machine in a sentence."""
        memory, network = (
            f" (assumed; {option})" if option in self.assumed else "" for option in ("--host-memory", "--network")
        )
        hosts = "" if self.nodes == 1 else f"{self.nodes} hosts with "
        each = "" if self.ranks == 1 else " each"
        return (
            f"{hosts}{self.gpus_per_node} x {self.gpu.name}: {bytes_in_words(self.gpu.memory_bytes)} and "
            f"{count_in_words(self.gpu.tflops)} TFLOPS (peak){each}. Host: {bytes_in_words(self.host_bytes)} of "
            f"memory{memory}, {count_in_words(self.gpu.pcie_gb_per_s / 2)} GB/s to each GPU and back (data sheet)"
            + (f", network of {count_in_words(self.network_gbit_per_s)} Gbit/s{network}." if self.nodes > 1 else ".")
        )


def plan_shape(
    shape: TransformerShape,
    machine: Machine,
    *,
    config: Mapping[str, Any] | None,
    memory_margin: float,
    nvme_path: str | None = None,
) -> Plan:
    """Return the plan of a transformer on a machine.

    ``config`` defaults to AdamW in the half precision of the GPU's tensor cores. ``memory_margin`` is the share of the
    device's memory to leave free; ``nvme_path`` a folder on every host's NVMe.
    """
    gpu = machine.gpu
    if config is None:
        config = {"bf16" if gpu.bf16 else "fp16": {"enabled": True}, "optimizer": {"type": "AdamW"}}
    switches: list[Mapping[str, Any]] = [config.get(key) or {} for key in ("bf16", "fp16")]
    element = 2 if any(switch.get("enabled") for switch in switches) else 4
    priors = machine_priors(
        gpu, ranks=machine.ranks, network_gbit_per_s=machine.network_gbit_per_s, param_bytes=element
    )
    subject = Subject(
        profile=_profile(shape, machine, element=element),
        hardware=Hardware(
            world_size=machine.ranks,
            ranks_per_node=machine.gpus_per_node,
            device_memory_bytes=gpu.memory_bytes,
            host_memory_bytes=machine.host_bytes,
        ),
        config=config,
        machine={**priors, **shape.priors()},
        memory_margin=memory_margin,
        nvme_path=nvme_path,
        seq_length=shape.seq_length,
        peak_flops=peak_flops(gpu, config, param_bytes=element),
        model_flops_per_sample=shape.model_flops_per_sample,
    )
    return Plan(
        subject=subject,
        rows=plan_rows(subject),
        recomputes=shape.recompute != "none",
        bf16_hardware=gpu.bf16,
        about=(
            shape.words,
            machine.words,
            *_quantized_in_words(shape, element=element),
            "Nothing was launched: times are estimates from data sheets, and their ranges show the uncertainty. With a "
            "script, memory and FLOPs are measured.",
        ),
        model=asdict(shape),
        assumed=machine.assumed,
    )


def _quantized_in_words(shape: TransformerShape, *, element: int) -> tuple[str, ...]:
    """Return a sentence on how the plan counts quantized weights; empty if the weights are not quantized."""
    if not shape.quantized:
        return ()
    if shape.quantized_params:
        counted = params_in_words(shape.quantized_params)
        return (
            f"The config quantizes its weights ({shape.quantized}): {counted} frozen parameters are counted at that "
            "size. The time to dequantize them is not counted.",
        )
    why = ", as all of them are trained (--trainable-share)" if shape.quantized_bits is not None else ""
    return (
        f"The config quantizes its weights ({shape.quantized}). The plan does not account for that{why}: each weight "
        f"takes {8 * element} bits here, so memory is overestimated.",
    )


def _profile(shape: TransformerShape, machine: Machine, *, element: int) -> ModelProfile:
    """Return the expected result of a profile launch, with a ``peak_bytes`` of 0."""
    return ModelProfile(
        params=shape.stored_params(element=element),
        trainable_params=shape.trainable_params,
        largest_layer_params=shape.largest_layer_params,
        param_bytes=element,
        activation_bytes_per_sample=shape.activation_bytes(element=element),
        flops_per_sample=shape.flops_per_sample,
        device_memory_bytes=machine.gpu.memory_bytes,
        host_memory_bytes=machine.host_bytes,
        peak_bytes=0,
        device_name=machine.gpu.name,
    )
