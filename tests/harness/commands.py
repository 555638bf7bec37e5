"""The real command with real launches of a tiny script on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from optuna_dsat.launch.machine.processes import LaunchProcess, find_marked

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "scripts" / "sleepy.py"
STEP_S = 0.1
"""Minimum duration of a step of the script."""

PLAIN_CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}
DS_CONFIG = {**PLAIN_CONFIG, "autotuning": {"max_train_micro_batch_size_per_gpu": 1}}
"""With a single micro-batch size, trials do not depend on measurements, so all studies try the same configs."""

OPTIONS = (
    *("--cpu-ranks", "1", "--zero-stages", "1", "--no-tune", "offload_optimizer", "--confirm", "0", "--metric"),
    *("throughput", "--start-profile-step", "2", "--end-profile-step", "3", "--no-enqueue-user-config", "--quiet"),
)


class Command:
    """``optuna-dsat`` with arguments, in a separate process."""

    def __init__(self, folder: Path, *arguments: str, environ: Mapping[str, str] | None = None) -> None:
        extensions = os.environ.get("TORCH_EXTENSIONS_DIR", str(ROOT / ".cache" / "torch_extensions"))
        self.arguments = arguments
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from optuna_dsat.cli import main; main()", *arguments],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_EXTENSIONS_DIR": extensions, **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def launched(self) -> list[LaunchProcess]:
        """Return the living processes of this tuner's launches."""
        return [process for process in find_marked() if process.mark.split(":")[1] == str(self.process.pid)]

    def finish(self, *, code: int = 0) -> tuple[str, str]:
        """Wait for the end; return stdout and stderr."""
        output, errors = self.process.communicate()
        assert self.process.returncode == code, f"{self.arguments}: {self.process.returncode}\n{errors}"
        return output, errors

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def search(name: str, storage: str, *, budget: int, more: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the arguments of a search; its working directory must contain ``ds.json``."""
    options = ("--study", name, "--storage", storage, "--max-trials", str(budget), *OPTIONS, *more)
    return ("binary", str(SCRIPT), "ds.json", *options, "--", "ds.json", str(STEP_S))


def write_config(folder: Path) -> None:
    folder.joinpath("ds.json").write_text(json.dumps(DS_CONFIG))
