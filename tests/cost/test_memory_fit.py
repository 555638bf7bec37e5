from __future__ import annotations

import itertools
import random
import statistics
from typing import Any

import pytest

from optuna_dsat.cost.memory import (
    Correction,
    Hardware,
    ModelProfile,
    Sample,
    batch_free_key,
    estimate,
    rank_moments,
)
from optuna_dsat.cost.memory_fit import CorrectionFit

GIB = 2**30
PROFILE = ModelProfile(
    params=10**8, trainable_params=10**8, largest_layer_params=10**6, param_bytes=2,
    activation_bytes_per_sample=10**8, flops_per_sample=10**12, device_memory_bytes=40 * GIB, host_memory_bytes=256
    * GIB, peak_bytes=4 * GIB, optimizer="AdamW",
)  # fmt: skip


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


def from_all_pairs(samples: list[Sample], at: Hardware) -> Correction:
    """The same estimators by definition: all pairs compared, every peak predicted again."""
    points = []
    for config, micro_batch, peak in samples:
        lines = rank_moments(PROFILE, config, at)
        line = next(item for item in lines if item.bytes_per_sample > 0)
        highest = max(item.bytes_at(micro_batch) for item in lines)
        if line.bytes_at(micro_batch) >= highest:
            points.append((batch_free_key(config), micro_batch, peak - line.bytes_at(0)))
    slopes = [
        (b[2] - a[2]) / (b[1] - a[1]) for a, b in itertools.combinations(points, 2) if a[0] == b[0] and a[1] != b[1]
    ]
    slope: int | None = None
    if slopes:
        slope = max(0, round(statistics.median(slopes)))
    elif len({size for _, size, _ in points}) > 1:
        slope = max(0, round(statistics.linear_regression([p[1] for p in points], [p[2] for p in points]).slope))
    sloped = Correction(bytes_per_sample=slope)
    residuals: dict[str, list[int]] = {}
    for config, size, peak in samples:
        predicted = estimate(PROFILE, config, micro_batch=size, hardware=at, correction=sloped).device_bytes
        residuals.setdefault(batch_free_key(config), []).append(peak - predicted)
    offsets = {key: round(statistics.median(values)) for key, values in residuals.items()}
    return Correction(
        bytes_per_sample=slope, offsets=offsets, default_offset=round(statistics.median(offsets.values()))
    )


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize(("buckets", "largest"), [(1, 200), (10**6, 200), (10**6, 1), (3, 2)])
def test_peaks_added_one_by_one_give_the_fit_of_all_pairs(device: str, buckets: int, largest: int) -> None:
    chance = random.Random(buckets + largest)
    fit = CorrectionFit(PROFILE, hardware(device))
    assert fit.correction() == Correction()
    samples: list[Sample] = []
    while len(samples) < 30:
        new = [measured(chance, device, buckets=buckets, largest=largest) for _ in range(chance.randint(1, 6))]
        samples += new
        fit.add(new)
        result, expected = fit.correction(), from_all_pairs(samples, hardware(device))
        assert result.bytes_per_sample == expected.bytes_per_sample
        assert dict(result.offsets) == dict(expected.offsets)
        assert result.default_offset == expected.default_offset
        assert fit.correction() is result
    assert len(fit) == len(samples)
