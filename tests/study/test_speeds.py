from __future__ import annotations

from dataclasses import replace

import pytest

from optuna_dsat.launch.measurement import LaunchRecord
from optuna_dsat.study.confirm.speeds import Speed, speed_of, with_efficiency
from optuna_dsat.study.end_reason import headroom_in_words
from optuna_dsat.words import (
    bytes_in_words,
    choices_in_words,
    count_in_words,
    duration_in_words,
    faster_in_words,
    flops_in_words,
    metric_in_words,
    outcomes_in_words,
    params_in_words,
    range_in_words,
    setting_in_words,
    share_in_words,
    slot_time_in_words,
    things_in_words,
    times_in_words,
)
from tests.harness.events import step_of
from tests.harness.small_model import profiled_of

PROFILE = replace(profiled_of().profile, flops_per_sample=10**12, device_name="NVIDIA H100 80GB HBM3")
BF16 = {"bf16": {"enabled": True}}


def record(*, tokens: bool) -> LaunchRecord:
    made = LaunchRecord(world_size=1, start_profile_step=1)
    for step in (1, 2):
        made.add(
            step_of(step=step, latency_s=1.0, elements=8 * 512, elements_are_tokens=tokens, forward_s=0.4,
                    backward_s=0.4, step_s=0.1)
        )  # fmt: skip
    return made


def test_what_is_not_known_is_not_told() -> None:
    plain = {"throughput": 40.0, "FLOPS_per_gpu": 4e12}
    for profile, config in (
        (replace(PROFILE, device_name="a GPU of tomorrow"), BF16),
        (replace(PROFILE, param_bytes=4), {}),
    ):
        kept = with_efficiency(plain, profile=profile, config=config)
        assert speed_of(kept, 4e12, metric="FLOPS_per_gpu", device="cuda").text == "40 samples/s, 4 TFLOP/s per GPU"


def test_what_is_stored_of_a_launch_tells_tokens_and_mfu_as_its_line_did() -> None:
    """Of a launch whose line said both, ``show``, the result and the notes said neither."""
    kept = with_efficiency(
        record(tokens=True).metrics(flops_per_sample=PROFILE.flops_per_sample), profile=PROFILE, config=BF16
    )
    shown = speed_of(kept, kept["FLOPS_per_gpu"], metric="FLOPS_per_gpu", device="cuda")
    assert shown.text == f"8 samples/s, 4,096 tokens/s, {8e12 / 989.5e12:.0%} MFU"
    half = speed_of(kept, kept["FLOPS_per_gpu"] / 2, metric="FLOPS_per_gpu", device="cuda")
    assert half.text.startswith("4 samples/s, 2,048 tokens/s")
    plain = record(tokens=False).metrics(flops_per_sample=1.0)
    assert with_efficiency(plain, profile=replace(PROFILE, device_name="another"), config=BF16) == plain
    assert "tokens_per_s" not in plain


@pytest.mark.parametrize(
    ("metric", "value", "device", "shown"),
    [
        ("FLOPS_per_gpu", 28.78e9, "cpu", "40 samples/s, 28.78 GFLOP/s per CPU rank"),
        ("FLOPS_per_gpu", 28.78e9, "cuda", "40 samples/s, 28.78 GFLOP/s per GPU"),
        ("throughput", 40.0, "cuda", "40 samples/s"),
        ("latency", 0.2, "cuda", "40 samples/s, 200 ms per step"),
        ("forward", 1.5, "cuda", "40 samples/s, 1.5 s forward"),
    ],
)
def test_the_metric_is_told_too(metric: str, value: float, device: str, shown: str) -> None:
    assert Speed(metric=metric, value=value, samples_per_s=40.0, device=device).text == shown


