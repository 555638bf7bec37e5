"""Remedies are given where the error supports them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from optuna_dsat.launch.measurement import LaunchRecord
from optuna_dsat.outcome import Outcome
from optuna_dsat.study.profile.profile import failure_hint
from tests.harness.studies import StudyBench

AUTO = {"zero_optimization": {"reduce_bucket_size": "auto", "zenflow": {"select_interval": "auto"}}}
QUANTIZED = {"optimizer": {"type": "AdamW"}, "zero_optimization": {"zero_quantized_weights": True}}
OFFLOAD = {"optimizer": {"type": "AdamW"}, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}


@pytest.mark.parametrize(
    ("message", "config", "hint"),
    [
        ("ValueError: This op had not been implemented on CPU backend", AUTO, ""),
        (
            "ValueError: This op had not been implemented on CPU backend",
            QUANTIZED,
            ". Tune on GPUs, or remove from the config what needs them: zero_optimization.zero_quantized_weights",
        ),
        ("RuntimeError: the mean is 0", AUTO, ""),
        ("ValueError: correct values that mismatch TrainingArguments values: lr; set these to 'auto'", AUTO, ""),
        (
            "ValidationError: zero_optimization.reduce_bucket_size is 'auto': Input should be a valid integer",
            AUTO,
            '. "auto" is filled in by the Hugging Face Trainer and, in part, by accelerate and Lightning, not by '
            "DeepSpeed: give zero_optimization.reduce_bucket_size a value",
        ),
        (
            "TypeError: AdamW.__init__() got an unexpected keyword argument 'torch_adam'",
            {**AUTO, "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}},
            ". Remove optimizer.params.torch_adam from the config: what DeepSpeed builds for it does not take it",
        ),
        ("TypeError: forward() got an unexpected keyword argument 'labels'", AUTO, ""),
        (
            "ValidationError: zero_optimization.reduce_bucket_size is '2e8': Input should be a valid integer",
            {},
            ". Write zero_optimization.reduce_bucket_size as a number or true or false, without quotes",
        ),
        (
            "ValidationError: zero_optimization.cpu_offload_params: DeepSpeed has no such key",
            {},
            ". Remove zero_optimization.cpu_offload_params, or write zero_optimization.cpu_offload_param",
        ),
        (
            "ValidationError: zero_optimization.elastic: DeepSpeed has no such key",
            {},
            ". Remove zero_optimization.elastic",
        ),
        (
            "RuntimeError: Error building extension 'cpu_adam': c++: not found",
            OFFLOAD,
            ". DeepSpeed builds this operator for optimizer.type, zero_optimization.offload_optimizer.device in the "
            "config. Install a C++ compiler and ninja, or set optimizer.params.torch_adam to true, which needs none",
        ),
        (
            "RuntimeError: Error building extension 'async_io': c++: not found",
            {},
            ". DeepSpeed builds this operator. Install a C++ compiler and ninja",
        ),
    ],
)
def test_a_remedy_is_given_where_the_error_supports_it(
    bench: StudyBench, message: str, config: dict[str, Any], hint: str
) -> None:
    spec = bench.spec(max_trials=1)
    spec = spec.model_copy(update={"ds_config": config})
    report: Any = SimpleNamespace(outcome=Outcome.INVALID_CONFIG, message=message, error_excerpt="")
    assert failure_hint(spec, report, LaunchRecord(world_size=2, start_profile_step=1)) == hint
