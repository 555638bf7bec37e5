"""Imports modules in the fork server, and detects modules that must not be imported before a fork.

The ranks import a module themselves if its import

- reads a variable that differs between ranks or launches, or that the script changes before the import: every rank
  would inherit the value that was read;
- starts threads: a fork does not copy them, and their locks stay locked. OpenBLAS is an exception: it ends its threads
  before a fork and restarts them afterwards;
- initialises CUDA, which does not survive a fork;
- imports a module for which any of these is true.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NoReturn

from optuna_dsat.runtime.adapt.journal import guard_builds
from optuna_dsat.runtime.agent.cuda import driver_is_initialised, restore_cuda, use_named_gpu_count
from optuna_dsat.runtime.events import ModulesImported
from optuna_dsat.runtime.imports import ImportWatch, as_text

BASE_MODULES = (
    "numpy",
    "torch",
    "torch.distributed.run",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "torch._dynamo",
    "deepspeed",
    "deepspeed.runtime.zero.muon.original_muon",
)
"""Modules that every launch needs. NumPy is first, so that the threads of its OpenBLAS can be counted."""


@dataclass(frozen=True)
class Preload:
    """Modules to import before ranks are forked."""

    modules: tuple[str, ...] = BASE_MODULES
    """In import order. A module that cannot be imported is skipped: the rank that needs it reports the error."""
    operators: tuple[str, ...] = ()
    """Names of compiled operators of DeepSpeed (``deepspeed_shm_comm``)."""
    left_out: tuple[str, ...] = ()
    """Excluded packages: neither they nor modules that import them are imported."""
    environment: tuple[str, ...] = ()
    """Environment variables that the script changes, which no import may read beforehand."""

    @classmethod
    def learned(cls, imported: ModulesImported) -> Preload:
        """Return ``BASE_MODULES`` and the modules that a profile launch imported."""
        return cls(
            modules=(*BASE_MODULES, *imported.modules),
            operators=tuple(imported.operators),
            environment=tuple(imported.environment),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the fields, for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Sequence[str]]) -> Preload:
        """Build from the output of ``to_json``."""
        return cls(**{name: tuple(names) for name, names in record.items()})


_OWN = "optuna_dsat"

_READ_BY_NATIVE_CODE = ("GOMP_", "KMP_", "MKL_", "OMP_", "OPENBLAS_", "PYTORCH_ALLOC", "PYTORCH_CUDA_ALLOC")
"""Prefixes of variables that libraries of torch and NumPy read when loaded, unseen by an import hook."""

_STANDARD = frozenset(sys.builtin_module_names) | {path.stem for path in Path(os.__file__).parent.iterdir()}
"""Packages of the standard library, which Python 3.9 does not list."""

_THREAD_END_S = 0.25
"""Longest time for a joined thread to leave the kernel's list."""


@dataclass
class PreloadResult:
    """Result of a preload."""

    refused: dict[str, str] = field(default_factory=dict)
    """Package -> why ranks must not inherit it. If not empty, this process must not fork."""
    read: set[str] = field(default_factory=set)
    """Environment variables that the imports read."""


def load(preload: Preload, *, watched: frozenset[str]) -> PreloadResult:
    """Import modules into this process and report which of them prevent forks.

    ``watched`` are environment variables that differ between launches, which no import may read.
    """
    result = PreloadResult()
    ImportWatch({"torch.utils.file_baton": guard_builds}).install()  # imports may build, and wait for builds
    threads = _Threads()
    initialised = False
    if native := sorted(name for name in preload.environment if name.startswith(_READ_BY_NATIVE_CODE)):
        result.refused["torch"] = f"the script changes {native[0]}, which libraries of torch read as they are loaded"
    watched |= frozenset(preload.environment)
    with _reads_of(watched, result.read) as reads, _without_collections(), _refusing(preload.left_out) as missed:
        for name in preload.modules:
            package = name.partition(".")[0]
            if package in preload.left_out or package in result.refused or name in sys.modules:
                continue
            if (torch := sys.modules.get("torch")) is not None:
                use_named_gpu_count(torch)
            with contextlib.suppress(Exception):  # the rank that needs the module will report the same error
                importlib.import_module(name)
            if missed:
                result.refused[package] = f"it imports {missed[0]}, which every rank imports for itself"
                missed.clear()
            for reader, variable in reads:
                when = "the script changes" if variable in preload.environment else "differs between launches"
                why = f"its import reads {variable}, which {when}"
                result.refused |= {reader: why, package: why}
            reads.clear()
            if not initialised and (initialised := driver_is_initialised()):
                result.refused[package] = "its import initialises CUDA, which no fork survives"
            if threads.started(name):
                result.refused[package] = "its import starts threads, which a fork does not copy"
    restore_cuda()
    _load_operators(preload.operators)
    gc.collect()
    gc.freeze()  # a collection in a child would write to shared pages, and so copy them
    return result


