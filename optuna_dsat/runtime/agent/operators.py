"""Compile DeepSpeed's operators, with the interpreter of the script.

    python -m optuna_dsat.runtime.agent.operators TUNER_PID BUILDER...

prints a line of JSON for each builder, ``[builder, error]`` with an empty error on success. If a compiler is needed,
``[builder]`` is printed first. This is a separate process because on a GPU the compilation queries CUDA for the
device's capability.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from optuna_dsat.runtime.adapt.journal import guard_builds
from optuna_dsat.runtime.agent.processes import die_with_parent
from optuna_dsat.runtime.failure import message_with_cause
from optuna_dsat.runtime.files import home

COMMUNICATION = "ShareMemCommBuilder"
"""Builder of the operator for communication on the CPU, which DeepSpeed loads wherever it has no other device."""

ASYNC_IO = "AsyncIOBuilder"
"""Builder of the operator that reads and writes files, for NVMe offload."""

_NAMES = {
    ASYNC_IO: "async_io",
    "CPUAdagradBuilder": "cpu_adagrad",
    "CPUAdamBuilder": "cpu_adam",
    "CPULionBuilder": "cpu_lion",
    "FusedAdamBuilder": "fused_adam",
    "FusedLambBuilder": "fused_lamb",
    "FusedLionBuilder": "fused_lion",
    COMMUNICATION: "deepspeed_shm_comm",
}
"""Builder class -> its ``NAME`` in DeepSpeed 0.19.8, used for the folder and the library."""


def operator_name(builder: str) -> str:
    """Return the operator name of a builder; the builder's name if unknown."""
    return _NAMES.get(builder, builder)


def is_built(builder: str, environ: Mapping[str, str]) -> bool:
    """Return whether torch's folder of compiled extensions has the operator of a builder."""
    name, root = operator_name(builder), extensions_dir(environ)
    return any(True for pattern in (f"{name}/{name}.so", f"*/{name}/{name}.so") for _ in root.glob(pattern))


def extensions_dir(environ: Mapping[str, str]) -> Path:
    """Return torch's folder of compiled extensions for an environment (``torch.utils.cpp_extension``)."""
    if chosen := environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(chosen)
    return Path(environ.get("XDG_CACHE_HOME") or home() / ".cache") / "torch_extensions"


def _compile(name: str) -> str:
    from deepspeed.accelerator import get_accelerator

    try:
        builder = get_accelerator().create_op_builder(name)
        if builder is None or builder.NAME == "deepspeed_not_implemented":
            return ""  # this device does not have or need such an operator
        if name == ASYNC_IO and not builder.is_compatible(verbose=False):
            return "libaio and its header are missing (install libaio-dev, or libaio-devel)"
        builder.load(verbose=False)
    except Exception as error:  # noqa: BLE001 - any error is reported to the user
        return (message_with_cause(error).strip().splitlines() or [type(error).__name__])[0]
    return ""


def main(tuner_pid: int, builders: Sequence[str]) -> None:
    """Compile and print the results; redirect the compilers' output to standard error. Ends with the tuner."""
    die_with_parent(tuner_pid)
    from torch.utils import file_baton

    answer = os.dup(1)
    os.dup2(2, 1)
    guard_builds(file_baton)
    for name in builders:
        if not is_built(name, os.environ):
            os.write(answer, json.dumps([name]).encode() + b"\n")
        os.write(answer, json.dumps([name, _compile(name)]).encode() + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
