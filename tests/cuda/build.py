"""Builds the stand-in for CUDA from ``standin/*.c``, against an environment that holds a CUDA build of torch.

    python tests/cuda/build.py SITE_PACKAGES FOLDER

Three libraries come about: ``libcuda.so.1`` and ``libnvidia-ml.so.1``, found where the real ones would be, and
``libstandin.so``, to be preloaded in the place of the CUDA runtime, cuBLAS, cuSOLVER, cuSPARSE and NCCL. What these
libraries have and the C files do not define is generated: functions that return 0.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

SOURCES = Path(__file__).with_name("standin")
TORCH_LIBRARIES = ("libtorch_cuda.so", "libc10_cuda.so", "libtorch_python.so", "libtorch_cuda_linalg.so")
"""Libraries of torch that call CUDA; which of them there are depends on its version."""

DECLARED = re.compile(r"\bCUDAAPI\s+(cu[A-Z]\w+)\s*\(")
CALLED = re.compile(r"(__)?(cuda[A-Z]|cublas|cusolver|cusparse|nccl)\w+")


class BuildError(RuntimeError):
    """The stand-in cannot be built here; the message says what is missing."""


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command[:2])} ... failed:\n{done.stderr[-4000:]}")
    return done.stdout


def _symbols(library: Path, *, defined: bool) -> set[str]:
    """Return the functions that a library or object file defines, or those that it needs."""
    chosen = "--defined-only" if defined else "--undefined-only"
    dynamic = () if library.suffix == ".o" else ("--dynamic",)
    lines = _run(["nm", *dynamic, chosen, str(library)]).splitlines()
    return {line.split()[-1].partition("@")[0] for line in lines if line.split()}


def include_folders(site_packages: Path) -> list[Path]:
    """Return where CUDA's headers are: in pip's packages, else in a toolkit.

    Raises:
        BuildError: If they are nowhere.
    """
    nvidia, triton = site_packages / "nvidia", site_packages / "triton" / "backends" / "nvidia" / "include"
    of_packages = [*nvidia.glob("cu*/include"), *nvidia.glob("cuda_runtime/include"), triton]
    folders = [folder for folder in (*of_packages, Path("/usr/local/cuda/include")) if folder.is_dir()]
    for header in ("cuda.h", "cuda_runtime_api.h", "crt/host_defines.h"):
        if not any((folder / header).exists() for folder in folders):
            raise BuildError(f"{header} is neither in {site_packages} nor in /usr/local/cuda/include.")
    return folders


def _driver_functions(includes: Iterable[Path]) -> set[str]:
    """Return the functions that ``cuda.h`` declares, in every version of theirs that it names."""
    header = next(folder / "cuda.h" for folder in includes if (folder / "cuda.h").exists())
    return set(DECLARED.findall(header.read_text(encoding="utf-8", errors="replace")))


def _runtime_functions(site_packages: Path) -> set[str]:
    """Return the functions of the runtime and the libraries over it that torch calls.

    Raises:
        BuildError: If this torch is not built for CUDA.
    """
    libraries = [path for name in TORCH_LIBRARIES if (path := site_packages / "torch" / "lib" / name).exists()]
    if not (site_packages / "torch" / "lib" / TORCH_LIBRARIES[0]).exists():
        raise BuildError(f"The torch in {site_packages} is no CUDA build.")
    needed = set[str]().union(*(_symbols(library, defined=False) for library in libraries))
    return {name for name in needed if CALLED.fullmatch(name)}


def _link(folder: Path, name: str, sources: Sequence[str], includes: Sequence[Path], wanted: set[str]) -> None:
    """Compile ``sources`` into the library ``name``, with functions that return 0 for the rest of ``wanted``."""
    compiler = ["cc", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", *(f"-isystem{path}" for path in includes)]
    objects = [folder / f"{name}.{Path(source).stem}.o" for source in sources]
    for source, compiled in zip(sources, objects, strict=True):
        _run([*compiler, "-c", "-o", str(compiled), str(SOURCES / source)])
    defined = set[str]().union(*(_symbols(path, defined=True) for path in objects))
    nothing = folder / f"{name}.nothing.c"
    nothing.write_text("".join(f"long {item}(void) {{ return 0; }}\n" for item in sorted(wanted - defined)))
    library = folder / name
    unfinished = library.with_suffix(".new")
    link = [*compiler, "-shared", "-pthread", f"-Wl,-soname,{name}", "-o", str(unfinished)]
    _run([*link, *map(str, objects), "-fno-builtin", str(nothing), "-ldl"])
    unfinished.replace(library)


def build(site_packages: Path, folder: Path) -> None:
    """Build the three libraries in ``folder``.

    Raises:
        BuildError: If headers or libraries of CUDA are missing, or the compiler fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    includes = include_folders(site_packages)
    _link(folder, "libnvidia-ml.so.1", ["nvml.c", "machine.c"], [], set())
    _link(folder, "libcuda.so.1", ["driver.c", "machine.c"], includes, _driver_functions(includes))
    preloaded = ["runtime.c", "libraries.c", "collectives.c"]
    _link(folder, "libstandin.so", preloaded, includes, _runtime_functions(site_packages))


if __name__ == "__main__":
    try:
        build(Path(sys.argv[1]), Path(sys.argv[2]))
    except BuildError as error:
        sys.exit(f"The stand-in for CUDA cannot be built: {error}")
