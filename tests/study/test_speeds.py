from __future__ import annotations

from dataclasses import replace

import pytest

from optuna_dsat.cost.memory import ModelProfile
from optuna_dsat.launch.measurement import LaunchRecord
from optuna_dsat.metrics import Speed
from optuna_dsat.runtime.events import StepMeasured
from optuna_dsat.study.speeds import Speeds, samples_in_words, speed_at, value_in_words
from optuna_dsat.words import choices_in_words, count_in_words, metric_in_words, outcomes_in_words, setting_in_words
from optuna_dsat.words import speed_in_words as words

PROFILE = ModelProfile(
    params=10**9, trainable_params=10**9, largest_layer_params=10**7, param_bytes=2, activation_bytes_per_sample=1,
    flops_per_sample=10**12, device_memory_bytes=2**36, host_memory_bytes=2**40, peak_bytes=2**30,
    device_name="NVIDIA H100 80GB HBM3",
)  # fmt: skip
METRICS = {"throughput": 40.0, "FLOPS_per_gpu": 0.4 * 989.5e12}
BF16 = {"bf16": {"enabled": True}}


def record(*, tokens: bool) -> LaunchRecord:
    made = LaunchRecord(world_size=1, start_profile_step=1)
    for step in (1, 2):
        made.add(
            StepMeasured(
                rank=0, time=0.0, step=step, latency_s=1.0, forward_s=0.4, backward_s=0.4, step_s=0.1, samples=8,
                observed_micro_batch=8, loss=None, peak_allocated_bytes=1, peak_reserved_bytes=1, rss_bytes=1,
                elements=8 * 512, elements_are_tokens=tokens,
            )
        )  # fmt: skip
    return made


def test_samples_come_first_then_tokens_and_flops_as_a_share_of_the_peak() -> None:
    speeds = Speeds(PROFILE)
    speeds.learn(record(tokens=True))
    found = speeds.of(METRICS, BF16)
    assert found is not None
    assert replace(found, utilisation=None) == Speed(samples_per_s=40.0, tokens_per_s=40.0 * 512)
    assert found.utilisation == pytest.approx(0.4)
    shown = words(found, metric="FLOPS_per_gpu", value=METRICS["FLOPS_per_gpu"], device="cuda")
    assert shown == "40 samples/s, 20,480 tokens/s, 40% MFU"


def test_what_is_not_known_is_not_told() -> None:
    speeds = Speeds(replace(PROFILE, device_name="a GPU of tomorrow"))
    speeds.learn(record(tokens=False))
    assert speeds.of(METRICS, BF16) == Speed(samples_per_s=40.0)
    assert speeds.of({}, BF16) is None
    assert Speeds(replace(PROFILE, param_bytes=4)).of(METRICS, {}) == Speed(samples_per_s=40.0)


def test_where_inputs_vary_in_size_the_measured_tokens_count() -> None:
    speeds = Speeds(None)
    speeds.learn(record(tokens=True))
    assert speeds.of({**METRICS, "tokens_per_s": 17.0}, {}) == Speed(samples_per_s=40.0, tokens_per_s=17.0)


@pytest.mark.parametrize(
    ("metric", "value", "device", "shown"),
    [
        ("FLOPS_per_gpu", 28.78e9, "cpu", "40 samples/s, 28.78 GFLOP/s per rank"),
        ("FLOPS_per_gpu", 28.78e9, "cuda", "40 samples/s, 28.78 GFLOP/s per GPU"),
        ("throughput", 40.0, "cuda", "40 samples/s"),
        ("latency", 0.2, "cuda", "40 samples/s, 200 ms per step"),
        ("forward", 1.5, "cuda", "40 samples/s, 1,500 ms forward"),
    ],
)
def test_the_metric_is_told_too(metric: str, value: float, device: str, shown: str) -> None:
    assert words(Speed(samples_per_s=40.0), metric=metric, value=value, device=device) == shown


def test_numbers_are_written_as_a_person_writes_them() -> None:
    assert [setting_in_words(one) for one in (5_000_000_000, 5e7, 10**5, 65536, 1422000, 16, True, "none", 0.5)] == [
        "5e9", "5e7", "1e5", "65536", "1422000", "16", "true", "none", "0.5"
    ]  # fmt: skip
    assert [count_in_words(one) for one in (13984, 40812.34, 999.96, 1.5)] == ["13,984", "40,810", "1000", "1.5"]
    assert choices_in_words((1, 65536), as_range=True) == "1 to 65,536"
    assert choices_in_words((5_000_000, 5_000_000_000)) == "5e6, 5e9"
    assert outcomes_in_words({"out_of_memory": 2, "measured": 12, "script_error": 2}) == (
        "12 measured, 2 out of memory, 2 script errors"
    )
    assert metric_in_words("tokens_per_s", 40812.34) == "40,810 tokens/s"


def test_a_metric_of_rounds_tells_samples_per_second_by_what_the_search_measured() -> None:
    measured = {"throughput": 40.0, "FLOPS_per_gpu": 2e12, "latency": 0.1, "forward": 0.03, "tokens_per_s": 400.0}
    assert speed_at(measured, 3e12, metric="FLOPS_per_gpu") == Speed(samples_per_s=60.0, tokens_per_s=600.0)
    assert speed_at(measured, 80.0, metric="throughput") == Speed(samples_per_s=80.0, tokens_per_s=800.0)
    assert speed_at(measured, 0.05, metric="latency") == Speed(samples_per_s=80.0, tokens_per_s=800.0)
    assert speed_at(measured, 0.03, metric="forward") == Speed(samples_per_s=40.0, tokens_per_s=400.0)
    assert speed_at(measured, 0.02, metric="forward") is None, "the rest of the step is not known"
    assert speed_at({}, 0.05, metric="latency") is None


@pytest.mark.parametrize(
    ("metric", "value", "shown", "brief"),
    [
        ("FLOPS_per_gpu", 3e12, "60 samples/s, 3 TFLOP/s per GPU", "60 samples/s"),
        ("throughput", 60.0, "60 samples/s", "60 samples/s"),
        ("latency", 0.05, "80 samples/s, 50 ms per step", "80 samples/s, 50 ms per step"),
        ("forward", 0.02, "20 ms", "20 ms"),
    ],
)
def test_samples_come_first_wherever_a_value_is_told(metric: str, value: float, shown: str, brief: str) -> None:
    measured = {"throughput": 40.0, "FLOPS_per_gpu": 2e12, "latency": 0.1, "forward": 0.03}
    assert value_in_words(measured, value, metric=metric, device="cuda") == shown
    assert samples_in_words(measured, value, metric=metric, device="cuda") == brief
