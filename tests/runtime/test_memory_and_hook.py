"""Memory peaks and limits, and the hook's preparations, without a device or DeepSpeed."""

from __future__ import annotations

import builtins
import gc
import importlib
import logging
import mmap
import os
import resource
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from optuna_dsat.runtime.adapt.side_effects import tolerate_skipped_checkpoints
from optuna_dsat.runtime.events import RankFailed, RankFinished
from optuna_dsat.runtime.hook import DeepSpeedHook
from optuna_dsat.runtime.imports import ImportWatch
from optuna_dsat.runtime.measure.memory import (
    CpuMemory,
    CudaMemory,
    ProcessMemory,
    host_memory_bytes,
    limit_cuda_memory,
    memory_limits,
    process_limit_lifted,
    read_process_memory,
    support_uuid_visible_devices,
    unlink_shared_buffers,
    usable_cores,
    watch_caught_errors,
)
from optuna_dsat.runtime.measure.meter import RankState
from tests.harness.ranks import Starter

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def test_the_cpu_peak_is_the_larger_of_allocated_and_touched() -> None:
    states = iter(
        [
            ProcessMemory(data=100, resident=50, peak_resident=60),  # baseline
            ProcessMemory(data=400, resident=50, peak_resident=60),  # allocated, not touched
            ProcessMemory(data=150, resident=90, peak_resident=90),
            ProcessMemory(data=150, resident=90, peak_resident=550),  # touched and freed within a phase
        ]
    )
    memory = CpuMemory(lambda: next(states))
    memory.sample()
    assert memory.peaks().allocated == 300
    peaks = memory.peaks()
    assert (peaks.allocated, peaks.reserved, peaks.resident) == (500, 550, 550)


