"""Names as CUDA gives them (``torch.cuda.get_device_name``), of whole GPUs, parts of them and virtual ones."""

from __future__ import annotations

import pytest

from optuna_dsat.cost.gpus import GPUS, gpu_of_device, priors_of_device

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
    "NVIDIA GeForce RTX 3090": "rtx3090",
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "a100-80g": "a100-80g",  # as a plan without a launch calls its device
}
OTHERS = [
    "NVIDIA GH200 480GB",
    "NVIDIA GH200 144G HBM3e",
    "NVIDIA H200 NVL",
    "NVIDIA H100 NVL",
    "NVIDIA H20",
    "NVIDIA H800",
    "NVIDIA A800-SXM4-80GB",
    "NVIDIA B200",
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
    assert priors_of_device(device, device="cuda", ranks=2) == {}


def test_every_gpu_of_the_table_is_found_by_a_name_of_cudas() -> None:
    assert set(KNOWN.values()) == GPUS.keys()
