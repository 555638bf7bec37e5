"""Compile DeepSpeed's operators before the first trial, so that no measurement includes compilation."""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import PIPE
from typing import IO

from optuna_dsat.launch.machine.processes import kill_leftovers, new_mark
from optuna_dsat.runtime.adapt.journal import is_held, remove_if_abandoned
from optuna_dsat.runtime.agent.operators import COMMUNICATION, extensions_dir, operator_name
from optuna_dsat.runtime.agent.processes import MARK_ENV
from optuna_dsat.runtime.rank import can_compile
from optuna_dsat.script.interpreter import module_command


def remove_stale_locks(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Remove build locks that no process holds; return them."""
    return tuple(path for path in _locks(environ) if remove_if_abandoned(path))


def _locks(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the build locks, each in the folder of its operator."""
    root = extensions_dir(environ)
    return (*root.glob("*/lock"), *root.glob("*/*/lock"))


BUILDING = "building {} (first use only, may take minutes)"
"""Phase shown while waiting for a compiler."""
UPDATING = "rebuilding {} (if another environment or version built it last, may take minutes)"
"""The same for operators that are there: environments that share torch's folder of extensions rebuild them in turn."""
_LIMIT_S = 900.0
"""Time limit for compilation; an operator for CUDA takes some minutes."""
_LOCKS_S = 5.0
"""Interval between checks of blocking locks."""


def compile_operators(
    builders: Sequence[str],
    environ: Mapping[str, str],
    *,
    python: str,
    on_phase: Callable[[str], None] = lambda _: None,
) -> dict[str, str]:
    """Compile the missing operators; return builder -> error for each that failed."""
    failed: dict[str, str] = {}
    if COMMUNICATION in builders and not can_compile(environ):  # ranks do without it
        failed[COMMUNICATION] = "no C++ compiler (CXX) or no ninja is found"
        builders = [name for name in builders if name != COMMUNICATION]
    if not builders:
        return failed
    command = [*module_command(python, "optuna_dsat.runtime.agent.operators"), str(os.getpid()), *builders]
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
            return {**failed, **dict.fromkeys(builders, f"it took more than {_LIMIT_S:g} s")}
        finally:
            if process.poll() is None:  # with its compilers, which would continue to write
                process.kill()
                kill_leftovers(mark)
                process.wait()
                remove_stale_locks(environ)
            on_phase("")
        missing = dict.fromkeys((name for name in builders if name not in answer), _last_line(errors))
    return {name: why for name, why in {**failed, **answer, **missing}.items() if why}


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


_LOOK_S = 1.0
"""Interval between checks."""


class BuildWatch:
    """Detects builds in torch's folder of compiled extensions."""

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
        self._tell({lock.parent.name: lock.parent for lock in _locks(self._environ) if is_held(lock)})

    def end(self) -> None:
        """Report that no launch runs."""
        self._tell({})

    def _tell(self, folders: Mapping[str, Path]) -> None:
        if (names := ", ".join(sorted(folders))) != self._told:
            self._told = names
            are_built = all((folder / f"{name}.so").exists() for name, folder in folders.items())
            self._on_phase((UPDATING if are_built else BUILDING).format(names) if names else "")
