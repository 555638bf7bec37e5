"""Compiles DeepSpeed's operators before the first trial, so that no measurement includes compilation.

    python -P -m optuna_dsat.launch.operators TUNER_PID BUILDER...

prints a line of JSON for each builder, ``[builder, why it could not be compiled, empty if it was]``, and before it
``[builder]`` where a compiler is needed. A process of its own, since on a GPU the compilation queries CUDA for the
device's capability.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from subprocess import PIPE
from typing import IO

from optuna_dsat.launch.build_locks import remove_stale_locks
from optuna_dsat.launch.built_operators import BUILDING, is_built, operator_name
from optuna_dsat.launch.ending import kill_leftovers
from optuna_dsat.launch.processes import MARK_ENV, new_mark
from optuna_dsat.runtime.build_locks import guard_builds
from optuna_dsat.runtime.rank_process import die_with_parent

__all__ = ["compile_operators"]

_LIMIT_S = 900.0
"""Longest time to compile; an operator for CUDA takes some minutes."""
_LOCKS_S = 5.0
"""Pause between looks at locks that are in the way."""


def compile_operators(
    builders: Sequence[str], environ: Mapping[str, str], *, on_phase: Callable[[str], None] = lambda _: None
) -> dict[str, str]:
    """Compile the operators that are not compiled yet; return builder -> reason for those that failed.

    Args:
        builders: Class names of DeepSpeed's builders.
        environ: Environment of the launches.
        on_phase: Called with what is compiled, and with nothing once it is over.
    """
    command = [sys.executable, "-P", "-m", "optuna_dsat.launch.operators", str(os.getpid()), *builders]
    mark = new_mark()
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            command,
            env={**environ, MARK_ENV: mark},
            cwd="/",
            stdout=PIPE,
            stderr=errors,
            start_new_session=True,
        ) as process,
    ):
        on_phase("preparing DeepSpeed's operators")
        try:
            answer = _answers(process, environ, until=time.monotonic() + _LIMIT_S, on_phase=on_phase)
        except subprocess.TimeoutExpired:
            return dict.fromkeys(builders, f"it took more than {_LIMIT_S:g} s")
        finally:
            if process.poll() is None:  # with its compilers, which would write on
                process.kill()
                kill_leftovers(mark)
                process.wait()
                remove_stale_locks(environ)
            on_phase("")
        missing = dict.fromkeys((name for name in builders if name not in answer), _last_line(errors))
    return {name: why for name, why in {**answer, **missing}.items() if why}


def _answers(
    process: subprocess.Popen[bytes], environ: Mapping[str, str], *, until: float, on_phase: Callable[[str], None]
) -> dict[str, str]:
    """Return what a process says of each builder; locks that it waits for are removed once they are stale.

    Raises:
        subprocess.TimeoutExpired: If it has not ended at ``until``, a time of ``time.monotonic``.
    """
    assert process.stdout is not None
    answers: dict[str, str] = {}
    partial = b""
    while True:
        remove_stale_locks(environ)
        if not select.select([process.stdout], [], [], _LOCKS_S)[0]:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(process.args, _LIMIT_S)
            continue
        data = os.read(process.stdout.fileno(), 65536)
        *lines, partial = (partial + data).split(b"\n")
        for line in lines:
            name, *why = json.loads(line)
            if why:
                answers[name] = why[0]
            else:
                on_phase(BUILDING.format(operator_name(name)))
        if not data:
            process.wait()
            return answers


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no answer"


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
    for name in builders:
        if not is_built(name, os.environ):
            os.write(answer, json.dumps([name]).encode() + b"\n")
        os.write(answer, json.dumps([name, _compile(name)]).encode() + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
