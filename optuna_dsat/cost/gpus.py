"""Performance of GPUs from vendor data sheets, and the share of it that training reaches.

All figures are the vendors': memory, peak dense FLOPS of tensor cores in half precision (bf16 or fp16) with fp32
accumulation (figures "with sparsity" are halved), peak FLOPS in fp32 without tensor cores, bandwidth of the memory, of
all NVLinks (or Infinity Fabric links) of a GPU (sum of both directions) and of the link to the host (sum of both
directions), which is PCIe except for GH200.

Sources, by name of the document:

- t4: "NVIDIA T4 Tensor Core GPU" data sheet (65 TFLOPS, 16 GB, 320 GB/s, PCIe 3.0 x16: 32 GB/s).
- v100-16g, v100-32g: "NVIDIA V100 Tensor Core GPU" data sheet, SXM2 (125 TFLOPS, 900 GB/s, NVLink 300 GB/s, PCIe 3.0).
- a10: "NVIDIA A10 Tensor Core GPU" data sheet (125 TFLOPS, 24 GB, 600 GB/s, PCIe 4.0 x16: 64 GB/s).
- a30: "NVIDIA A30 Tensor Core GPU" data sheet (165 TFLOPS, 24 GB, 933 GB/s, NVLink 200 GB/s, PCIe 4.0).
- a40: "NVIDIA A40" data sheet (149.7 TFLOPS, 48 GB, 696 GB/s, PCIe 4.0; its NVLink joins pairs only).
- a6000: "NVIDIA RTX A6000" data sheet (154.8 TFLOPS, 48 GB, 768 GB/s, PCIe 4.0; its NVLink joins pairs only).
- a100-40g, a100-80g: "NVIDIA A100 Tensor Core GPU" data sheet, SXM4 (312 TFLOPS, 1555 and 2039 GB/s, NVLink 600 GB/s,
  PCIe 4.0); a100-80g-pcie: the same sheet (1935 GB/s; its NVLink joins pairs only).
- l4: "NVIDIA L4 Tensor Core GPU" data sheet (242 TFLOPS with sparsity, 24 GB, 300 GB/s, PCIe 4.0).
- l40s: "NVIDIA L40S" data sheet (362.05 TFLOPS, fp32 91.6, 48 GB, 864 GB/s, PCIe 4.0: 64 GB/s):
  https://www.nvidia.com/en-us/data-center/l40s/
- h100: "NVIDIA H100 Tensor Core GPU" data sheet, SXM5 (1979 TFLOPS with sparsity, 80 GB, 3.35 TB/s, NVLink 900 GB/s,
  PCIe 5.0: 128 GB/s); h100-pcie: the same sheet (1513 TFLOPS with sparsity, 2 TB/s; its NVLink joins pairs only).
- h200: "NVIDIA H200 Tensor Core GPU" data sheet, SXM (1979 TFLOPS with sparsity, 141 GB, 4.8 TB/s, NVLink 900 GB/s).
- gh200, gh200-144g: "NVIDIA GH200 Grace Hopper Superchip" data sheet (the GPU of h100: 1979 TFLOPS with sparsity; 96 GB
  at 4 TB/s, or 144 GB at 4.9 TB/s; NVLink-C2C to its CPU 900 GB/s, NVLink to other GPUs 900 GB/s):
  https://resources.nvidia.com/en-us-grace-cpu/grace-hopper-superchip. A host with a single superchip has a single GPU.
- b200: "NVIDIA DGX B200" data sheet and HGX page, an eighth of the total of 8 GPUs (36 PFLOPS with sparsity, fp32 600
  TFLOPS, 1440 GB at 64 TB/s, NVLink 14.4 TB/s, PCIe 5.0): https://www.nvidia.com/en-us/data-center/dgx-b200/ and
  https://www.nvidia.com/en-us/data-center/hgx/
- mi300x: "AMD Instinct MI300X Accelerator" data sheet (1307.4 TFLOPS, fp32 163.4, 192 GB, 5.3 TB/s, seven Infinity
  Fabric links of 128 GB/s, PCIe 5.0): https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html. For
  plans only: searches run on NVIDIA GPUs.
- rtx3090: "NVIDIA Ampere GA102 GPU Architecture" white paper, appendix (71 TFLOPS with fp32 accumulation, 24 GB,
  936 GB/s, PCIe 4.0; its NVLink joins pairs only).
- rtx4090: "NVIDIA Ada GPU Architecture" white paper, appendix (165.2 TFLOPS with fp32 accumulation, 24 GB, 1008 GB/s,
  PCIe 4.0).

Figures in fp32 are from the same documents.

The driver reserves a part of the nominal memory: ``torch.cuda.get_device_properties`` reports a few per cent less (79.2
GiB on an A100 with 80 GB, 39.4 GiB on an A100 with 40 GB, 14.6 to 15 GiB on a T4). The table contains nominal sizes in
GiB, from which ``_RESERVED`` is subtracted.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from optuna_dsat.config.ds_config import precision_of
from optuna_dsat.cost.memory import ModelProfile
from optuna_dsat.errors import UsageError

Priors = Mapping[str, tuple[float, float]]
"""Coefficient of the step-time model -> median and spread (standard deviation of the logarithm)."""

_RESERVED = 0.015
"""Share of the nominal memory reserved by driver and error correction."""
_REACHED_FLOPS = 0.45
"""Share of the peak that large transformers reach in training: 0.3 to 0.57 in Narayanan et al. (arXiv:2104.04473,
table 1: 44 to 52% on A100) and Chowdhery et al. (arXiv:2204.02311, table 3: 21 to 46%).
"""
_REACHED_FP32 = 0.8
"""The same in fp32 without tensor cores. Whether the script enables TF32 is unknown, hence the spread."""
_REACHED_NVLINK, _REACHED_PCIE, _REACHED_MEMORY = 0.75, 0.6, 0.8
"""Shares of the bandwidth per direction that collectives and copies reach; nccl-tests shows 230 of 300 GB/s on A100."""
_REACHED_NETWORK = 0.8
_MESSAGE_S, _HOP_S = 2e-5, 4e-6
"""Seconds to start a collective, and per rank of its ring: nccl-tests show 30 to 60 us for the smallest all-gathers
over 8 GPUs of a host, and milliseconds over hundreds of GPUs.
"""


@dataclass(frozen=True, kw_only=True)
class GpuSpec:
    """Data sheet of a GPU."""

    name: str
    device_name: str
    """CUDA's name without the brand, empty if unknown. Only full matches count: ``GB200``, ``H200 NVL``, virtual GPUs
    (``A100-40C``) and MIG instances (``H100 80GB HBM3 MIG 1g.10gb``) are other devices.
    """
    memory_gib: float
    """Nominal size."""
    tflops: float
    """Peak dense tensor FLOPS in half precision with fp32 accumulation, in 10**12."""
    memory_gb_per_s: float
    pcie_gb_per_s: float
    """Bandwidth to the host, over PCIe or an alternative link; sum of both directions."""
    nvlink_gb_per_s: float = 0
    """Bandwidth of NVLink, sum of both directions; 0 if GPUs of a host communicate over PCIe."""
    fp32_tflops: float
    """Peak FLOPS in fp32 without tensor cores, in 10**12."""
    bf16: bool = True
    """Whether tensor cores support bfloat16 (Ampere and newer)."""

    @property
    def memory_bytes(self) -> int:
        """Bytes that processes can use."""
        return int(self.memory_gib * (1 - _RESERVED) * 2**30)

    @property
    def link_bytes_per_s(self) -> float:
        """Bandwidth per GPU that a collective within a host reaches."""
        if self.nvlink_gb_per_s:
            return _REACHED_NVLINK * self.nvlink_gb_per_s / 2 * 1e9
        return _REACHED_PCIE * self.pcie_gb_per_s / 2 * 1e9


def _gpu(
    name: str, device: str, gib: float, tflops: float, fp32: float, memory: float, pcie: float, nvlink: float = 0
) -> GpuSpec:
    return GpuSpec(
        name=name,
        device_name=device,
        memory_gib=gib,
        tflops=tflops,
        fp32_tflops=fp32,
        memory_gb_per_s=memory,
        pcie_gb_per_s=pcie,
        nvlink_gb_per_s=nvlink,
        bf16=not name.startswith(("t4", "v100")),
    )


_ALL = (
    _gpu("t4", "T4", 15, 65, 8.1, 320, 32),  # error correction uses a sixteenth of its memory
    _gpu("v100-16g", "V100-SXM2-16GB", 16, 125, 15.7, 900, 32, 300),
    _gpu("v100-32g", "V100-SXM2-32GB", 32, 125, 15.7, 900, 32, 300),
    _gpu("a10", "A10", 22.5, 125, 31.2, 600, 64),  # likewise
    _gpu("a30", "A30", 24, 165, 10.3, 933, 64, 200),
    _gpu("a40", "A40", 45, 149.7, 37.4, 696, 64),  # likewise
    _gpu("a6000", "RTX A6000", 48, 154.8, 38.7, 768, 64),
    _gpu("a100-40g", "A100-SXM4-40GB", 40, 312, 19.5, 1555, 64, 600),
    _gpu("a100-80g", "A100-SXM4-80GB", 80, 312, 19.5, 2039, 64, 600),
    _gpu("a100-80g-pcie", "A100 80GB PCIe", 80, 312, 19.5, 1935, 64),
    _gpu("l4", "L4", 22.5, 121, 30.3, 300, 64),
    _gpu("l40s", "L40S", 45, 362.05, 91.6, 864, 64),
    _gpu("h100", "H100 80GB HBM3", 80, 989.5, 67, 3350, 128, 900),
    _gpu("h100-pcie", "H100 PCIe", 80, 756.5, 51, 2000, 128),
    _gpu("h200", "H200", 141e9 / 2**30 / (1 - _RESERVED), 989.5, 67, 4800, 128, 900),
    _gpu("gh200", "GH200 480GB", 96, 989.5, 67, 4000, 900, 900),
    _gpu("gh200-144g", "GH200 144G HBM3e", 144e9 / 2**30 / (1 - _RESERVED), 989.5, 67, 4900, 900, 900),
    _gpu("b200", "B200", 180, 2250, 75, 8000, 128, 1800),
    _gpu("mi300x", "", 192, 1307.4, 163.4, 5300, 128, 896),
    _gpu("rtx3090", "GeForce RTX 3090", 24, 71, 35.6, 936, 64),
    _gpu("rtx4090", "GeForce RTX 4090", 24, 165.2, 82.6, 1008, 64),
)

GPUS: Mapping[str, GpuSpec] = MappingProxyType({gpu.name: gpu for gpu in _ALL})
"""GPUs by name."""

CPU_PRIORS: Priors = MappingProxyType(
    {
        "speed": (4e10, 1.2),  # FLOP/s of a rank with a core or two
        "idle": (0.3, 1.3),
        "link": (1e-9, 1.2),  # gloo over shared memory or the loopback
        "network": (1e-9, 1.2),  # 10 Gbit/s
        "latency": (3e-4, 1.2),
        "memory": (1e-10, 0.8),
        "hooks": (5e-3, 1.2),
    }
)
"""Prior for a rank on the CPU: rounded figures of a virtual machine, with wide spreads."""

_COUNT = re.compile(r"^\d+\s*x\s*")
"""Number of GPUs before the name, as in 8xH100."""
_BRAND = re.compile(r"(NVIDIA|Tesla) ", re.IGNORECASE)


def find_gpu(name: str) -> GpuSpec:
    """Return the GPU with this name; ``UsageError`` if it is not in the table."""
    wanted = name.lower().replace("_", "-").removesuffix("b")
    if wanted in GPUS:
        return GPUS[wanted]
    wanted = _COUNT.sub("", wanted)
    sizes = [known for known in GPUS if known == wanted or known.startswith(f"{wanted}-")]
    near = sizes or difflib.get_close_matches(wanted, GPUS, n=1, cutoff=0.5)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    raise UsageError(f"--gpu is {name!r}; known are {', '.join(GPUS)}.{hint}")


def gpu_of_device(device_name: str) -> GpuSpec | None:
    """Return the GPU with this CUDA device name or table name, None if it is not in the table."""
    plain = _BRAND.sub("", device_name.strip(), count=1)
    return next((gpu for gpu in _ALL if device_name == gpu.name or plain == gpu.device_name != ""), None)


def peak_flops(gpu: GpuSpec | None, config: Mapping[str, Any], *, param_bytes: int) -> float | None:
    """Return a GPU's peak FLOPS in half precision; None for others, or a GPU not in the table or without bf16."""
    if gpu is None or param_bytes != 2:
        return None
    return None if precision_of(config) == "bf16" and not gpu.bf16 else gpu.tflops * 1e12