@linux
def test_process_memory_is_read_from_the_system() -> None:
    before = read_process_memory()
    # Mapped, as the heap might reuse freed memory.
    with mmap.mmap(-1, 64 * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        block.write(bytes(len(block)))
        after = read_process_memory()
        assert after.data - before.data >= len(block)
    assert after.peak_resident >= after.resident > before.resident
    assert host_memory_bytes() > after.resident


class CachingAllocator:
    """Counts bytes like torch's allocator: freed memory stays reserved; a reset peak starts at the current usage."""

    def __init__(self) -> None:
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0

    def allocate(self, size: int) -> None:
        self.allocated += size
        self.reserved = max(self.reserved, self.allocated)
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def free(self, size: int) -> None:
        self.allocated -= size

    def reset_peak_memory_stats(self) -> None:
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def max_memory_allocated(self) -> int:
        return self.peak_allocated

    def max_memory_reserved(self) -> int:
        return self.peak_reserved


def test_the_cuda_peak_counts_from_the_engine_on() -> None:
    device = CachingAllocator()
    memory = CudaMemory(device)
    device.allocate(1000)  # while the engine is built
    device.free(400)
    memory.engine_ready()
    device.allocate(100)
    device.free(100)
    memory.sample()
    assert (memory.peaks().allocated, memory.peaks().reserved) == (700, 1000)
    device.allocate(500)
    device.free(500)
    peaks = memory.peaks()
    assert (peaks.allocated, peaks.reserved) == (1100, 1100)
    assert peaks.resident == read_process_memory().peak_resident


class FakeTorch:
    """Stub of torch for the limit on CUDA memory, with two devices of 1000 bytes."""

    def __init__(self) -> None:
        self.queued: list[Any] = []
        self.limits: list[tuple[float, int]] = []
        self._C = SimpleNamespace(_cuda_getDeviceCount=None)
        self.cuda = SimpleNamespace(
            _lazy_call=self.queued.append,
            device_count=lambda: 2,
            current_device=lambda: 0,
            get_device_properties=lambda _device: SimpleNamespace(total_memory=1000),
            set_per_process_memory_fraction=lambda fraction, device: self.limits.append((fraction, device)),
        )


@pytest.mark.parametrize(
    ("budget", "local_rank", "limit"), [(250, 1, (0.25, 1)), (5000, 0, (1.0, 0)), (500, 3, (0.5, 0))]
)
def test_cuda_memory_is_limited_once_cuda_starts(budget: int, local_rank: int, limit: tuple[float, int]) -> None:
    torch = FakeTorch()
    limit_cuda_memory(torch, budget, local_rank)
    assert torch.limits == []  # does not initialize CUDA
    torch.queued[0]()
    assert torch.limits == [limit]


def test_a_torch_without_cuda_is_left_alone() -> None:
    torch = FakeTorch()
    del torch._C._cuda_getDeviceCount
    limit_cuda_memory(torch, 100, 0)
    assert torch.queued == []


@pytest.mark.parametrize(
    ("visible", "free"),
    [("0,1", 111), ("GPU-00000006-1111-2222-3333-444444444444", 222), ("MIG-aa", 222)],
    ids=["numbers", "uuid", "part-of-a-gpu"],
)
def test_free_memory_is_found_where_gpus_are_named_by_uuid(
    visible: str, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed's accelerator is queried; NVML and CUDA return different values."""
    module = importlib.import_module("deepspeed.accelerator.cuda_accelerator")
    memory = SimpleNamespace(free=111)
    nvml = SimpleNamespace(nvmlDeviceGetHandleByIndex=lambda _: 0, nvmlDeviceGetMemoryInfo=lambda _: memory)
    monkeypatch.setattr(module, "pynvml", nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    accelerator = object.__new__(module.CUDA_Accelerator)
    monkeypatch.setattr(sys.modules["torch"].cuda, "mem_get_info", lambda _device: (222, 333))
    support_uuid_visible_devices(accelerator)
    assert accelerator.available_memory(0) == free


def test_the_watch_calls_back_once_after_the_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "watched_module.py").write_text("value = 1\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    seen: list[Any] = []

    def change(module: ModuleType) -> None:
        seen.append(module.__dict__["value"])
        module.__dict__["value"] = 2

    ImportWatch({"watched_module": change, "json": seen.append}).install()
    assert seen == [sys.modules["json"]]
    namespace: dict[str, Any] = {}
    exec("from watched_module import value\nimport watched_module", namespace)
    assert (namespace["value"], seen[1:]) == (2, [1])
    assert namespace["watched_module"].__loader__.get_source("watched_module") == "value = 1\n"
    monkeypatch.delitem(sys.modules, "watched_module")
    exec("import watched_module", namespace)
    assert namespace["watched_module"].value == 1
    assert len(seen) == 2


class Asking(MetaPathFinder):
    """Finder that queries all other finders, as third-party tools do."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        self.asked.append(fullname)
        result = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        return next((spec for spec in result if spec is not None), None)


def test_the_watch_goes_with_a_finder_that_asks_all_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "watched_module.py").write_text("value = 1\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    other = Asking()
    monkeypatch.setattr(sys, "meta_path", [other, *sys.meta_path])
    monkeypatch.delitem(sys.modules, "watched_module", raising=False)
    seen: list[ModuleType] = []
    ImportWatch({"watched_module": seen.append}).install()
    exec("import watched_module", {})
    assert seen == [sys.modules["watched_module"]]
    assert other.asked == ["watched_module"]
    monkeypatch.delitem(sys.modules, "watched_module")


def test_a_module_that_puts_another_in_its_place_is_seen_as_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import sys, types\nsys.modules[__name__] = types.SimpleNamespace(value=1)\n"
    (tmp_path / "watched_module.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "watched_module", raising=False)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    seen: list[object] = []
    ImportWatch({"watched_module": seen.append}).install()
    exec("import watched_module", {})
    assert seen == [sys.modules["watched_module"]]
    monkeypatch.delitem(sys.modules, "watched_module")


CPU_STUB = """
class accelerator:
    class get_accelerator:
        def device_name(self): return "cpu"
class ops:
    __compatible_ops__ = {"deepspeed_shm_comm": True}
class zero:
    class Init:
        def __init__(self, config_dict_or_path=None, config=None): pass
class DeepSpeedEngine:
    def save_checkpoint(self, save_dir): pass
    def save_16bit_model(self, save_dir): pass
    def load_checkpoint(self, load_dir): pass
def initialize(config=None): pass
"""


@linux
def test_on_a_cpu_without_compiler_the_limit_holds_and_gloo_is_used(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = start.folder / "stubs" / "deepspeed"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(CPU_STUB, encoding="utf-8")
    script = start.folder / "script.py"
    script.write_text(
        "import sys\nsys.modules['torch._dynamo'] = None\nimport deepspeed\n"
        "print(deepspeed.ops.__compatible_ops__)\nblock = bytearray(400 << 20)\n",
        encoding="utf-8",
    )
    monkeypatch.setenv("CXX", "no-such-compiler")
    fits = start.alone(str(script), stubs=package.parent, device_memory_bytes=500 * 2**20)
    assert fits.exit_code == 0, fits.log("stderr")
    assert fits.log("stdout") == "{'deepspeed_shm_comm': False}\n"
    assert fits.of(RankFinished)[0].reason == "script_end"
    starved = start.alone(str(script), stubs=package.parent, device_memory_bytes=300 * 2**20)
    assert starved.exit_code == 1
    [failure] = starved.of(RankFailed)
    assert (failure.outcome, failure.error_type) == ("out_of_memory", "MemoryError")
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY  # this process is not limited


def test_the_process_limit_is_lifted_for_a_compiler_and_then_back() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    limited = (8 * 2**30, before[1])
    resource.setrlimit(resource.RLIMIT_DATA, limited)
    try:
        with process_limit_lifted():
            assert resource.getrlimit(resource.RLIMIT_DATA)[0] == before[1]
        assert resource.getrlimit(resource.RLIMIT_DATA) == limited
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def test_only_deepspeeds_buffers_are_unlinked(tmp_path: Path) -> None:
    ours = Path("/dev/shm") / f"deepspeed_test_{tmp_path.name}"
    ours.write_bytes(b"x")
    other = tmp_path / "deepspeed_other"
    other.write_bytes(b"x")
    maps = tmp_path / "maps"
    maps.write_text(f"7f00-7f01 rw-s 00000000 00:1a 5 {ours}\n7f02-7f03 rw-s 00000000 00:1a 6 {other}\n")
    unlink_shared_buffers(maps)
    assert not ours.exists()
    assert other.exists()


def test_out_of_memory_errors_are_counted_though_the_script_catches_them(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers = ((torch.cuda, "empty_cache"), (gc, "collect"), (builtins, "print"), (logging.Logger, "handle"))
    for owner, name in ((torch.OutOfMemoryError, "__init__"), *handlers):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    state = RankState(device="cuda")
    watch_caught_errors(torch, state.note_error)
    memory = "CUDA out of memory. Tried to allocate 2.00 GiB"
    for kind, text in ((torch.OutOfMemoryError, memory), (RuntimeError, memory), (RuntimeError, "shapes")):
        try:
            raise kind(text)
        except RuntimeError as error:
            shown = str(error)
            gc.collect()
            torch.cuda.empty_cache()
        assert shown == text
    torch.cuda.empty_cache()
    assert state.allocation_failures == 2
    for report in (print, logging.getLogger("script").warning):
        try:
            raise RuntimeError(memory)
        except RuntimeError:
            report("out of memory, the batch is skipped")
    assert state.allocation_failures == 4


MIB = 2**20


def group(folder: Path, *, limit: str, usage: int, cache: int, v2: bool = True) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if v2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for name, text in zip(names, (limit, str(usage)), strict=True):
        (folder / name).write_text(f"{text}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{'' if v2 else 'total_'}inactive_file {cache}\n")


def limits(folder: Path, membership: str) -> tuple[int, int | None]:
    """Return the host's memory by its groups, and the bytes left below the tightest limit; None without one."""
    (folder / "cgroup").write_text(membership)
    result = memory_limits(membership=folder / "cgroup", root=folder)
    total = host_memory_bytes(membership=folder / "cgroup", root=folder)
    return total, min((left for _, left in result), default=None)


def test_without_a_limit_it_is_what_the_machine_offers(tmp_path: Path) -> None:
    group(tmp_path / "a", limit="max", usage=5, cache=1)
    assert limits(tmp_path, "0::/a\n") == (os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), None)


def test_the_tightest_group_counts_and_read_files_are_free(tmp_path: Path) -> None:
    group(tmp_path / "a", limit=str(16 * MIB), usage=14 * MIB, cache=4 * MIB)
    group(tmp_path / "a" / "b", limit=str(8 * MIB), usage=MIB, cache=0)
    assert limits(tmp_path, "0::/a/b\n") == (8 * MIB, 6 * MIB)


@pytest.mark.parametrize("below", ["", "/b"])
def test_a_parent_s_limit_counts_for_the_groups_below_it(tmp_path: Path, below: str) -> None:
    group(tmp_path / "a", limit=str(4 * MIB), usage=MIB, cache=0)
    group(tmp_path / "a" / "b", limit="max", usage=MIB, cache=0)
    assert limits(tmp_path, f"0::/a{below}\n") == (4 * MIB, 3 * MIB)


def test_the_first_version_of_control_groups_is_read_too(tmp_path: Path) -> None:
    group(tmp_path / "memory" / "a", limit=str(8 * MIB), usage=9 * MIB, cache=2 * MIB, v2=False)
    assert limits(tmp_path, "5:cpu:/\n4:cpuset,memory:/a\n") == (8 * MIB, MIB)


def test_the_root_groups_of_both_versions_count_and_their_use_may_be_unknown(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{9 * MIB}\n")
    group(tmp_path / "memory", limit=str(7 * MIB), usage=MIB, cache=0, v2=False)
    assert limits(tmp_path, "") == (7 * MIB, 6 * MIB)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "max 100000"}, 9),
        ({"a/cpu.max": "250000 100000"}, 2),
        ({"a/b/cpu.max": "50000 100000"}, 1),
        ({"cpu/a/cpu.cfs_quota_us": "300000", "cpu/a/cpu.cfs_period_us": "100000"}, 3),
        ({"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, 9),
    ],
)
def test_cores_beyond_a_quota_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(9)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    (tmp_path / "cgroup").write_text("5:cpu,cpuacct:/a\n0::/a/b\n")
    assert usable_cores(membership=tmp_path / "cgroup", root=tmp_path) == cores


def test_a_checkpoint_that_was_not_written_is_converted_as_an_empty_one() -> None:
    def read(folder: str, tag: str | None = None) -> dict[str, int]:
        raise FileNotFoundError(f"Directory {folder}/{tag} doesn't exist")

    module = SimpleNamespace(get_fp32_state_dict_from_zero_checkpoint=read)
    skipped: list[str] = []
    tolerate_skipped_checkpoints(module, skipped=skipped)
    with pytest.raises(FileNotFoundError):
        module.get_fp32_state_dict_from_zero_checkpoint("exp", tag="init")
    skipped.append("save_checkpoint")
    assert module.get_fp32_state_dict_from_zero_checkpoint("exp", tag="init") == {}


def test_each_trial_skips_read_ahead_batches_after_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A continued launch counts its steps from 1 again; skipped steps are steps."""
    calls: list[str] = []
    sources = SimpleNamespace(skip_read_ahead=lambda: calls.append("skip"))
    writer = SimpleNamespace(write=calls.append)
    state, hook = RankState(), DeepSpeedHook.__new__(DeepSpeedHook)
    vars(hook).update(_rank=SimpleNamespace(rank=1), _state=state, _batch_sources=sources, _writer=writer)
    monkeypatch.setattr("optuna_dsat.runtime.hook.unlink_shared_buffers", lambda: None)
    write: Any = hook._write_step
    for _ in range(2):
        state.restart()
        state.skipped = 1
        write("step 1")
        state.steps = 1
        write("step 2")
    assert calls == ["step 1", "skip", "step 2"] * 2
