"""Compiles DeepSpeed's operators before the first trial, so that no measurement includes compilation.

    python -P -m optuna_dsat.launch.operators TUNER_PID BUILDER...

prints one line of JSON: builder -> why it could not be compiled, empty if it was. A process of its own, since on a GPU
the compilation queries CUDA for the device's capability.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from subprocess import PIPE

from optuna_dsat.launch.build_locks import remove_stale_locks
from optuna_dsat.launch.processes import MARK_ENV, kill_leftovers, new_mark
from optuna_dsat.runtime.build_locks import guard_builds
from optuna_dsat.runtime.rank_process import die_with_parent

__all__ = ["compile_operators"]

_LIMIT_S = 900.0
"""Longest time to compile; an operator for CUDA takes some minutes."""
_LOCKS_S = 5.0
"""Pause between looks at locks that are in the way."""


def compile_operators(builders: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Compile the operators that are not compiled yet; return builder -> reason for those that failed.

    Args:
        builders: Class names of DeepSpeed's builders.
        environ: Environment of the launches.
    """
    command = [sys.executable, "-P", "-m", "optuna_dsat.launch.operators", str(os.getpid()), *builders]
    mark = new_mark()
    with subprocess.Popen(
        command,
        env={**environ, MARK_ENV: mark},
        cwd="/",
        stdout=PIPE,
        stderr=PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, errors = _output(process, environ, until=time.monotonic() + _LIMIT_S)
        except subprocess.TimeoutExpired:
            return dict.fromkeys(builders, f"it took more than {_LIMIT_S:g} s")
        finally:
            if process.poll() is None:  # with its compilers, which would write on
                process.kill()
                kill_leftovers(mark)
                process.wait()
                remove_stale_locks(environ)
    try:
        answer: dict[str, str] = json.loads(output.rstrip().rpartition("\n")[2])
    except ValueError:
        return dict.fromkeys(builders, (errors.strip().splitlines() or ["no answer"])[-1])
    return {name: why for name, why in answer.items() if why}


def _output(process: subprocess.Popen[str], environ: Mapping[str, str], *, until: float) -> tuple[str, str]:
    """Return what a process wrote; locks that it waits for are removed once they are stale.

    Raises:
        subprocess.TimeoutExpired: If it has not ended at ``until``, a time of ``time.monotonic``.
    """
    while True:
        remove_stale_locks(environ)
        try:
            return process.communicate(timeout=_LOCKS_S)
        except subprocess.TimeoutExpired:
            if time.monotonic() > until:
                raise


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


def main(tuner_pid: int, builders: Sequence[str]) -> None:
    """Compile and print the result; the compilers' output goes to standard error. Ends with the tuner."""
    die_with_parent(tuner_pid)
    from torch.utils import file_baton

    answer = os.dup(1)
    os.dup2(2, 1)
    guard_builds(file_baton)
    found = {name: _compile(name) for name in builders}
    os.write(answer, json.dumps(found).encode() + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
