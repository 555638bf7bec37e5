"""Names as CUDA gives them (``torch.cuda.get_device_name``), of whole GPUs, parts of them and virtual ones."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from optuna_dsat.cost.gpus import GPUS, find_gpu, gpu_of_device, machine_priors, precision_advice, priors_of_device
from optuna_dsat.errors import UsageError
from tests.harness.small_model import PROFILE

KNOWN = {
    "Tesla T4": "t4",
    "Tesla V100-SXM2-16GB": "v100-16g",
    "Tesla V100-SXM2-32GB": "v100-32g",
    "NVIDIA A10": "a10",
    "NVIDIA A30": "a30",
    "NVIDIA A40": "a40",
    "NVIDIA RTX A6000": "a6000",
    "A100-SXM4-40GB": "a100-40g",
    "NVIDIA A100-SXM4-40GB": "a100-40g",
    "NVIDIA A100-SXM4-80GB": "a100-80g",
    "NVIDIA A100 80GB PCIe": "a100-80g-pcie",
    "NVIDIA L4": "l4",
    "NVIDIA L40S": "l40s",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H200": "h200",
    "NVIDIA GH200 480GB": "gh200",
    "NVIDIA GH200 144G HBM3e": "gh200-144g",
    "NVIDIA B200": "b200",
    "mi300x": "mi300x",  # for plans alone: CUDA has no name for it
    "NVIDIA GeForce RTX 3090": "rtx3090",
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "a100-80g": "a100-80g",  # as a plan without a launch calls its device
}
OTHERS = [
    "NVIDIA H200 NVL",
    "NVIDIA H100 NVL",
    "NVIDIA H20",
    "NVIDIA H800",
    "NVIDIA A800-SXM4-80GB",
    "NVIDIA GB200",
    "NVIDIA GB10",
    "NVIDIA A100-PCIE-40GB",
    "NVIDIA A100-SXM-64GB",
    "Tesla V100-PCIE-16GB",
    "Tesla V100-PCIE-32GB",
    "Tesla V100-DGXS-32GB",
    "Tesla V100S-PCIE-32GB",
    "Tesla V100-FHHL-16GB",
    "NVIDIA A10G",
    "NVIDIA L40",
    "NVIDIA L20",
    "NVIDIA RTX 6000 Ada Generation",
    "NVIDIA GeForce RTX 3090 Ti",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 5090",
    "GRID A100-40C",
    "GRID T4-16Q",
    "NVIDIA A100-40C",
    "NVIDIA A10-24C",
    "NVIDIA A40-48Q",
    "NVIDIA L4-24C",
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    "NVIDIA H200 MIG 3g.71gb",
    "Orin",
    "AMD Instinct MI300X",
    "x86_64",
    "",
]


@pytest.mark.parametrize(("device", "name"), KNOWN.items())
def test_whole_gpus_of_the_table_are_known_by_cudas_names(device: str, name: str) -> None:
    assert gpu_of_device(device) == GPUS[name]


@pytest.mark.parametrize("device", OTHERS)
def test_another_gpu_a_part_of_one_and_a_virtual_one_have_no_data_sheet(device: str) -> None:
    assert gpu_of_device(device) is None
    assert priors_of_device(replace(PROFILE, device_name=device), {}, device="cuda", ranks=2) == {}


def test_every_gpu_of_the_table_is_found_by_a_name_of_cudas() -> None:
    assert set(KNOWN.values()) == GPUS.keys()


def test_a_network_between_hosts_has_a_prior_of_its_own_beside_the_links_in_a_host() -> None:
    gpu = GPUS["a100-80g"]
    known, unknown = machine_priors(gpu, ranks=16, network_gbit_per_s=200), machine_priors(gpu, ranks=16)
    assert known["network"][0] == pytest.approx(8 / (0.8 * 200e9))
    assert known["link"] == unknown["link"]
    assert known["link"][0] < known["network"][0]
    assert "network" not in unknown


@pytest.mark.parametrize(
    ("name", "gib", "half", "fp32", "memory", "link"),
    [
        ("l40s", (44, 45), 362.05, 91.6, 864, 0),
        ("gh200", (93, 96), 1979 / 2, 67, 4000, 900),
        ("gh200-144g", (130, 141), 1979 / 2, 67, 4900, 900),
        ("b200", (176, 180), 36_000 / 8 / 2, 600 / 8, 64_000 / 8, 14_400 / 8),
        ("mi300x", (188, 192), 1307.4, 163.4, 5300, 7 * 128),
    ],
)
def test_the_newer_gpus_are_as_their_data_sheets_say(
    name: str, gib: tuple[float, float], half: float, fp32: float, memory: float, link: float
) -> None:
    gpu = find_gpu(name)
    assert gib[0] <= gpu.memory_bytes / 2**30 <= gib[1]
    assert (gpu.tflops, gpu.fp32_tflops, gpu.memory_gb_per_s) == (half, fp32, memory)
    assert gpu.nvlink_gb_per_s == link
    assert gpu.bf16


def test_a_grace_hopper_copies_to_its_host_over_nvlink() -> None:
    ratio = machine_priors(find_gpu("h100"), ranks=1)["pcie"][0] / machine_priors(find_gpu("gh200"), ranks=1)["pcie"][0]
    assert ratio == pytest.approx(900 / 128)


def test_fp32_is_not_expected_at_the_speed_of_half_precision() -> None:
    for gpu in GPUS.values():
        (half, _), (full, spread) = (machine_priors(gpu, ranks=1, param_bytes=size)["speed"] for size in (2, 4))
        assert full < half
        assert full * math.exp(2 * spread) > 2 * full  # TF32 is within its range


@pytest.mark.parametrize(
    ("config", "size", "expected"),
    [
        ({}, 4, 4),
        ({"bf16": {"enabled": "auto"}}, 4, 4),
        ({}, 2, 2),
        ({"bf16": {"enabled": True}}, 4, 2),
        ({"torch_autocast": {"enabled": True}}, 4, 2),
    ],
)
def test_a_launch_is_expected_at_the_speed_of_its_precision(config: dict[str, Any], size: int, expected: int) -> None:
    profile = replace(PROFILE, device_name="NVIDIA A100-SXM4-80GB", param_bytes=size)
    priors = priors_of_device(profile, config, device="cuda", ranks=2)
    assert priors == machine_priors(GPUS["a100-80g"], ranks=2, param_bytes=expected)


@pytest.mark.parametrize(
    ("precision", "device", "size", "said"),
    [
        ("fp32", "NVIDIA H100 80GB HBM3", 4, "bf16 14.8 times as fast"),
        ("fp16", "NVIDIA H100 80GB HBM3", 2, "needs no loss scaling"),
        ("bf16", "NVIDIA H100 80GB HBM3", 2, ""),
        ("fp32", "NVIDIA H100 80GB HBM3", 2, ""),  # the script casts its model
        ("fp16", "Tesla V100-SXM2-32GB", 2, ""),  # has no bf16
        ("fp32", "AMD EPYC", 4, ""),
    ],
)
def test_what_bf16_would_bring_is_said_where_the_gpu_has_it(precision: str, device: str, size: int, said: str) -> None:
    text = precision_advice(precision, device_name=device, param_bytes=size)
    assert (said in text) if said else not text


def test_a_number_of_gpus_before_a_name_leads_to_that_name() -> None:
    with pytest.raises(UsageError, match=r"Did you mean h100 or h100-pcie\?$"):
        find_gpu("8xH100")
