"""What scripts that load models and data sets of the Hugging Face hub find instead of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.first_try.entry import Entry, EntryError

_ROOT = Path(__file__).parents[2]
_ABSENT = "import sys; from importlib.util import find_spec; print(*(n for n in sys.argv[1:] if find_spec(n) is None))"


def interpreter_of(entry: Entry) -> str:
    """Return the interpreter of an entry's environment.

    Raises:
        EntryError: If its name was not given one: ``FIRST_TRY_PYTHON_NAME``.
    """
    if not entry.python:
        return sys.executable
    variable = f"FIRST_TRY_PYTHON_{entry.python.upper()}"
    if variable not in os.environ:
        raise EntryError(f"{entry.name}: no interpreter was named for {entry.python} (the variable {variable}).")
    return os.environ[variable]


def absent_modules(entry: Entry) -> list[str]:
    """Return the modules of an entry's ``needs`` that the environment of its script lacks.

    Raises:
        EntryError: If that environment has no interpreter.
    """
    python, needed = interpreter_of(entry), entry.modules or entry.needs
    if not needed:
        return []
    try:
        done = subprocess.run([python, "-c", _ABSENT, *needed], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise EntryError(f"{entry.name}: {python} does not run: {error}") from error
    return done.stdout.split()


def prepare_hub(entry: Entry, *, python: str, folder: Path, cwd: Path) -> Mapping[str, str]:
    """Write the stand-ins for an entry's models and data sets; return the variables by which its script finds them.

    Args:
        entry: The script.
        python: Interpreter of the script's environment.
        folder: Where ``HF_HOME`` and the rows are put, outside of the checkout.
        cwd: The folder in which its command runs, to which names of models that begin with ``.`` are relative.

    Raises:
        subprocess.CalledProcessError: If a model cannot be written.
    """
    home, rows = folder / "hf", folder / "datasets"
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    home.mkdir(parents=True, exist_ok=True)
    rows.mkdir(parents=True, exist_ok=True)
    write = [python, "-m", "benchmarks.first_try.stand_ins.hub", str(home), str(rows)]
    for what, named in (("models", entry.models), ("datasets", entry.datasets)):
        command = [*write, what, *(f"{name}={kind}" for name, kind in named.items())]
        if named:
            subprocess.run(command, cwd=cwd, env=environment, check=True, capture_output=True, text=True)
    return {
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "FIRST_TRY_DATASETS": str(rows),
        "TOKENIZERS_PARALLELISM": "false",
        "WANDB_MODE": "offline",
    }
