"""Compiles DeepSpeed's operators before the first trial, so that no measurement includes compilation.

    python -P -m optuna_dsat.launch.operators BUILDER...

prints one line of JSON: builder -> why it could not be compiled, empty if it was. A process of its own, since on a GPU
the compilation queries CUDA for the device's capability.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

__all__ = ["compile_operators"]

_LIMIT_S = 900.0
"""Longest time to compile; an operator for CUDA takes some minutes."""


def compile_operators(builders: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Compile the operators that are not compiled yet; return builder -> reason for those that failed.

    Args:
        builders: Class names of DeepSpeed's builders.
        environ: Environment of the launches.
    """
    command = [sys.executable, "-P", "-m", "optuna_dsat.launch.operators", *builders]
    try:
        done = subprocess.run(
            command, env=environ, cwd="/", capture_output=True, text=True, check=False, timeout=_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return dict.fromkeys(builders, f"it took more than {_LIMIT_S:g} s")
    try:
        answer: dict[str, str] = json.loads(done.stdout.rstrip().rpartition("\n")[2])
    except ValueError:
        return dict.fromkeys(builders, (done.stderr.strip().splitlines() or ["no answer"])[-1])
    return {name: why for name, why in answer.items() if why}


def _compile(name: str) -> str:
    from deepspeed.accelerator import get_accelerator

    try:
        builder = get_accelerator().create_op_builder(name)
        if builder is None or builder.NAME == "deepspeed_not_implemented":
            return ""  # this device has no such operator, nor needs it
        builder.load(verbose=False)
    except Exception as error:  # noqa: BLE001 - any error is reported to the user
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    return ""


def main(builders: Sequence[str]) -> None:
    """Compile and print the result; the compilers' output goes to standard error."""
    answer = os.dup(1)
    os.dup2(2, 1)
    found = {name: _compile(name) for name in builders}
    os.write(answer, json.dumps(found).encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1:])
