"""Compiles DeepSpeed's operators before the first trial, so that no measurement includes compilation.

    python -P -m optuna_dsat.launch.machine.operators TUNER_PID BUILDER...

prints a line of JSON for each builder, ``[builder, error]`` with an empty error on success. If a compiler is needed,
``[builder]`` is printed first. This is a separate process because on a GPU the compilation queries CUDA for the
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
from pathlib import Path
from subprocess import PIPE
from typing import IO

from optuna_dsat.config.op_builders import COMMUNICATION
from optuna_dsat.launch.machine.processes import MARK_ENV, kill_leftovers, new_mark
from optuna_dsat.runtime.adapt.journal import guard_builds, is_held, remove_if_abandoned
from optuna_dsat.runtime.process import die_with_parent

__all__ = [
    "BUILDING",
    "COMMUNICATION",
    "BuildWatch",
    "compile_operators",
    "extensions_dir",
    "held_locks",
    "is_built",
    "operator_name",
    "remove_stale_locks",
]


def extensions_dir(environ: Mapping[str, str]) -> Path:
    """Return torch's folder of compiled extensions for an environment (``torch.utils.cpp_extension``)."""
    if chosen := environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(chosen)
    cache = environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "torch_extensions"


def remove_stale_locks(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Remove build locks that no process holds; return them.

    Args:
        environ: Environment of the launches.
    """
    return tuple(path for path in _locks(environ) if remove_if_abandoned(path))


def held_locks(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the locks of running builds, each in the folder of its operator.

    Args:
        environ: Environment of the launches.
    """
    return tuple(path for path in _locks(environ) if is_held(path))


def _locks(environ: Mapping[str, str]) -> tuple[Path, ...]:
    root = extensions_dir(environ)
    return (*root.glob("*/lock"), *root.glob("*/*/lock"))


BUILDING = "building {} (first use only, 1 to 3 min)"
"""Phase shown while waiting for a compiler."""
_NAMES = {
    "AsyncIOBuilder": "async_io",
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
    """Return whether torch's folder of compiled extensions has the operator of a builder.

    Args:
        builder: Class name of DeepSpeed's builder.
        environ: Environment of the launches.
    """
    name, root = operator_name(builder), extensions_dir(environ)
    return any(True for pattern in (f"{name}/{name}.so", f"*/{name}/{name}.so") for _ in root.glob(pattern))


_LIMIT_S = 900.0
"""Time limit for compilation; an operator for CUDA takes some minutes."""
_LOCKS_S = 5.0
"""Interval between checks of blocking locks."""


def compile_operators(
    builders: Sequence[str], environ: Mapping[str, str], *, on_phase: Callable[[str], None] = lambda _: None
) -> dict[str, str]:
    """Compile the missing operators; return builder -> error for those that failed.

    Args:
        builders: Class names of DeepSpeed's builders.
        environ: Environment of the launches.
        on_phase: Called with the current activity, and with an empty string at the end.
    """
    command = [sys.executable, "-P", "-m", "optuna_dsat.launch.machine.operators", str(os.getpid()), *builders]
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
            if process.poll() is None:  # with its compilers, which would continue to write
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
    """Return the process's result per builder; remove locks that it waits for once they are stale.

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
            return ""  # this device does not have or need such an operator
        builder.load(verbose=False)
    except Exception as error:  # noqa: BLE001 - any error is reported to the user
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
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


_LOOK_S = 1.0
"""Interval between checks."""


class BuildWatch:
    """Detects builds in torch's folder of compiled extensions.

    Args:
        environ: Environment of the launches.
        on_phase: Called with the current builds, and with an empty string at the end.
        clock: Monotonic time in seconds.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        *,
        on_phase: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._environ = environ
        self._on_phase = on_phase
        self._clock = clock
        self._looked = float("-inf")
        self._told = ""

    def check(self) -> None:
        """Check for builds at most every ``_LOOK_S``; call it while launches run."""
        if self._clock() - self._looked < _LOOK_S:
            return
        self._looked = self._clock()
        self._tell(", ".join(sorted({lock.parent.name for lock in held_locks(self._environ)})))

    def end(self) -> None:
        """Report that no launch runs."""
        self._tell("")

    def _tell(self, names: str) -> None:
        if names != self._told:
            self._told = names
            self._on_phase(BUILDING.format(names) if names else "")
