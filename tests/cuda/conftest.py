"""The CUDA path, end to end: the real command with a CUDA build of torch, on the stand-in of ``standin/``.

Not part of the suite: ``make test-cuda`` runs it, with ``OPTUNA_DSAT_CUDA_VENV`` naming the environment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cuda.build import build
from tests.cuda.machine import Machine

VENV = "OPTUNA_DSAT_CUDA_VENV"

_SITE_PACKAGES = "import sysconfig; print(sysconfig.get_path('purelib'))"


@pytest.fixture(scope="session")
def cuda_python() -> Path:
    """Return the interpreter of the environment with the CUDA build of torch."""
    if VENV not in os.environ:
        pytest.fail(f"{VENV} names no environment with a CUDA build of torch; run `make test-cuda`.")
    return Path(os.environ[VENV]).absolute() / "bin" / "python"


@pytest.fixture(scope="session")
def libraries(cuda_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the stand-in's libraries, built for that environment."""
    result = subprocess.run([str(cuda_python), "-c", _SITE_PACKAGES], capture_output=True, text=True, check=True)
    folder = tmp_path_factory.mktemp("standin")
    build(Path(result.stdout.strip()), folder)
    return folder


@pytest.fixture
def machine(libraries: Path, cuda_python: Path) -> Iterator[Machine]:
    """A machine with eight GPUs, which nobody uses."""
    run = next(path for path in (f"/run/user/{os.getuid()}", "/run") if os.access(path, os.W_OK))
    folder = Path(tempfile.mkdtemp(prefix="cuda-", dir=run))  # where launches have no overlay: it is the GPUs' state
    machine = Machine(folder, libraries, cuda_python)
    yield machine
    machine.end()
    shutil.rmtree(folder, ignore_errors=True)
