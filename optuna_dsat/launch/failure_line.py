"""Summarise an exception of the script in a line: config keys and cause."""

from __future__ import annotations

import re
from collections.abc import Iterator

from optuna_dsat.runtime.files import shortened

_VALIDATION = re.compile(r"\d+ validation errors? for (\w+)")
_REASON = re.compile(
    r"\s+(?P<text>.*?)(?: \[type=(?P<type>\w+), input_value=(?P<value>.*), input_type=(?P<of>\w+)\])?$"
)
"""Matches pydantic's line below the name of a field."""
_SECTIONS = {
    "CSVConfig": "csv_monitor",
    "CometConfig": "comet",
    "CommsLoggerConfig": "comms_logger",
    "CompileConfig": "compile",
    "DeepSpeedBF16Config": "bf16",
    "DeepSpeedFP16Config": "fp16",
    "DeepSpeedMonitorConfig": "",
    "DeepSpeedZeroConfig": "zero_optimization",
    "DeepSpeedZeroOffloadOptimizerConfig": "zero_optimization.offload_optimizer",
    "DeepSpeedZeroOffloadParamConfig": "zero_optimization.offload_param",
    "HybridEngineConfig": "hybrid_engine",
    "TPTrainingConfig": "tensor_parallel",
    "TensorBoardConfig": "tensorboard",
    "WandbConfig": "wandb",
    "ZenFlowConfig": "zero_optimization.zenflow",
}
"""DeepSpeed 0.19 class that validates a section -> the section's key."""
_LONGEST = 400
"""Maximum characters of a line."""


def failure_line(message: str) -> str:
    """Return an exception's message in a single line.

    For a validation error, this contains the keys, their values and the reasons. A first line that ends with a colon
    is followed by the other lines.
    """
    if refused := list(refused_values(message)):
        texts = [f"{key} is {value}: {reason}" if value else f"{key}: {reason}" for key, value, reason in refused]
        return shortened("; ".join(texts), _LONGEST)
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if lines and lines[0].endswith(":"):
        listed = "; ".join(line.removeprefix("- ") for line in lines[1:])
        return shortened(f"{lines[0]} {listed}".rstrip(".: "), _LONGEST)
    return lines[0].rstrip(".") if lines else ""


def refused_values(message: str) -> Iterator[tuple[str, str, str]]:
    """Yield dotted key, value and reason for each value in a validation error of DeepSpeed's config."""
    first, *lines = message.splitlines() or [""]
    model = _VALIDATION.match(first)
    if model is None:
        return
    section = _SECTIONS.get(model[1], model[1])
    key: str | None = section
    for line in lines:
        if line and not line[0].isspace():
            key = ".".join(filter(None, (section, line.strip())))
        elif key is not None and (match := _REASON.match(line)):
            unknown = match["type"] == "extra_forbidden"
            has_value = match["value"] and match["of"] != "dict" and not unknown
            yield key, match["value"] if has_value else "", "DeepSpeed has no such key" if unknown else match["text"]
            key = None  # the next line contains further information
