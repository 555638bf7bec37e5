"""Hints on errors of the profile launch: what to change so that the script runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from optuna_dsat.config import ds_config
from optuna_dsat.config.user_file import correction
from optuna_dsat.launch.classify import MISMATCH, NO_ENGINE
from optuna_dsat.launch.measurement import LaunchRecord
from optuna_dsat.launch.protocol import LaunchReport
from optuna_dsat.outcome import Outcome
from optuna_dsat.script.command.interception import OF_LAUNCHERS
from optuna_dsat.study.profile.script import hint_to_train
from optuna_dsat.study.spec import StudySpec

_OTHER_LAUNCHERS = re.compile(rf"\b({'|'.join(OF_LAUNCHERS)})\b")
_OF_STRINGS = re.compile(r"""['"]auto['"]|TypeError.*'str'""")
"""Matches errors that "auto" in a config causes where nobody fills it in."""
_UNEXPECTED = re.compile(r"got an unexpected keyword argument '(\w+)'")
_MISSING = re.compile(r"(\w+)\.__init__\(\) missing \d+ required positional arguments?: (.*)")
_NO_BUILD = re.compile(r"\S+: (?:command )?not found|Ninja is required|CUDA_HOME|nvcc")
"""Matches the causes of a failed build that tools on the machine remove."""
_NO_PRECISION = re.compile(r"Type (fp16|bf16) is not supported on your device")
_NO_CPU_OPERATOR = "not been implemented on CPU backend"
OF_SCALARS = "self.dim() cannot be 0 to view"
"""DeepSpeed 0.19.8 sends parameters to the ranks as bytes (``engine._broadcast_model``)."""
_GPU_ONLY = (
    *("zero_optimization.zero_quantized_weights", "zero_optimization.zero_quantized_nontrainable_weights"),
    *("zero_optimization.zero_quantized_gradients", "optimizer.type", "sparse_attention.mode"),
)
"""Keys whose operator DeepSpeed 0.19 has on GPUs alone (``ops/op_builder/cpu``)."""
_CPU_OPTIMIZERS = ("adagrad", "adam", "adamw", "lion", "muon", "sgd")
_UNKNOWN_KEY = re.compile(r"([\w.]+): DeepSpeed has no such key")
_QUOTED_NUMBER = re.compile(r"([\w.]+) is ('[^']*'): it must be (?:a whole number|a number|true or false)")


def failure_hint(spec: StudySpec, report: LaunchReport, record: LaunchRecord) -> str:
    """Return a remedy for a failed profile launch as the end of its message; empty if the error supports none."""
    if report.outcome is Outcome.OUT_OF_DATA and not record.skipped_steps:
        return (
            ". If it did train, its loop is one that cannot be followed: "
            "put `with optuna_dsat.dsat_reporting_context(...)` around forward, backward and step"
        )
    if report.message.endswith(NO_ENGINE):
        return hint_to_train(spec)
    if missing := missing_variables(spec, report):
        name, same = next(iter(missing.items()))
        return (
            f". {name} is set by another launcher: ranks are started as by torchrun and have RANK, LOCAL_RANK and "
            f"WORLD_SIZE. Give the script {name} by --env '{name}={same}', or let it read these where they are set"
        )
    if "EOF when reading a line" in report.message:
        return (
            ". The script asks a question on its standard input, which is empty in trials: answer it by an option, or "
            "have it ask only if sys.stdin.isatty()"
        )
    passed = {key: values[0] for key, values in record.config_differences.items() if values[0] is not None}
    config = {**ds_config.flatten(spec.ds_config), **passed}
    return _of_values(report.message, config) or _of_auto(report.message, config, record)


def missing_variables(spec: StudySpec, report: LaunchReport) -> dict[str, str]:
    """Return the variables of another launcher that a failed script lacks, starting with the one in its error."""
    match = _OTHER_LAUNCHERS.search(f"{report.message}\n{report.error_excerpt}")
    if match is None or report.outcome is not Outcome.SCRIPT_ERROR or match[1] in spec.script.environment:
        return {}
    prefix = match[1].partition("_")[0]
    alike = {name: same for name, same in OF_LAUNCHERS.items() if name.startswith(prefix)}
    return {match[1]: alike.pop(match[1]), **alike}


def _of_values(message: str, config: Mapping[str, Any]) -> str:
    """Return the remedy for a key or value that an error names."""
    if quoted := [result for result in _QUOTED_NUMBER.finditer(message) if result[2] != "'auto'"]:
        return f". Write {', '.join(result[1] for result in quoted)} as a number or true or false, without quotes"
    if unknown := _UNKNOWN_KEY.findall(message):
        return f". {'. '.join(map(correction, unknown))}"
    if match := _UNEXPECTED.search(message):
        keys = [key for key in config if key in (f"optimizer.params.{match[1]}", f"scheduler.params.{match[1]}")]
        return f". Remove {keys[0]} from the config: what DeepSpeed builds for it does not take it" if keys else ""
    if (match := _MISSING.search(message)) and match[1] == config.get("scheduler.type"):
        keys = [f"scheduler.params.{name}" for name in re.findall(r"'(\w+)'", match[2])]
        return f". Add {', '.join(keys)} to the config"
    if OF_SCALARS in message:
        return ". DeepSpeed rejects the model: a parameter is a scalar. Give it a dimension, such as torch.ones(1)"
    if "has been removed" in message:  # DeepSpeed 0.19 refuses such keys, also of sections that are not enabled
        known = {*config, *(key.partition(".")[0] for key in config)}
        removed = [word for word in re.findall(r"[\w.]+", message.lower()) if word in known]
        return f". Remove {removed[0]} from the config" if removed else ""
    if _NO_CPU_OPERATOR in message:
        keys = [key for key in _GPU_ONLY if config.get(key) and str(config[key]).lower() not in _CPU_OPTIMIZERS]
        return f". Tune on GPUs, or remove from the config what needs them: {', '.join(keys)}" if keys else ""
    if "loss scale already at minimum" in message:
        return ". Losses or gradients are never finite: look at data, learning rate, initial values, or use bf16"
    if match := _NO_PRECISION.search(message):
        return f". Set {match[1]}.enabled to false, or tune on devices that support it"
    if "build" in message and _NO_BUILD.search(message):
        return _of_build(message, config)
    return ""


def _of_build(message: str, config: Mapping[str, Any]) -> str:
    """Return the remedy for an operator that cannot be built for want of tools."""
    keys = [key for key in config if key == "optimizer.type" or re.search(r"offload_\w+\.device$", key)]
    asked = f" for {', '.join(keys)} in the config" if keys else ""
    adam = str(config.get("optimizer.type", "")).lower() in ("adam", "adamw")
    other = ", or set optimizer.params.torch_adam to true, which needs none" if adam and "dam" in message else ""
    return f". DeepSpeed builds this operator{asked}. Install a C++ compiler and ninja{other}"


def _of_auto(message: str, config: Mapping[str, Any], record: LaunchRecord) -> str:
    """Return where "auto" is filled in, if it may have caused the error; a key that the error names alone counts."""
    autos = [key for key, value in config.items() if value == ds_config.AUTO]
    autos = [key for key in autos if f"{key} is" in message] or autos
    if not autos or MISMATCH in message or not _OF_STRINGS.search(message):
        return ""
    if record.trainer is not None and record.trainer.framework == "transformers":
        return (
            '. The Hugging Face Trainer fills in "auto" from TrainingArguments: if the value is one of '
            f"{', '.join(autos)}, set it there or in the config"
        )
    return f". {ds_config.AUTO_IN_WORDS}: give {', '.join(autos)} a value"
