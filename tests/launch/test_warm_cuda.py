"""Warm launches use no CUDA before the fork, and detect if an import did: on the CPU, with a small driver library.

CUDA in the ranks themselves is tested in ``tests/cuda``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from optuna_dsat.launch.launch import FailedFork
from optuna_dsat.launch.launcher import TorchrunLauncher, local_launcher
from optuna_dsat.launch.machine.devices import Device, Devices
from optuna_dsat.launch.machine.nvml import GpuUse
from optuna_dsat.launch.protocol import LaunchReport, LaunchRequest, LaunchUpdate, ScriptCommand
from optuna_dsat.launch.warm.forking import Forking
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.agent.cuda import restore_cuda, use_named_gpu_count
from optuna_dsat.runtime.agent.preload import BASE_MODULES, Preload
from optuna_dsat.runtime.events import EngineReady, ModulesImported, RankStarted
from tests.harness.launches import DS_CONFIG, SCRIPTS, STUB, events, request, run

from .test_torchrun import BASE_ENV

CC = shutil.which("cc")
needs_compiler = pytest.mark.skipif(CC is None, reason="there is no C compiler")

DRIVER = """
static int initialised;
int cuInit(unsigned flags) { (void)flags; initialised = 1; return 0; }
int cuCtxGetCurrent(void **context) { *context = 0; return initialised ? 0 : 3; }
"""

SPY = """
import os, sys
from optuna_dsat.runtime.imports import ImportWatch

def note(what):
    with open(os.environ["CUDA_SPY"], "a") as file:
        file.write(f"{os.getpid()} {what}\\n")

def watch(cuda):
    for name in ("is_available", "device_count", "_lazy_init"):
        def spied(*args, _name=name, _original=getattr(cuda, name), **kwargs):
            note(_name)
            return _original(*args, **kwargs)
        setattr(cuda, name, spied)

if "CUDA_SPY" in os.environ:
    note(" ".join(["started", *sys.orig_argv]))
    ImportWatch({"torch.cuda": watch}).install()
"""
"""A ``sitecustomize`` that records every GPU query with the process that makes it."""

INITIALISES = "import ctypes\nctypes.CDLL('libcuda.so.1').cuInit(0)\n"

AGENT_INITIALISES = """
import ctypes
from torch.distributed import run
original = run.config_from_args
def config_from_args(arguments):
    ctypes.CDLL('libcuda.so.1').cuInit(0)
    return original(arguments)
run.config_from_args = config_from_args
"""

CHANGES_VARIABLES = """
import os
os.environ["ODD_HOME"] = "set by the script"
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
before = os.environ.copy()
os.environ.clear()
os.environ.update(before)
"""
"""Start of a script."""


MORE_IMPORTERS = tuple(f"importer_{number}" for number in range(8))
"""More than the allowed restarts of the parent."""


class IdleGpus:
    """NVML with unused GPUs."""

    def use(self, _gpu: str) -> GpuUse:
        return GpuUse(used_bytes=0, processes={})

    def throttle_reasons(self, _gpu: str) -> tuple[str, ...]:
        return ()

    def energy_j(self, _gpu: str) -> float | None:
        return None


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a ``libcuda.so.1`` that knows whether it is initialised, and opens no device."""
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    assert CC is not None
    subprocess.run([CC, "-shared", "-fPIC", "-o", str(folder / "libcuda.so.1"), str(folder / "driver.c")], check=True)
    return folder


def were_forked(updates: list[LaunchUpdate]) -> list[bool]:
    return [event.forked for event in events(updates, RankStarted)]


