"""What the parent of warm launches imports, and how it finds out what must not be imported before a fork.

A module is left to the ranks themselves if its import

- reads a variable that differs from rank to rank or launch to launch, or that the script changes before the import:
  what it read would hold for every rank;
- starts threads: they are not in the child, and what they hold locked stays locked. OpenBLAS's are an exception: it
  ends them before a fork and starts them again after it;
- initialises CUDA, which does not survive a fork;
- imports a module of which one of these is true.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NoReturn

from optuna_dsat.launch.cuda_state import cuda_named, driver_is_initialised, show_cuda
from optuna_dsat.runtime.events import ModulesImported

__all__ = ["BASE_MODULES", "Loaded", "Preload", "load"]

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
"""Every launch needs these. NumPy goes first: the threads that its OpenBLAS starts are counted then."""

_OWN = "optuna_dsat"

_READ_BY_NATIVE_CODE = ("GOMP_", "KMP_", "MKL_", "OMP_", "OPENBLAS_", "PYTORCH_ALLOC", "PYTORCH_CUDA_ALLOC")
"""Beginnings of variables that libraries of torch and NumPy read as they are loaded, where no import hook sees it."""

_THREAD_END_S = 0.25
"""Time for a thread that was joined to leave the kernel's list, too."""


@dataclass(frozen=True, kw_only=True)
class Preload:
    """What to have imported before ranks are forked."""

    modules: tuple[str, ...] = BASE_MODULES
    """In the order of their import. One that cannot be imported is skipped: the rank that needs it says so."""
    operators: tuple[str, ...] = ()
    """Names of compiled operators of DeepSpeed (``deepspeed_shm_comm``)."""
    left_out: tuple[str, ...] = ()
    """Packages that are never imported, nor what imports them."""
    environment: tuple[str, ...] = ()
    """Variables that the script changes: no import may read them before it does."""

    @classmethod
    def learned(cls, imported: ModulesImported) -> Preload:
        """Return what a profile launch was seen to import, after what every launch needs."""
        return cls(
            modules=(*BASE_MODULES, *imported.modules),
            operators=tuple(imported.operators),
            environment=tuple(imported.environment),
        )

    def changed(self, *, added: Sequence[str], left_out: Sequence[str]) -> Preload:
        """Return the same with modules added and packages left out."""
        return replace(self, modules=(*self.modules, *added), left_out=(*self.left_out, *left_out))

    def to_json(self) -> dict[str, list[str]]:
        """Return what ``from_json`` reads back."""
        return {
            "modules": list(self.modules),
            "operators": list(self.operators),
            "left_out": list(self.left_out),
            "environment": list(self.environment),
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Sequence[str]]) -> Preload:
        """Build from what ``to_json`` returned."""
        return cls(
            modules=tuple(record["modules"]),
            operators=tuple(record["operators"]),
            left_out=tuple(record["left_out"]),
            environment=tuple(record.get("environment", ())),
        )


@dataclass(kw_only=True)
class Loaded:
    """What came of a preload."""

    modules: list[str] = field(default_factory=list)
    """Those that were imported by name; what they import themselves is not listed."""
    refused: dict[str, str] = field(default_factory=dict)
    """Package -> why no rank may inherit it. Not empty: this process must not fork."""
    read: set[str] = field(default_factory=set)
    """Environment variables that the imports have read."""