def test_numbers_are_written_as_a_person_writes_them() -> None:
    assert [setting_in_words(item) for item in (5_000_000_000, 5e7, 10**5, 65536, 1422000, 16, True, "none", 0.5)] == [
        "5e9", "5e7", "1e5", "65536", "1422000", "16", "true", "none", "0.5"
    ]  # fmt: skip
    assert [count_in_words(item) for item in (13984, 40812.34, 999.96, 1.5)] == ["13,984", "40,810", "1,000", "1.5"]
    assert [setting_in_words(item) for item in (1_500_000, 123_000_000, 120_000)] == ["1.5e6", "1.23e8", "1.2e5"]
    assert [things_in_words(item, "launch") for item in (0, 1, 1200)] == ["0 launches", "1 launch", "1,200 launches"]
    assert [bytes_in_words(item) for item in (1, 320, 1536, 2**30, 2**40)] == [
        "1 byte", "320 bytes", "1.5 KiB", "1.00 GiB", "1.00 TiB"
    ]  # fmt: skip
    assert [params_in_words(item) for item in (1633, 1_420_000)] == ["1,633", "1.42 M"]
    assert [params_in_words(item) for item in (999_400_000, 999_600_000, 2 * 10**12, 1234 * 10**12)] == [
        "999 M", "1 B", "2 T", "1,230 T"
    ]  # fmt: skip
    assert [flops_in_words(item) for item in (8384.0, 985_300.0, 12.0)] == ["8.384 kFLOP", "985.3 kFLOP", "12 FLOP"]
    assert [flops_in_words(item) for item in (999.96e9, 3.1e17, 4e19, 1.5e22)] == [
        "1 TFLOP", "310 PFLOP", "40 EFLOP", "15,000 EFLOP"
    ]  # fmt: skip
    assert [metric_in_words("latency", item) for item in (5.23e-6, 0.0296, 1.5)] == [
        "5.23 \u00b5s",
        "29.6 ms",
        "1.5 s",
    ]
    assert choices_in_words((1, 65536), as_range=True) == "1 to 65,536"
    assert choices_in_words((5_000_000, 5_000_000_000)) == "5e6, 5e9"
    assert outcomes_in_words({"out_of_memory": 2, "measured": 12, "script_error": 2}) == (
        "12 measured, 2 out of memory, 2 script errors"
    )
    assert metric_in_words("tokens_per_s", 40812.34) == "40,810 tokens/s"
    assert [faster_in_words(item) for item in (0.09, 2.53)] == ["9% faster", "3.5 times as fast"]


def test_ranges_and_small_amounts_are_told_in_a_fitting_unit() -> None:
    assert range_in_words("6,564 samples/s", "17,770 samples/s") == "6,564 to 17,770 samples/s"
    assert range_in_words("985 ms", "1.2 s") == "985 ms to 1.2 s"
    assert [share_in_words(item) for item in (0.0, 0.004, 0.83)] == ["0%", "less than 1%", "83%"]
    assert [duration_in_words(item) for item in (0.0, 0.4, 1.2, 200.0)] == ["0 s", "0.4 s", "1 s", "3 min 20 s"]
    assert [slot_time_in_words(item, "cuda") for item in (3600.0, 5400.0, 60.0)] == [
        "1 GPU hour", "1.5 GPU hours", "1 GPU minute"
    ]  # fmt: skip
    assert slot_time_in_words(30.5, "cpu") == "30.5 CPU rank seconds"


def test_a_ratio_has_the_same_digits_wherever_it_stands() -> None:
    ratios = (0.004, 0.704, 0.9876, 1.0, 1.0034, 1.5, 8.714, 41.533, 416.4, 999.7, 4160.0)
    assert [times_in_words(ratio) for ratio in ratios] == [
        "0.004", "0.704", "0.988", "1", "1.003", "1.50", "8.71", "41.5", "416", "1,000", "4,160"
    ]  # fmt: skip


def test_a_metric_of_rounds_tells_samples_per_second_by_what_the_search_measured() -> None:
    measured = {"throughput": 40.0, "FLOPS_per_gpu": 2e12, "latency": 0.1, "forward": 0.03, "tokens_per_s": 400.0}
    for metric, value, samples in (
        ("FLOPS_per_gpu", 3e12, 60.0),
        ("throughput", 80.0, 80.0),
        ("latency", 0.05, 80.0),
        ("forward", 0.03, 40.0),
    ):
        result = speed_of(measured, value, metric=metric, device="cuda")
        assert (result.value, result.samples_per_s, result.tokens_per_s) == (value, samples, 10 * samples)
    assert speed_of(measured, 0.02, metric="forward", device="cuda").samples_per_s is None, "the rest is not known"
    assert speed_of({}, 0.05, metric="latency", device="cuda").samples_per_s is None


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
    result = speed_of(measured, value, metric=metric, device="cuda")
    assert (result.text, result.brief) == (shown, brief)


def test_a_gain_that_may_be_larger_than_the_best_is_not_stated() -> None:
    assert "3.2% faster than the fastest measured" in headroom_in_words(0.032)
    assert "38% faster than the fastest measured" in headroom_in_words(0.378)
    assert "do not bound" in headroom_in_words(10.664)
