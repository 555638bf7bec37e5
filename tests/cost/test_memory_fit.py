from __future__ import annotations

import random
from typing import Any

import pytest

from optuna_dsat.cost.memory import Correction, Hardware, ModelProfile, Sample, estimate
from optuna_dsat.cost.memory_fit import CorrectionFit

GIB = 2**30
PROFILE = ModelProfile(
    params=10**8,
    trainable_params=10**8,
    largest_layer_params=10**6,
    param_bytes=2,
    activation_bytes_per_sample=10**8,
    flops_per_sample=10**12,
    device_memory_bytes=40 * GIB,
    host_memory_bytes=256 * GIB,
    peak_bytes=4 * GIB,
    optimizer="AdamW",
)


def hardware(device: str) -> Hardware:
    return Hardware(
        world_size=4,
        ranks_per_node=4,
        device_memory_bytes=40 * GIB,
        host_memory_bytes=256 * GIB,
        device=device,
    )


def measured(chance: random.Random, device: str, *, buckets: int, largest: int) -> Sample:
    micro_batch = chance.randint(1, largest)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "zero_optimization": {
            "stage": chance.choice([0, 1, 2, 3]),
            "reduce_bucket_size": 10**6 * chance.randint(1, buckets),
            "offload_optimizer": {"device": chance.choice(["none", "cpu"])},
        },
        "bf16": {"enabled": True},
    }
    peak = estimate(PROFILE, config, micro_batch=micro_batch, hardware=hardware(device)).device_bytes
    return config, micro_batch, max(1, peak + chance.randint(-GIB, GIB))


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize(("buckets", "largest"), [(1, 200), (10**6, 200), (10**6, 1), (3, 2)])
def test_peaks_that_arrive_one_by_one_teach_the_same(device: str, buckets: int, largest: int) -> None:
    chance = random.Random(buckets + largest)
    fit = CorrectionFit(PROFILE, hardware(device))
    assert fit.correction() == Correction()
    samples: list[Sample] = []
    while len(samples) < 30:
        new = [measured(chance, device, buckets=buckets, largest=largest) for _ in range(chance.randint(1, 6))]
        samples += new
        fit.add(new)
        found, expected = fit.correction(), Correction.fit(samples, PROFILE, hardware(device))
        assert found.bytes_per_sample == expected.bytes_per_sample
        assert dict(found.offsets) == dict(expected.offsets)
        assert found.default_offset == expected.default_offset
        assert fit.correction() is found
    assert len(fit) == len(samples)