class TestADriver:
    @needs_compiler
    @pytest.mark.parametrize(
        ("before", "initialised"),
        [
            ("", False),
            ("ctypes.CDLL('libcuda.so.1')", False),
            ("ctypes.CDLL('libcuda.so.1').cuInit(0)", True),
        ],
        ids=["not-loaded", "loaded", "initialised"],
    )
    def test_says_itself_whether_it_is_initialised(self, driver: Path, before: str, initialised: bool) -> None:
        code = (
            f"import ctypes, sys\n{before}\n"
            "from optuna_dsat.runtime.agent.cuda import driver_is_initialised\n"
            "print(driver_is_initialised())\n"
            "loaded = 'libcuda' in open('/proc/self/maps').read()\n"
            f"assert loaded == {bool(before)}, 'asking does not load it'\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "LD_LIBRARY_PATH": str(driver)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout.strip() == str(initialised), done.stderr

    @needs_compiler
    def test_that_an_import_initialises_is_left_to_the_ranks(self, driver: Path, tmp_path: Path) -> None:
        (tmp_path / "initialises.py").write_text(INITIALISES)
        (tmp_path / "good_package.py").write_text("")
        warm = Forking(tmp_path / "warm.log", enabled=True, on_notice=print)
        try:
            warm.prepare(Preload(modules=("initialises", "good_package")))
            warm._ready_server(
                {**BASE_ENV, "PYTHONPATH": str(tmp_path), "LD_LIBRARY_PATH": str(driver)}, python=sys.executable
            )
            assert warm.preload.left_out == ("initialises",)
        finally:
            warm.close()


@pytest.mark.parametrize(("visible", "built", "count"), [("2,3", True, 2), ("", True, 0), ("2,3", False, 0)])
def test_imports_before_a_fork_find_the_gpus_that_are_named(
    visible: str, built: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = SimpleNamespace(is_available=lambda: None, device_count=lambda: None)
    torch = SimpleNamespace(
        cuda=cuda, backends=SimpleNamespace(cuda=SimpleNamespace(is_built=lambda: built)), __version__="0"
    )
    before = dict(vars(cuda))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setitem(sys.modules, "torch", torch)
    use_named_gpu_count(torch)
    assert (cuda.is_available(), cuda.device_count()) == (count > 0, count)
    restore_cuda()
    assert vars(cuda) == before


class TestVariablesThatTheScriptChanges:
    @pytest.mark.parametrize(
        ("environment", "left_out"),
        [
            (("ODD_HOME",), ("importer", *MORE_IMPORTERS, "importer_of_importer", "odd_package")),
            (("OTHER",), ()),
        ],
    )
    def test_what_reads_them_at_its_import_is_left_to_the_ranks(
        self, tmp_path: Path, environment: tuple[str, ...], left_out: tuple[str, ...]
    ) -> None:
        (tmp_path / "odd_package.py").write_text("import os\nHOME = os.environ.get('ODD_HOME', '/default')")
        for name in ("importer", *MORE_IMPORTERS):
            (tmp_path / f"{name}.py").write_text("import odd_package")
        (tmp_path / "importer_of_importer.py").write_text("try:\n    import importer\nexcept ImportError:\n    pass")
        asks = "import importlib.util\nassert importlib.util.find_spec('odd_package') is not None"
        (tmp_path / "asks_whether_it_is_there.py").write_text(asks)
        names = ("odd_package", "importer_of_importer", "importer", *MORE_IMPORTERS, "asks_whether_it_is_there")
        warm = Forking(tmp_path / "warm.log", enabled=True, on_notice=print)
        try:
            # The shell's value must be ignored like a missing value: the script's value counts.
            warm.begin(
                {**BASE_ENV, "PYTHONPATH": str(tmp_path), "ODD_HOME": "/shell", "OTHER": "1"}, python=sys.executable
            )
            warm.prepare(Preload(modules=names, environment=environment))
            warm.begin(
                {**BASE_ENV, "PYTHONPATH": str(tmp_path), "ODD_HOME": "/shell", "OTHER": "1"}, python=sys.executable
            )
            warm._ready_server(warm._environ, python=sys.executable)
            assert warm.preload.left_out == left_out
        finally:
            warm.close()


# Two "GPUs" whose ranks compute on the CPU; the number of threads is not set.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("gpus")
    (made / "user_config.json").write_text(json.dumps({**DS_CONFIG, "train_micro_batch_size_per_gpu": 2}))
    (made / "sitecustomize.py").write_text(SPY)
    (made / "agent_initialises.py").write_text(AGENT_INITIALISES)
    tiny = (SCRIPTS / "tiny_launch.py").read_text().replace("from __future__ import annotations", "")
    (made / "train.py").write_text(CHANGES_VARIABLES + tiny)
    return made


@pytest.fixture(scope="module")
def notices() -> list[str]:
    return []


def make(folder: Path, notices: list[str], *, warm: bool, **variables: str) -> TorchrunLauncher:
    kept = {name: value for name, value in BASE_ENV.items() if name != "OMP_NUM_THREADS"}
    gpus = tuple(
        Device(index=i, visible_id=str(i), uuid=f"GPU-{os.getpid()}-{i}", name="GPU", memory_bytes=2**33)
        for i in range(2)
    )
    nvml: Any = IdleGpus()
    return local_launcher(
        folder / ("warm" if warm else "plain"),
        devices=Devices(kind="cuda", devices=gpus, host_memory_bytes=2**33),
        nvml=nvml,
        base_env={**kept, "PYTHONPATH": str(folder), "DS_ACCELERATOR": "cpu", **variables},
        warm=warm,
        on_notice=notices.append,
    )


def asked(folder: Path, launch_id: str, **changes: Any) -> LaunchRequest:
    config = str(folder / "user_config.json")
    command = ScriptCommand(script=str(folder / "train.py"), args=(config,), cwd=str(folder), config_path=config)
    return request(folder, launch_id=launch_id, command=command, **changes)


@pytest.fixture(scope="module")
def profiled(folder: Path, notices: list[str]) -> Iterator[tuple[TorchrunLauncher, LaunchReport, list[LaunchUpdate]]]:
    """Return a launcher that has run a profile launch, and the result of that launch."""
    (folder / "warm").mkdir()
    (folder / "asks_for_gpus.py").write_text("import torch\nGPUS = torch.cuda.device_count()\n")
    launcher = make(folder, notices, warm=True, CUDA_SPY=str(folder / "spy.log"))
    launcher.prepare(Preload(modules=(*BASE_MODULES, "asks_for_gpus")))
    report, updates = run(launcher, asked(folder, "profile", purpose="profile", start_profile_step=1))
    yield launcher, report, updates
    launcher.close()


@pytest.mark.torchrun
def test_a_warm_launch_asks_cuda_nothing_before_the_fork(
    profiled: tuple[TorchrunLauncher, LaunchReport, list[LaunchUpdate]], folder: Path, notices: list[str]
) -> None:
    _, report, updates = profiled
    assert report.outcome is Outcome.MEASURED, report
    assert (were_forked(updates), notices) == ([True, True], [])
    lines = [line.split(maxsplit=2) for line in (folder / "spy.log").read_text().splitlines()]
    (parent,) = {pid for pid, *what in lines if "optuna_dsat.runtime.agent.fork_server" in what[-1]}
    agent, *ranks = map(str, report.pids)
    assert [line for line in lines if line[0] in (parent, agent) and line[1] != "started"] == []
    assert {pid for pid, *_ in lines} <= {parent, agent, *ranks}
    (imported,) = events(updates, ModulesImported)
    assert imported.environment == ["ODD_HOME"]


@pytest.mark.torchrun
def test_a_forked_rank_has_its_share_of_threads_as_a_plain_one(
    profiled: tuple[TorchrunLauncher, LaunchReport, list[LaunchUpdate]],
) -> None:
    _, _, forked = profiled
    assert were_forked(forked) == [True, True]
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert [event.host_threads for event in events(forked, EngineReady)] == [share, share]


def test_launches_that_fail_alike_side_by_side_lead_back_once(folder: Path, tmp_path: Path) -> None:
    notices: list[str] = []
    launcher = make(tmp_path, notices, warm=True, PYTHONPATH=str(folder))
    proven, spoilt = Preload(), Preload(modules=(*BASE_MODULES, "spoiler"))
    launcher._forking.prove(proven)
    launcher.prepare(spoilt)
    for rank in range(2):
        launcher._forking.retreat(FailedFork(preloaded=spoilt, message=f"rank {rank}: no fork for me"))
    assert (launcher._forking.enabled, launcher._forking.preload) == (True, proven)
    assert [notice.partition(": ")[2].partition(",")[0] for notice in notices] == [
        "each imports that for itself from here on"
    ]
    launcher._forking.retreat(FailedFork(preloaded=proven, message="rank 0: nor of that"))
    assert not launcher._forking.enabled
    launcher.close()


@pytest.mark.torchrun
@needs_compiler
def test_ranks_are_started_anew_where_the_agent_has_initialised_cuda(
    folder: Path, driver: Path, tmp_path: Path
) -> None:
    text: list[str] = []
    launcher = make(tmp_path, text, warm=True, PYTHONPATH=str(folder), LD_LIBRARY_PATH=str(driver))
    (tmp_path / "warm").mkdir()
    launcher.prepare(Preload(modules=("agent_initialises",)))
    try:
        report, updates = run(launcher, request(folder, launch_id="meddled", script=STUB))
    finally:
        launcher.close()
    assert report.outcome is Outcome.MEASURED, report
    assert were_forked(updates) == [False, False]
    assert ["initialises CUDA in torchrun's agent" in notice for notice in text] == [True]