def load(preload: Preload, *, watched: frozenset[str]) -> Loaded:
    """Import ``preload`` into this process, watching what the imports do.

    Args:
        preload: What to import.
        watched: Environment variables that differ between launches: no import may read them.
    """
    loaded = Loaded()
    threads = _Threads()
    initialised = False
    if native := sorted(name for name in preload.environment if name.startswith(_READ_BY_NATIVE_CODE)):
        loaded.refused["torch"] = f"the script changes {native[0]}, which libraries of torch read as they are loaded"
    watched |= frozenset(preload.environment)
    with _reads_of(watched, loaded.read) as reads, _without_collections(), _refusing(preload.left_out) as missed:
        for name in preload.modules:
            package = name.partition(".")[0]
            if package in preload.left_out or package in loaded.refused or name in sys.modules:
                continue
            if (torch := sys.modules.get("torch")) is not None:
                cuda_named(torch)
            if _import(name):
                loaded.modules.append(name)
            if missed:
                loaded.refused[package] = f"it imports {missed[0]}, which every rank imports for itself"
                missed.clear()
            for reader, variable in reads:
                when = "the script changes" if variable in preload.environment else "differs between launches"
                why = f"its import reads {variable}, which {when}"
                loaded.refused |= {reader: why, package: why}
            reads.clear()
            if not initialised and (initialised := driver_is_initialised()):
                loaded.refused[package] = "its import initialises CUDA, which no fork survives"
            if threads.started(name):
                loaded.refused[package] = "its import starts threads, which a fork does not copy"
    show_cuda()
    _load_operators(preload.operators)
    gc.collect()
    gc.freeze()  # a collection in a child would write to, and so copy, pages that all of them share
    return loaded


def _import(name: str) -> bool:
    try:
        importlib.import_module(name)
    except Exception:  # noqa: BLE001 - whatever it is, the rank that needs the module meets it, too
        return False
    return True


class _Refusal(MetaPathFinder, Loader):
    """Finds the packages that are left out, and refuses to load them; notes the attempts."""

    def __init__(self, packages: Sequence[str], missed: list[str]) -> None:
        self._packages = frozenset(packages)
        self._missed = missed

    def find_spec(self, fullname: str, _path: Any, _target: ModuleType | None = None) -> ModuleSpec | None:
        # Found, so that who only asks whether it is installed learns that it is.
        return ModuleSpec(fullname, self) if fullname.partition(".")[0] in self._packages else None

    def create_module(self, spec: ModuleSpec) -> NoReturn:
        self._missed.append(spec.name.partition(".")[0])
        raise ModuleNotFoundError(f"{spec.name} is left to the ranks", name=spec.name)

    def exec_module(self, module: ModuleType) -> None:
        raise NotImplementedError(module.__name__)  # none is ever created


@contextlib.contextmanager
def _refusing(packages: Sequence[str]) -> Iterator[list[str]]:
    """Let nothing import these packages within the context; the list yielded names those that something tried to."""
    missed: list[str] = []
    finder = _Refusal(packages, missed)
    sys.meta_path.insert(0, finder)
    try:
        yield missed
    finally:
        sys.meta_path.remove(finder)


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Look for no garbage: of heavy imports it takes a third of the time, and they leave little."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _reads_of(watched: frozenset[str], names: set[str]) -> Iterator[list[tuple[str, str]]]:
    """Note who reads the watched variables: (package, variable), and in ``names`` all variables that are read."""
    reads: list[tuple[str, str]] = []
    environ_class: Any = type(os.environ)
    original = environ_class.__getitem__

    def __getitem__(environ: Any, name: Any) -> Any:  # noqa: N807 - takes the place of one
        names.add(name)
        if name in watched:
            reads.append((_reader(sys._getframe(1)), name))
        return original(environ, name)

    environ_class.__getitem__ = __getitem__
    try:
        yield reads
    finally:
        environ_class.__getitem__ = original


def _reader(frame: FrameType | None) -> str:
    """Return the package outside the standard library that a frame was called from."""
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in sys.stdlib_module_names and package not in ("", "__main__", "importlib", _OWN):
            return package
        frame = frame.f_back
    return ""


class _Threads:
    """Counts threads; those of OpenBLAS are allowed, as many for each copy of it as NumPy's started."""

    def __init__(self) -> None:
        self._count = _thread_count()
        self._copies = _openblas_copies()
        self._each = 0

    def started(self, imported: str) -> bool:
        """Whether the last import started threads that a fork would lose."""
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
    """Load operators as DeepSpeed does, compiling those that are not yet; on the CPU alone.

    On a GPU even the look at an operator may ask CUDA for the device's capability.
    """
    if not names or "deepspeed" not in sys.modules:
        return
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    if get_accelerator().device_name() != "cpu":
        return
    for name in names:
        if name in ALL_OPS:
            with contextlib.suppress(Exception):  # the rank that needs it meets what is wrong with it
                ALL_OPS[name].load(verbose=False)
