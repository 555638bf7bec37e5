"""A test leaves nothing behind: no environment variable, thread, child process, or file in the working directory."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from optuna_dsat.signals import ENDING

gc.disable()  # until all tests are collected, which took twice as long
pytest_plugins = ["tests.harness.databases", "tests.harness.forks", "tests.harness.ranks"]

T = TypeVar("T")

for number in ENDING:  # a shell starts what is in its background with Ctrl-C ignored, and nohup with SIGHUP
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each worker compiles the tests for 10 s, and each process us
sys.dont_write_bytecode = False
os.environ.setdefault("OMP_NUM_THREADS", "1")  # NumPy's threads take a search half as much again, and nothing is faster

STATE_HOME = tempfile.mkdtemp(prefix="optuna-dsat-tests-")
"""Where tests, and the processes that they start, note which studies they ran."""
os.environ["XDG_STATE_HOME"] = STATE_HOME
TEMPORARY = tempfile.mkdtemp(prefix="dsat-") if "PYTEST_XDIST_WORKER" in os.environ else None
"""Folder for temporary files of a worker of xdist: what a killed tuner of one notes there is no business of another's.

Its name is short, as it is part of those of sockets.
"""
if TEMPORARY is not None:
    os.environ["TMPDIR"] = tempfile.tempdir = TEMPORARY


@atexit.register
def _remove_own_folders(owner: int = os.getpid()) -> None:
    if os.getpid() == owner:  # not in a fork
        for folder in filter(None, (STATE_HOME, TEMPORARY)):
            shutil.rmtree(folder, ignore_errors=True)


ROOT = Path(__file__).parents[1]
THIRD_PARTY_VARIABLES = ("PYTEST_", "PYTORCH_NVML_BASED_CUDA_CHECK", "KMP_", "TORCHINDUCTOR_", "TRITON_")
"""Prefixes of variables that pytest, or a library on import, sets for the whole process."""
TOOL_FOLDERS = frozenset(
    {"__pycache__", ".cache", ".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".coverage"}
)
LAUNCHES = "launches"
"""The group of tests, run by one worker of xdist one after the other, that start real launches or look at those of the
whole machine: what belongs to a tuner that is gone, how busy a process is.
"""
SEARCHES = "searches"
"""The group, likewise, of those that run whole commands on real launches, the longest row of all."""
CLUSTERS = "clusters"
"""The group, likewise, of those that launch on nodes of a SLURM or Ray, and mostly wait for that."""
SEARCH_FOLDERS = ("tests/system/", "tests/examples/", "tests/integrations/", "tests/benchmarks/")
WITH_LAUNCHES = frozenset({"tests/launch/test_activity.py", "tests/launch/test_processes.py"})
"""Files that belong to it beside what is marked ``torchrun``."""
PATIENCE_S = 20.0
"""How long a thread or process that is on its way out may take, on the slowest machine."""


@cache
def group_of(file: str) -> str:
    """Return the group that a file of tests is in, for one process of xdist to run: one of these, or the file alone."""
    path = ROOT / file
    if file in WITH_LAUNCHES or (path.is_file() and "pytest.mark.torchrun" in path.read_text(encoding="utf-8")):
        searches = SEARCHES if file.startswith(SEARCH_FOLDERS) else LAUNCHES
        return CLUSTERS if file.startswith("tests/cluster/") else searches
    return file


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Share the tests out by these groups, in their order; xdist's own ``loadgroup`` groups nothing under pytest 9."""
    config.option.loadscopereorder = False
    scheduling: Any = import_module("xdist.scheduler").LoadScopeScheduling(config, log)
    scheduling._split_scope = lambda name: group_of(name.partition("::")[0])
    return scheduling


def pytest_collection_finish() -> None:
    """Look for garbage from here on, not among the modules and tests that are there to stay."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let a worker of xdist see the long rows first, and of files those with the most tests."""
    if not hasattr(config, "workerinput"):
        return
    groups = {item: group_of(item.nodeid.partition("::")[0]) for item in items}
    sizes = Counter(groups.values())
    places = {SEARCHES: 0, LAUNCHES: 1, CLUSTERS: 2}
    items.sort(key=lambda item: (places.get(groups[item], 3), -sizes[groups[item]]))


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(THIRD_PARTY_VARIABLES)}


def buffers() -> set[Path]:
    """Return the files in shared memory that DeepSpeed leaves behind by every training on the CPU, 66 MiB a rank."""
    return {*Path("/dev/shm").glob("deepspeed_allreduce_buffer_*")}


def _is_in_use(file: Path) -> bool:
    """Whether a living process, such as one of another worker's launches, has a file open or in its memory.

    DeepSpeed writes 66 MiB before it maps the file, and keeps it open. Without it then, its ranks wait without end.
    """
    for opened in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if str(opened.readlink()) == str(file):
                return True
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            if str(file).encode() in maps.read_bytes():
                return True
    return False


@pytest.fixture(autouse=True)
def trainings_leave_no_buffers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Remove what printed commands, and other trainings that no tuner started, leave in shared memory."""
    before = buffers() if request.node.get_closest_marker("torchrun") else None
    yield
    for file in set() if before is None else buffers() - before:
        if not _is_in_use(file):
            file.unlink(missing_ok=True)


def non_daemon_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.daemon}


def child_processes() -> set[psutil.Process]:
    """Return the living children of this process; what servers of wider fixtures start below them is theirs."""
    result, threads = set(), Path("/proc/self/task")  # psutil would read every process of the machine
    for number in " ".join(file.read_text() for file in threads.glob("*/children")).split():
        with suppress(psutil.NoSuchProcess):
            child = psutil.Process(int(number))
            result |= {child} if child.status() != psutil.STATUS_ZOMBIE else set()
    return result


def files() -> set[str]:
    return {f"{folder}/{entry.name}" for folder in {ROOT, Path.cwd()} for entry in os.scandir(folder)} - {
        f"{folder}/{name}" for folder in {ROOT, Path.cwd()} for name in TOOL_FOLDERS
    }


def _settle(current: Callable[[], set[T]], before: set[T]) -> set[T]:
    """Return what is there now and was not before, once it has had time to go."""
    deadline = time.monotonic() + PATIENCE_S
    while (left := current() - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    variables, folder = environment(), Path.cwd()
    threads, children, entries = non_daemon_threads(), child_processes(), files()
    yield
    now = environment()
    changed = sorted(name for name in variables.keys() | now.keys() if variables.get(name) != now.get(name))
    left = {
        "environment variables": changed,
        "working directory": [] if Path.cwd() == folder else [str(Path.cwd())],
        "threads": sorted(thread.name for thread in _settle(non_daemon_threads, threads)),
        "child processes": sorted(str(child) for child in _settle(child_processes, children)),
        "files": sorted(files() - entries),
    }
    result = {kind: what for kind, what in left.items() if what}
    if result:
        pytest.fail(f"The test left behind: {result}", pytrace=False)
