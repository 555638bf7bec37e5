"""Ranks that torchrun forks from a process with the heavy modules imported, instead of starting interpreters.

Everything else remains torchrun's: environment of the ranks, rendezvous, handling of failures. A forked rank gets the
state of a fresh interpreter: standard streams, environment, signals, ``sys.path``, open files and random state.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from optuna_dsat.runtime.agent.cuda import driver_is_initialised, restore_cuda
from optuna_dsat.runtime.process import SAFE_PATH_ENV

_RUNTIME = "optuna_dsat.runtime"

_EXIT_CANNOT_FORK = 71
"""Exit code of a child whose setup failed (``EX_OSERR`` of ``sysexits.h``)."""

_PR_SET_NAME = 15
"""``linux/prctl.h``."""

_FRESH_SIGNALS: dict[int, signal.Handlers] = {signal.SIGPIPE: signal.SIG_IGN, signal.SIGXFSZ: signal.SIG_IGN}
"""Signal handlers that Python sets at its start, in addition to Ctrl-C; the others are the system's defaults."""


@dataclass(frozen=True)
class ParentState:
    """State of the fork server after the imports, which forked processes keep or restore."""

    descriptors: frozenset[int]
    """Files opened by the imported modules; all others are closed in a child."""
    environment: Mapping[str, str | None]
    """Environment variables changed by the imports; None for removed variables."""

    @classmethod
    def capture(cls, *, without: Sequence[int], started_with: Mapping[str, str]) -> ParentState:
        """Capture the state of this process, without some descriptors, and its changes since it was started."""
        names = {n for n in os.environ.keys() | started_with.keys() if os.environ.get(n) != started_with.get(n)}
        return cls(
            descriptors=frozenset(_open_descriptors().keys() - set(without)),
            environment={name: os.environ.get(name) for name in names},
        )

    def apply_environment_changes(self) -> None:
        """Apply the imports' changes to the environment, as they would in a fresh interpreter."""
        for name, value in self.environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def restore(self, *, reopened: frozenset[int]) -> None:
        """Reset signals, open files and the thread's name of this process."""
        gc.freeze()  # collecting the parent's garbage here would close descriptors that others use by then
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            if signal.getsignal(number) is signal.SIG_IGN:
                continue  # a started process inherits ignored signals, as a background shell ignores Ctrl-C
            handler = signal.default_int_handler if number == signal.SIGINT else _FRESH_SIGNALS.get(number)
            with contextlib.suppress(OSError, ValueError):  # reserved by the C library
                signal.signal(number, handler or signal.SIG_DFL)
        for descriptor in _open_descriptors().keys() - self.descriptors - reopened - {0, 1, 2}:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        ctypes.CDLL(None).prctl(_PR_SET_NAME, b"python", 0, 0, 0)


def can_fork() -> bool:
    """Return whether warm launches can work: this Python and the system have pidfds (Linux 5.3)."""
    with contextlib.suppress(AttributeError, OSError):  # as in a sandbox, or if Python was built on an older system
        os.close(os.pidfd_open(os.getpid()))
        return True
    return False


def _open_descriptors() -> dict[int, tuple[int, int]]:
    """Return the open descriptors, each with device and inode of its file."""
    result = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            status = os.fstat(int(entry.name))
            result[int(entry.name)] = (status.st_dev, status.st_ino)
    return result


def fork_child(run: Callable[[frozenset[int]], object]) -> int:
    """Fork a child that calls ``run``, which must not return; return its PID.

    ``run`` gets the descriptors that the fork itself has reopened, as libuv under torchrun's store does with a pipe.
    Such a library closes these numbers at the next fork, even if reused since.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    before = _open_descriptors().items()
    pid = os.fork()
    if pid == 0:
        try:
            run(frozenset(dict(_open_descriptors().items() - before)))
        except KeyboardInterrupt:
            traceback.print_exc()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)  # end like an interpreter: other processes see the signal
        except BaseException:  # noqa: BLE001 - nothing may propagate into the parent's code
            traceback.print_exc()
        finally:
            os._exit(_EXIT_CANNOT_FORK)
    return pid


def become_agent(
    run: Callable[[], int],
    *,
    parent_state: ParentState,
    reopened: frozenset[int],
    environ: Mapping[str, str],
    cwd: str,
    log: str,
) -> NoReturn:
    """Turn this forked process into a launch's agent: call ``run`` and exit with its return code."""
    os.setsid()
    parent_state.restore(reopened=reopened)
    _replace_environment(environ)
    os.chdir(cwd)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    code = run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _replace_environment(environ: Mapping[str, str]) -> None:
    for name in os.environ.keys() - environ.keys():
        del os.environ[name]
    os.environ.update(environ)


