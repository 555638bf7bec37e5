"""Ranks that torchrun forks from a process with the heavy modules imported, where it would start interpreters.

Everything else stays torchrun's: environment of the ranks, rendezvous, and what it does when one fails. A forked rank
is made to look like a fresh interpreter: standard streams, environment, signals, ``sys.path``, open files and random
state.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from optuna_dsat.launch.cuda_state import driver_is_initialised, show_cuda

__all__ = ["Origin", "become_agent", "fork_child", "forked_ranks"]

_RUNTIME = "optuna_dsat.runtime"

_EXIT_CANNOT_FORK = 71
"""Exit code of a child that could not be made what it was to be (``EX_OSERR`` of ``sysexits.h``)."""

_PR_SET_NAME = 15
"""``linux/prctl.h``."""

_FRESH_SIGNALS: dict[int, signal.Handlers] = {signal.SIGPIPE: signal.SIG_IGN, signal.SIGXFSZ: signal.SIG_IGN}
"""What Python itself does with signals at its start, beside Ctrl-C; all others are the system's."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What a forked process takes over from the parent, noted before the parent did anything of its own."""

    descriptors: frozenset[int]
    """Open files: those of the imported modules. All others are closed in a child."""
    environment: Mapping[str, str | None]
    """Variables that the imports have set, None for those that they removed."""

    @classmethod
    def of_this_process(cls, *, without: Sequence[int], started_with: Mapping[str, str]) -> Origin:
        """Note the state of this process.

        Args:
            without: Descriptors that are its own affair.
            started_with: Its environment before the imports.
        """
        names = {n for n in os.environ.keys() | started_with.keys() if os.environ.get(n) != started_with.get(n)}
        return cls(
            descriptors=_open_descriptors() - frozenset(without),
            environment={name: os.environ.get(name) for name in names},
        )

    def repeat_changes(self) -> None:
        """Do to the environment what the imports did, as they would in a fresh interpreter."""
        for name, value in self.environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def restore(self) -> None:
        """Put signals, open files and the thread's name of this process back."""
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            if signal.getsignal(number) is signal.SIG_IGN:
                continue  # a started process keeps what is ignored, as a background shell ignores Ctrl-C
            handler = signal.default_int_handler if number == signal.SIGINT else _FRESH_SIGNALS.get(number)
            with contextlib.suppress(OSError, ValueError):  # reserved by the C library
                signal.signal(number, handler or signal.SIG_DFL)
        for descriptor in _open_descriptors() - self.descriptors - {0, 1, 2}:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        ctypes.CDLL(None).prctl(_PR_SET_NAME, b"python", 0, 0, 0)


def _open_descriptors() -> frozenset[int]:
    return frozenset(int(entry.name) for entry in Path("/proc/self/fd").iterdir())


def fork_child(run: Callable[[], object]) -> int:
    """Fork a child that runs ``run``, which is to end it; return its process number."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        try:
            run()
        except BaseException:  # noqa: BLE001 - whatever it is, this is not the parent's code any more
            traceback.print_exc()
        finally:
            os._exit(_EXIT_CANNOT_FORK)
    return pid


def become_agent(run: Callable[[], int], *, origin: Origin, environ: Mapping[str, str], cwd: str, log: str) -> NoReturn:
    """Make this forked process a launch's agent: run ``run`` and end with the exit code that it returns.

    Args:
        run: What the agent does.
        origin: The parent's state at its start.
        environ: The launch's environment.
        cwd: Working directory.
        log: File for everything that is printed.
    """
    os.setsid()
    origin.restore()
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
    """A forked child with the part of ``subprocess.Popen`` that torchrun uses."""

    def __init__(self, run: Callable[[], object]) -> None:
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
def forked_ranks(origin: Origin) -> Iterator[None]:
    """Within this context, torchrun in this process forks its ranks, unless it has initialised CUDA itself."""
    from torch.distributed.elastic.multiprocessing import api
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    class Handler(SubprocessHandler):  # type: ignore[misc,unused-ignore]
        def _popen(self, args: Sequence[str], env: Mapping[str, str]) -> Any:
            if driver_is_initialised():  # a fork could not use CUDA; the rank says that it was started
                return super()._popen(tuple(args), dict(env))
            return _ForkedProcess(lambda: _become_rank(args, env, origin))

    names: Any = api
    original = names.get_subprocess_handler

    def get_handler(**options: Any) -> Any:
        return Handler(**options)

    names.get_subprocess_handler = get_handler
    try:
        yield
    finally:
        names.get_subprocess_handler = original


def _become_rank(command: Sequence[str], environ: Mapping[str, str], origin: Origin) -> NoReturn:
    """Make this forked process what ``command`` would have started, ``python -u -m optuna_dsat.runtime ...``."""
    from optuna_dsat.runtime.__main__ import run

    os.setsid()
    origin.restore()
    _replace_environment(environ)
    origin.repeat_changes()
    argv = list(command[command.index(_RUNTIME) + 1 :])
    sys.argv = [_RUNTIME, *argv]
    sys.orig_argv = list(command)
    safe_path = bool(environ.get("PYTHONSAFEPATH"))
    if not safe_path:
        sys.path.insert(0, str(Path.cwd()))
    _forget_random_state()
    show_cuda()
    _forget_devices()
    run(argv, safe_path=safe_path, forked=True)


def _forget_random_state() -> None:
    """Seed NumPy and torch anew, as their imports would have; ``random`` does so by itself.

    torch starts with a seed of its own on the CPU alone; on a GPU it is fixed.
    """
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.random.seed(None)
    if torch is not None:
        torch.default_generator.seed()


def _forget_devices() -> None:
    """Have torch count the GPUs anew, for the parent may have seen more than this launch may use, and NVML begin anew.

    DeepSpeed's CUDA accelerator initialises NVML at its import; what NVML makes of a fork is not documented.
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