def precision_advice(precision: str, *, device_name: str, param_bytes: int) -> str:
    """Return what bf16 would bring on a GPU that has it; else empty. ``param_bytes``: 4 without half precision."""
    gpu = gpu_of_device(device_name)
    if gpu is None or not gpu.bf16 or precision == "bf16":
        return ""
    if precision == "fp16":
        return "The config trains in fp16. On this GPU bf16 is as fast, needs no loss scaling and skips no step."
    if param_bytes != 4:
        return ""
    ratio = gpu.tflops / gpu.fp32_tflops
    return (
        f"The config trains in fp32. By its data sheet this GPU computes bf16 {ratio:.1f} times as fast (twice, if the "
        "script has turned TF32 on), and parameters and activations take half the memory. It is another arithmetic: "
        "set bf16.enabled, compare the losses, and tune again."
    )


def network_priors(gbit_per_s: float) -> Priors:
    """Return the prior of the cost of a network between hosts: a ring passes through each host's network once.

    ``gbit_per_s`` is in 10**9 bits per second and direction of a host; ``UsageError`` if not positive.
    """
    if gbit_per_s <= 0:
        raise UsageError(f"--network is {gbit_per_s}; a bandwidth in Gbit/s is positive.")
    return {"network": (8 / (_REACHED_NETWORK * gbit_per_s * 1e9), 0.4)}