class _ForkedProcess:
    """A forked child with the interface of ``subprocess.Popen`` that torchrun uses."""

    def __init__(self, run: Callable[[frozenset[int]], object]) -> None:
        self.returncode: int | None = None
        self.pid = fork_child(run)

    def poll(self) -> int | None:
        """Return the exit code (negative: signal), None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end.

        Raises:
            subprocess.TimeoutExpired: If it still runs after ``timeout`` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("rank", timeout or 0.0)
            time.sleep(0.005)
        return code


@contextlib.contextmanager
def forked_ranks(parent_state: ParentState) -> Iterator[None]:
    """Within this context, torchrun in this process forks its ranks unless this process has initialised CUDA."""
    from torch.distributed.elastic.multiprocessing import api
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    class Handler(SubprocessHandler):  # type: ignore[misc,unused-ignore]
        def _popen(self, args: Sequence[str], env: Mapping[str, str]) -> Any:
            if driver_is_initialised():  # a fork could not use CUDA; the rank records that it was started
                return super()._popen(tuple(args), dict(env))
            return _ForkedProcess(lambda reopened: _become_rank(args, env, parent_state, reopened))

    names: Any = api
    original = names.get_subprocess_handler

    names.get_subprocess_handler = Handler
    try:
        yield
    finally:
        names.get_subprocess_handler = original


def _become_rank(
    command: Sequence[str], environ: Mapping[str, str], parent_state: ParentState, reopened: frozenset[int]
) -> NoReturn:
    """Turn this forked process into what ``command`` (``python -u -m optuna_dsat.runtime ...``) would start."""
    from optuna_dsat.runtime.__main__ import run

    os.setsid()
    parent_state.restore(reopened=reopened)
    _replace_environment(environ)
    parent_state.apply_environment_changes()
    resolve_python_path(environ.get("PYTHONPATH", ""))
    argv = list(command[command.index(_RUNTIME) + 1 :])
    sys.argv = [_RUNTIME, *argv]
    sys.orig_argv = list(command)
    safe_path = bool(environ.get(SAFE_PATH_ENV))
    _disown_temporary_folders()
    _reseed()
    restore_cuda()
    _reset_device_queries()
    run(argv, safe_path=safe_path, forked=True)


def resolve_python_path(python_path: str) -> None:
    """Resolve relative entries of ``PYTHONPATH`` against the working directory, as a fresh interpreter would.

    The fork server runs in the root folder and has resolved them there.
    """
    entries = python_path.split(os.pathsep) if python_path else []
    relative = [entry for entry in entries if not Path(entry).is_absolute()]
    taken = {f"{root}{os.path.normpath(Path('/') / entry)[1:]}" for entry in relative for root in ("/", "//")}
    taken -= set(entries)
    places = [place for place, path in enumerate(sys.path) if path in taken]
    if places:
        kept = [path for path in sys.path if path not in taken]
        resolved = dict.fromkeys(os.path.normpath(Path.cwd() / entry) for entry in relative)
        sys.path[:] = [*kept[: places[0]], *resolved, *kept[places[0] :]]


def _disown_temporary_folders() -> None:
    """Leave temporary folders created by the fork server's imports to the server: later ranks use them, too.

    All other exit functions of imported modules run in the rank, as they would after its own import.
    """
    atexit.unregister(shutil.rmtree)
    cleanup = getattr(tempfile.TemporaryDirectory, "_cleanup", None)
    for finalizer in list(getattr(weakref.finalize, "_registry", {})):
        pending = finalizer.peek()
        if pending is not None and pending[1] == cleanup:
            finalizer.detach()


def _reseed() -> None:
    """Reseed NumPy and torch (on the CPU) as their imports would; ``random`` reseeds itself after a fork."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.random.seed(None)
    if torch is not None:
        torch.default_generator.seed()


def _reset_device_queries() -> None:
    """Drop torch's cached GPU count, which may exceed this launch's GPUs, and reinitialise NVML.

    DeepSpeed's CUDA accelerator initialises NVML at its import; NVML's behaviour after a fork is not documented.
    """
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch.cuda, "_cached_device_count"):
        torch.cuda._cached_device_count = None
    nvml: Any = getattr(sys.modules.get("deepspeed.accelerator.cuda_accelerator"), "pynvml", None)
    if nvml is not None:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlInit()