class _Refusal(MetaPathFinder, Loader):
    """Import hook that finds excluded packages, refuses to load them and records the attempts."""

    def __init__(self, packages: Sequence[str], missed: list[str]) -> None:
        self._packages = frozenset(packages)
        self._missed = missed

    def find_spec(self, fullname: str, _path: Any, _target: ModuleType | None = None) -> ModuleSpec | None:
        # Found, so that code that only checks whether the package is installed learns that it is.
        return ModuleSpec(fullname, self) if fullname.partition(".")[0] in self._packages else None

    def create_module(self, spec: ModuleSpec) -> NoReturn:
        self._missed.append(spec.name.partition(".")[0])
        raise ModuleNotFoundError(f"{spec.name} is left to the ranks", name=spec.name)

    def exec_module(self, module: ModuleType) -> None:
        raise NotImplementedError(module.__name__)  # never called, since no module is created


@contextlib.contextmanager
def _refusing(packages: Sequence[str]) -> Iterator[list[str]]:
    """Refuse imports of these packages within the context; yield the list of attempted packages."""
    missed: list[str] = []
    finder = _Refusal(packages, missed)
    sys.meta_path.insert(0, finder)
    try:
        yield missed
    finally:
        sys.meta_path.remove(finder)


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Disable garbage collection: it takes a third of the time of heavy imports, which produce little garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _reads_of(watched: frozenset[str], names: set[str]) -> Iterator[list[tuple[str, str]]]:
    """Yield the list of reads of watched variables, (package, variable); add every variable read to ``names``."""
    reads: list[tuple[str, str]] = []
    environ_class: Any = type(os.environ)
    original = environ_class.__getitem__

    def __getitem__(environ: Any, name: Any) -> Any:  # noqa: N807 - replaces a special method
        text = as_text(name)  # os.environb, and every start of a program, reads bytes
        if isinstance(text, str):
            names.add(text)
            if text in watched:
                reads.append((_reader(sys._getframe(1)), text))
        return original(environ, name)

    environ_class.__getitem__ = __getitem__
    try:
        yield reads
    finally:
        environ_class.__getitem__ = original


def _reader(frame: FrameType | None) -> str:
    """Return the first package outside the standard library on the call stack, or an empty string."""
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _STANDARD and package not in ("", "__main__", "importlib", _OWN):
            return package
        frame = frame.f_back
    return ""


class _Threads:
    """Counts threads started by imports; each loaded copy of OpenBLAS may start as many as NumPy's copy."""

    def __init__(self) -> None:
        self._count = _thread_count()
        self._copies = _openblas_copies()
        self._each = 0

    def started(self, imported: str) -> bool:
        """Return whether the last import, of module ``imported``, started threads that a fork would lose."""
        before, known = self._count, self._copies
        self._copies = _openblas_copies()
        if imported == "numpy":
            self._each = _thread_count() - before
        allowed = before + self._each * (self._copies - known)
        deadline = time.monotonic() + _THREAD_END_S
        while _thread_count() > allowed and time.monotonic() < deadline:
            time.sleep(0.005)
        self._count = _thread_count()
        return self._count > allowed


def _thread_count() -> int:
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def _openblas_copies() -> int:
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    paths = {line.split(maxsplit=5)[-1] for line in lines if "openblas" in line.lower()}
    return len(paths)


def _load_operators(names: Sequence[str]) -> None:
    """Load operators as DeepSpeed does, compiling if necessary; not on a GPU, where that may query CUDA."""
    if not names or "deepspeed" not in sys.modules:
        return
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    if get_accelerator().device_name() != "cpu":
        return
    for name in names:
        if name in ALL_OPS:
            with contextlib.suppress(Exception):  # the rank that needs it will report the same error
                ALL_OPS[name].load(verbose=False)
