"""Processes forked from a process with loaded imports, since imports would take most of their time."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection

import pytest

_CONTEXT = multiprocessing.get_context("forkserver")
_IMPORTED = ("tests.harness.worker", "tests.store.actor", "psycopg")


@pytest.fixture(scope="session")
def forks() -> Iterator[None]:
    """Start the process from which others are forked; it belongs to no test and has no open files."""
    _CONTEXT.set_forkserver_preload([*_IMPORTED])
    forkserver.ensure_running()
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]  # else it lives as long as this process


class ForkedProcess:
    """Forked process that runs ``python -m MODULE ARGUMENTS`` by the module's ``main``; needs the fixture ``forks``.

    It has attributes and methods of ``subprocess.Popen``, with all three streams piped.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        (stdin, into), (out, stdout), (errors, stderr) = (os.pipe() for _ in range(3))
        given = [
            Connection(stdin, writable=False),
            Connection(stdout, readable=False),
            Connection(stderr, readable=False),
        ]
        self._module = module
        self._process = _CONTEXT.Process(target=_run, args=(module, arguments, given), daemon=True)
        self._process.start()
        for end in given:
            end.close()
        self.stdin = os.fdopen(into, "w", encoding="utf-8")
        self.stdout = os.fdopen(out, encoding="utf-8")
        self.stderr = os.fdopen(errors, encoding="utf-8")

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._module, timeout or 0.0)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return the rest of stdout, which must fit into the pipe, and stderr; empty in a second call."""
        self.wait(timeout)
        texts = ["" if stream.closed else stream.read() for stream in (self.stdout, self.stderr)]
        for stream in (self.stdin, self.stdout, self.stderr):
            stream.close()
        return texts[0], texts[1]


def _run(module: str, arguments: Sequence[str], streams: Sequence[Connection]) -> None:
    for number, end in enumerate(streams):
        os.dup2(end.fileno(), number)
        end.close()
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - as long as this process
    sys.stdout = open(1, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    sys.argv = [module, *arguments]
    importlib.import_module(module).main()
