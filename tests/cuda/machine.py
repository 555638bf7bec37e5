"""The machine that tests play: eight GPUs of the stand-in for CUDA, and what was called on them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

GPU_COUNT = 8

ROOT = Path(__file__).parents[2]
"""Of the package that is tested, whichever an environment from elsewhere has installed."""

_UNSET = ("CUDA_DEVICE_ORDER", "DS_ACCELERATOR", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables of whoever runs the tests that would change what is tested."""

_ASK_NVML = """
import json, pynvml
pynvml.nvmlInit()
found = []
for number in range(pynvml.nvmlDeviceGetCount()):
    gpu = pynvml.nvmlDeviceGetHandleByIndex(number)
    processes = {process.pid: process.usedGpuMemory for process in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)}
    found.append([pynvml.nvmlDeviceGetMemoryInfo(gpu).used, processes])
print(json.dumps(found))
"""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU as the stand-in plays it; ``standin/machine.c`` describes the line that it becomes."""

    number: int
    memory_mib: int = 81559
    speed: int = 1
    name: str = "NVIDIA H100 80GB HBM3"

    @property
    def uuid(self) -> str:
        return f"GPU-{self.number:08x}-5747-4d3e-8f1c-9a2b3c4d5e6f"

    @property
    def line(self) -> str:
        return f"gpu {self.number} {self.uuid} {self.memory_mib} {self.speed} {self.name}"


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call that the stand-in has logged."""

    pid: int
    parent: int
    function: str
    uuid: str
    """Of the GPU it was about, ``-`` for none."""
    number: int
    """Bytes of an allocation, ordinal of a device, rank of a communicator."""
    code: int


@dataclass(frozen=True, kw_only=True)
class GpuUse:
    """What NVML says of a GPU."""

    used_bytes: int
    processes: dict[int, int]
    """Process number -> bytes."""


class Machine:
    """A description of GPUs that programs run on, changeable while they run.

    Args:
        folder: Where description, ledger and log lie.
        libraries: What ``build.py`` has built.
        python: Interpreter of the environment with the CUDA build of torch.
    """

    def __init__(self, folder: Path, libraries: Path, python: Path) -> None:
        self.python = python
        self.gpus = tuple(Gpu(number=number) for number in range(GPU_COUNT))
        self.started: list[subprocess.Popen[str]] = []
        """Programs that a test has started here."""
        self._folder = folder
        self._libraries = libraries
        self._lines: tuple[str, ...] = ()
        for name in ("ledger", "tmp"):
            (folder / name).mkdir(parents=True)
        self._write()

    def change_gpus(self, **changes: Any) -> None:
        """Give every GPU other properties."""
        self.gpus = tuple(replace(gpu, **changes) for gpu in self.gpus)
        self._write()

    def change_gpu(self, number: int, **changes: Any) -> None:
        self.gpus = tuple(replace(gpu, **changes) if gpu.number == number else gpu for gpu in self.gpus)
        self._write()

    def say(self, *lines: str) -> None:
        """Describe more than the GPUs, in place of what was said before: see ``standin/machine.c``."""
        self._lines = lines
        self._write()

    def end(self) -> None:
        """Kill what still runs of the programs that were started."""
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.communicate()

    def _write(self) -> None:
        unfinished = self._folder / "machine.new"
        unfinished.write_text("\n".join((*(gpu.line for gpu in self.gpus), *self._lines, "")))
        unfinished.replace(self._folder / "machine")

    def environment(self, *, visible: str | None = None, preload: bool = True) -> dict[str, str]:
        """Return the environment of a program on this machine; ``visible`` becomes ``CUDA_VISIBLE_DEVICES``."""
        left = {name: value for name, value in os.environ.items() if name not in (*_UNSET, "CUDA_VISIBLE_DEVICES")}
        standin = {
            "LD_LIBRARY_PATH": str(self._libraries),
            "STANDIN_MACHINE": str(self._folder / "machine"),
            "STANDIN_LEDGER": str(self._folder / "ledger"),
            "STANDIN_LOG": str(self._folder / "log"),
        }
        more = {
            "OMP_NUM_THREADS": "1",
            "PYTORCH_ALLOC_CONF": "expandable_segments:False",  # the driver here has no virtual memory management
            "PATH": f"{self.python.parent}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "TMPDIR": str(self._folder / "tmp"),  # the locks of GPUs lie there
        }
        if visible is not None:
            more["CUDA_VISIBLE_DEVICES"] = visible
        if preload:
            more["LD_PRELOAD"] = str(self._libraries / "libstandin.so")
        return {**left, **standin, **more}

    def run(self, program: str, *, visible: str | None = None, code: int = 0) -> str:
        """Run a program in Python on this machine and return its output."""
        done = subprocess.run(
            [str(self.python), "-c", program],
            env=self.environment(visible=visible),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == code, done.stderr
        return done.stdout

    def calls(self, *functions: str) -> list[Call]:
        """Return what was called so far, of these functions or of all."""
        log = self._folder / "log"
        result = [_call(line.split()) for line in log.read_text().splitlines()] if log.exists() else []
        return [call for call in result if not functions or call.function in functions]

    def use(self) -> list[GpuUse]:
        """Return what NVML says of each GPU now."""
        done = subprocess.run(
            [sys.executable, "-c", _ASK_NVML],
            env=self.environment(preload=False),
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return [
            GpuUse(used_bytes=used, processes={int(pid): size for pid, size in processes.items()})
            for used, processes in json.loads(done.stdout)
        ]

    def uuids(self, numbers: Sequence[int]) -> list[str]:
        return [self.gpus[number].uuid for number in numbers]


def _call(fields: Sequence[str]) -> Call:
    pid, parent, function, uuid, number, code = fields
    return Call(pid=int(pid), parent=int(parent), function=function, uuid=uuid, number=int(number), code=int(code))
