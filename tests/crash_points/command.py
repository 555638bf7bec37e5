"""The command in a process of its own, forked from one that has all imported, with points."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from optuna_dsat.cli import main
from optuna_dsat.launch.machine import processes
from optuna_dsat.tuning import run
from tests.crash_points.launcher import ProcessLauncher
from tests.crash_points.points import Blow, Points

LIMIT_S = 45.0
"""How long the command may take; a study undisturbed takes about one second. On a busy machine it is given more."""

LAUNCHES_FILE = "launches.jsonl"
POINTS_FILE = "points.jsonl"


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How the command ended."""

    code: int | None
    """Exit code, negative for a signal; None if it did not end in time and was killed."""
    stdout: str
    stderr: str


def run_command(
    folder: Path, arguments: Sequence[str], *, at: int | None = None, blow: Blow = Blow.KILL, count: bool = False
) -> Ended:
    """Run the command in a forked process and wait for its end.

    Args:
        folder: Holds ``work``, its working directory, and ``notes``.
        arguments: Those of ``optuna-dsat``.
        at: Number of the point, from 0, at which something befalls it; None for none.
        blow: What befalls it.
        count: Whether to write all its points to ``notes``.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        _become_command(folder, arguments, at=at, blow=blow, count=count)
    code = _wait(child)
    notes = folder / "notes"
    return Ended(
        code=code,
        stdout=(notes / "stdout").read_text(encoding="utf-8", errors="replace"),
        stderr=(notes / "stderr").read_text(encoding="utf-8", errors="replace"),
    )


def _wait(child: int) -> int | None:
    """Return the exit code of a child; None if it had to be killed."""
    descriptor, began = os.pidfd_open(child), time.monotonic()
    ended: list[int] = []
    try:
        while not ended and (left_s := began + LIMIT_S + 2 * _starved_s(child) - time.monotonic()) > 0:
            ended, _, _ = select.select([descriptor], [], [], left_s)
    finally:
        os.close(descriptor)
    if not ended:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) if ended else None


def _starved_s(pid: int) -> float:
    """Return how long a process was ready to run and was given no processor; a server that it asks is as well."""
    return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="utf-8").split()[1]) / 1e9


def _become_command(
    folder: Path, arguments: Sequence[str], *, at: int | None, blow: Blow, count: bool
) -> NoReturn:  # pragma: no cover - a process of its own
    code = 70
    gc.disable()  # what it would collect ends with the process
    try:
        _redirect(folder / "notes")
        _prepare(folder)
        points = _appending(folder / "notes" / POINTS_FILE) if count else None
        Points(notes=points, at=at, blow=blow).install()
        code = _call(arguments)
    except BaseException:  # noqa: BLE001 - what the interpreter would print of it is what is looked for
        traceback.print_exc()
        code = 1
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _appending(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def warm_up(folder: Path, arguments: Sequence[str]) -> None:
    """Run the command in this process, so that forks find imported and compiled what it needs.

    Raises:
        RuntimeError: If it fails.
    """
    home, environ, path = Path.cwd(), dict(os.environ), list(sys.path)
    _prepare(folder)
    try:
        with Path(os.devnull).open("w", encoding="utf-8") as nothing, contextlib.redirect_stdout(nothing):
            code = _call(arguments)
    finally:
        os.chdir(home)
        os.environ.clear()
        os.environ.update(environ)
        sys.path[:] = path
        tempfile.tempdir = None
    if code:
        raise RuntimeError(f"The command {arguments} ends with {code}.")


def _call(arguments: Sequence[str]) -> int:
    """Run the command in this process; return its exit code."""
    try:
        main(list(arguments))
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)


def _redirect(notes: Path) -> None:
    """Let what this process prints go to files."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        output = os.open(notes / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(output, number)
        os.close(output)


def _prepare(folder: Path) -> None:
    """Give this process a home and temporary folder of its own, and simulated launches that are noted."""
    sys.dont_write_bytecode = True
    for variable, name in (("HOME", "home"), ("TMPDIR", "tmp")):
        os.environ[variable] = str(folder / name)
    for variable in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        os.environ.pop(variable, None)
    tempfile.tempdir = str(folder / "tmp")  # else it is looked for by writing a file, which is not ours
    os.chdir(folder / "work")
    launches = _appending(folder / "notes" / LAUNCHES_FILE)
    patched: Any = run
    patched.local_launcher = lambda output_dir, **_: ProcessLauncher(Path(output_dir), notes=launches)
    processes_of: Any = processes
    processes_of.MARK_ENV = f"OPTUNA_DSAT_CRASH_POINT_{os.getppid()}"  # launches of other runs are not this one's
