"""Single-line summaries of exceptions, with the config keys in them."""

from __future__ import annotations

import pytest

from optuna_dsat.launch.failure_line import failure_line


@pytest.mark.parametrize(
    ("message", "line"),
    [
        (
            "1 validation error for DeepSpeedZeroConfig\nreduce_bucket_size\n  Input should be a valid integer ["
            "type=int_parsing, input_value='2e8', input_type=str]\n    For further "
            "information visit https://errors.pydantic.dev/2.14/v/int_parsing",
            "zero_optimization.reduce_bucket_size is '2e8': Input should be a valid integer",
        ),
        (
            "2 validation errors for DeepSpeedZeroConfig\ncpu_offload_params\n  Extra inputs are not permitted "
            "[type=extra_forbidden, input_value=True, input_type=bool]\n    For further information visit x\n"
            "offload_optimizer.device\n  Input should be 'none', 'cpu' or 'nvme' [type=enum, input_value='gpu', "
            "input_type=str]",
            "zero_optimization.cpu_offload_params: DeepSpeed has no such key; "
            "zero_optimization.offload_optimizer.device is 'gpu': Input should be 'none', 'cpu' or 'nvme'",
        ),
        (
            "1 validation error for Settings\n  Value error, a and b exclude each other [type=value_error, "
            "input_value={'a': 1}, input_type=dict]",
            "Settings: Value error, a and b exclude each other",
        ),
        (
            "Please correct:\n- lr=1 vs 2\n- steps=3 vs 4\nSet them to 'auto'.",
            "Please correct: lr=1 vs 2; steps=3 vs 4; Set them to 'auto'",
        ),
        ("\n  first line.\nsecond", "first line"),
        ("", ""),
    ],
)
def test_the_line_names_keys_and_cause(message: str, line: str) -> None:
    assert failure_line(message) == line
