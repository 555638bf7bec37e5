"""Largest micro-batch and throughput of ``examples/gpt`` at half the memory it needs, by activation checkpointing.

    python -m benchmarks.checkpointing [--micro-batch 8] [--rounds 3] [--args --layers 8 --seq 256]

A launch without a limit measures the peak at a micro-batch; half of it is the limit of all others. For none, every
second and every block, bisection finds the largest micro-batch that trains ten steps. These three are then launched in
turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from optuna_dsat.config import ds_config, user_file
from optuna_dsat.launch.follow import follow
from optuna_dsat.launch.launcher import TorchrunLauncher, local_launcher
from optuna_dsat.launch.machine.devices import cpu_devices
from optuna_dsat.launch.protocol import LaunchRequest, ScriptCommand
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.overlay import CHECKPOINT_EVERY, MICRO_BATCH, MODEL

EXAMPLE = Path(__file__).parents[1] / "examples" / "gpt"
RANKS = 2
CHOICES = {0: "none", 2: "every second block", 1: "every block"}


@dataclass(kw_only=True)
class Example:
    """Launches of the example on two CPU ranks."""

    launcher: TorchrunLauncher
    args: tuple[str, ...]
    limit_bytes: int | None = None
    launches: int = field(default=0, init=False)

    def metrics(self, every: int, size: int) -> dict[str, float] | None:
        """Return the metrics of a launch; None if it runs out of memory.

        Raises:
            RuntimeError: If it fails otherwise.
        """
        self.launches += 1
        user = user_file.load(EXAMPLE / "ds_config.json").raw
        overlay = {MICRO_BATCH: size, **({MODEL: {CHECKPOINT_EVERY: every}} if every else {})}
        request = LaunchRequest(
            command=ScriptCommand(
                script=str(EXAMPLE / "train.py"),
                args=self.args,
                cwd=str(EXAMPLE),
                config_path=str(EXAMPLE / "ds_config.json"),
            ),
            ds_config=ds_config.merge(user, overlay),
            overlay=overlay,
            slots=RANKS,
            launch_id=f"launch-{self.launches}",
            purpose="trial",
            start_profile_step=3,
            end_profile_step=10,
            device_memory_bytes=self.limit_bytes,
        )
        record, report = follow(self.launcher, request, lambda _: None)
        if report.outcome is Outcome.OUT_OF_MEMORY:
            return None
        if report.outcome is not Outcome.MEASURED:
            raise RuntimeError(report.message)
        return record.metrics(flops_per_sample=0)

    def largest(self, every: int) -> int:
        """Return the largest micro-batch that fits; 0 if not even 1 does."""
        fits, fails = 0, 1
        while self.metrics(every, fails) is not None:
            fits, fails = fails, 2 * fails
        while fails - fits > 1:
            middle = (fits + fails) // 2
            fits, fails = (middle, fails) if self.metrics(every, middle) is not None else (fits, middle)
        return fits


def main() -> None:
    """Print a row per choice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--args", nargs=argparse.REMAINDER, default=["--layers", "8", "--seq", "256"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        launcher = local_launcher(Path(folder), devices=cpu_devices(RANKS), base_env=dict(os.environ), warm=True)
        with closing(launcher):
            example = Example(launcher=launcher, args=tuple(options.args))
            needed = example.metrics(0, options.micro_batch)
            if needed is None:
                raise SystemExit("The machine has too little memory for the first launch.")
            example.limit_bytes = int(needed["peak_allocated_bytes"] / 2)
            print(f"peak at micro-batch {options.micro_batch}: {needed['peak_allocated_bytes'] / 2**20:.0f} MiB a rank")
            sizes = {every: example.largest(every) for every in CHOICES}
            rates: dict[int, list[float]] = {every: [] for every in CHOICES}
            for _ in range(options.rounds):
                for every, size in sizes.items():
                    measured = example.metrics(every, size) if size else None
                    rates[every] += [] if measured is None else [measured["throughput"]]
            for every, words in CHOICES.items():
                rate = f"{statistics.median(rates[every]):.2f}" if rates[every] else "-"
                print(f"| {words} | {sizes[every]} | {rate} |")


if __name__ == "__main__":
    main()