def machine_priors(
    gpu: GpuSpec, *, ranks: int, network_gbit_per_s: float | None = None, param_bytes: int = 2
) -> Priors:
    """Return the prior of the step-time model's coefficients derived from a data sheet.

    ``ranks`` are the GPUs of all hosts; ``network_gbit_per_s`` a host's bandwidth (10**9 bits per second and direction;
    None if unknown, or for a single host; ``UsageError`` if not positive); ``param_bytes`` is 4 for fp32, 2 for half
    precision.
    """
    half = (_REACHED_FLOPS * gpu.tflops * 1e12, 0.25)
    return {
        "speed": half if param_bytes == 2 else (_REACHED_FP32 * gpu.fp32_tflops * 1e12, 0.8),
        "link": (1 / gpu.link_bytes_per_s, 0.4),
        **({} if network_gbit_per_s is None else network_priors(network_gbit_per_s)),
        "latency": latency_prior(ranks),
        "memory": (1 / (_REACHED_MEMORY * gpu.memory_gb_per_s * 1e9), 0.2),
        "pcie": (1 / (_REACHED_PCIE * gpu.pcie_gb_per_s / 2 * 1e9), 0.3),
    }


def latency_prior(ranks: int) -> tuple[float, float]:
    """Return median and spread of the seconds to start a collective over a number of GPUs."""
    return _MESSAGE_S + _HOP_S * ranks, 0.8


def priors_of_device(profile: ModelProfile, config: Mapping[str, Any], *, device: str, ranks: int) -> Priors:
    """Return the prior for the machine of a launch, with the ranks of all hosts; empty for a GPU not in the table."""
    if device == "cpu":
        return CPU_PRIORS
    gpu = gpu_of_device(profile.device_name)
    is_half = precision_of(config) != "fp32" or (config.get("torch_autocast") or {}).get("enabled") is True
    return {} if gpu is None else machine_priors(gpu, ranks=ranks, param_bytes=2 if is_half else profile.param_bytes)


def utilisation(profile: ModelProfile, config: Mapping[str, Any], metrics: Mapping[str, float]) -> float | None:
    """Return the share of the GPU's peak FLOPS that a configuration reached; None if either is unknown.

    The profile launch counts the FLOPs of forward and backward pass per rank (Chowdhery et al., arXiv:2204.02311,
    appendix B).
    """
    peak = peak_flops(gpu_of_device(profile.device_name), config, param_bytes=profile.param_bytes)
    reached = metrics.get("FLOPS_per_gpu")
    return None if peak is None or not reached else reached / peak
