"""A machine with GPUs for a test: the real ``pynvml`` on a fake NVML library built from ``nvml.c``."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from optuna_dsat.launch.machine.devices import Devices, detect_devices
from optuna_dsat.launch.machine.nvml import Nvml
from optuna_dsat.launch.machine.slots import SlotPool

SOURCE = Path(__file__).with_name("nvml.c")
LIBRARY = "libnvidia-ml.so.1"
MIB = 2**20
NOT_SUPPORTED, GPU_IS_LOST, UNKNOWN = 3, 15, 999


def uuid(index: int) -> str:
    return f"GPU-{index:08x}-1111-2222-3333-444444444444"


@pytest.fixture(scope="session")
def nvml_libraries(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Folder of the fake library by driver: ``new``, or ``old`` without the versioned process-list functions."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler builds the stand-in for NVML")
    folders = {}
    for age, options in (("new", []), ("old", ["-DOLD_DRIVER"])):
        folders[age] = tmp_path_factory.mktemp(f"nvml-{age}")
        command = [compiler, "-shared", "-fPIC", "-O1", *options, "-o", str(folders[age] / LIBRARY), str(SOURCE)]
        subprocess.run(command, check=True)
    return folders


@functools.cache
def load_pynvml(folder: Path) -> ModuleType:
    """Return a separate ``pynvml`` module that loads its library from ``folder``."""
    result = importlib.util.find_spec("pynvml")
    assert result is not None
    assert result.origin is not None
    spec = importlib.util.spec_from_file_location(f"pynvml_of_{folder.name}", result.origin)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # it looks itself up there during execution
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    vars(module)["CDLL"] = lambda name: ctypes.CDLL(str(folder / name))
    return module


@dataclass
class Machine:
    """NVML's view of a machine; can change between two queries."""

    file: Path
    libraries: Mapping[str, Path]
    lines: list[str] = field(default_factory=list)

    def has(self, *lines: str) -> None:
        """Replace all facts by these, in the format of ``nvml.c``."""
        self.lines = list(lines)
        self._write()

    def gets(self, *lines: str) -> None:
        """Add facts."""
        self.lines += lines
        self._write()

    def loses(self, line: str) -> None:
        """Remove a fact."""
        self.lines.remove(line)
        self._write()

    def _write(self) -> None:
        self.file.write_text("".join(f"{line}\n" for line in self.lines))

    def gpus(self, count: int, *, total: int = 81559, used: int = 4, name: str = "NVIDIA H100 80GB HBM3") -> None:
        """Replace all facts by ``count`` GPUs."""
        self.has(*(f"gpu {uuid(index)} {total} {used} {name}" for index in range(count)))

    def pynvml(self, driver: str = "new") -> ModuleType:
        return load_pynvml(self.libraries[driver])

    def nvml(self, *, driver: str = "new") -> Nvml:
        return Nvml(self.pynvml(driver))

    def detect(self, visible: str | None = None, *, driver: str = "new") -> Devices:
        environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        return detect_devices(environ=environ, nvml=self.nvml(driver=driver))

    def pool(self, visible: str | None = None, *, driver: str = "new", **options: Any) -> SlotPool:
        """Return a pool of the GPUs whose clock advances so fast that each query of NVML is fresh."""
        clock = iter(range(0, 10**6, 10))
        return SlotPool(
            self.detect(visible, driver=driver),
            nvml=self.nvml(driver=driver),
            lock_dir=self.file.parent,
            clock=lambda: float(next(clock)),
            **options,
        )

    def run(self, code: str, *arguments: str, environ: Mapping[str, str] | None = None) -> str:
        """Run Python with the fake library on the loader's path; return its output."""
        own = {"LD_LIBRARY_PATH": str(self.libraries["new"]), "NVML_MACHINE": str(self.file)}
        env = {**os.environ, **own, **(environ or {})}
        done = subprocess.run([sys.executable, "-c", code, *arguments], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def machine(nvml_libraries: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path / "machine.txt", nvml_libraries)
    made.gpus(2)
    monkeypatch.setenv("NVML_MACHINE", str(made.file))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return made
