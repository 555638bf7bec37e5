"""Largest micro-batch and throughput of an example at half the memory it needs, by activation checkpointing.

    python -m benchmarks.checkpointing [--example huggingface] [--micro-batch 8] [--rounds 3] [--args --layers 8]

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
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.launch_overhead import EXAMPLES, Script, request
from optuna_dsat.launch.follow import follow
from optuna_dsat.launch.launcher import TorchrunLauncher, local_launcher
from optuna_dsat.launch.machine.devices import cpu_devices
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.overlay import CHECKPOINT_EVERY, MICRO_BATCH, MODEL

RANKS = 2
ARGS = {
    "gpt": ("--layers", "8", "--seq", "256"),
    "huggingface": ("--layers", "8", "--hidden", "128", "--sequence", "128"),
}
"""Arguments of each example's script that give it a model large enough to run out of memory."""
CHOICES = {0: "none", 2: "every second block", 1: "every block"}


@dataclass(kw_only=True)
class Example:
    """Launches of the example on two CPU ranks."""

    launcher: TorchrunLauncher
    script: Script
    folder: str
    """Working directory of the launches."""
    limit_bytes: int | None = None
    launches: int = field(default=0, init=False)

    def metrics(self, every: int, size: int) -> dict[str, float] | None:
        """Return the metrics of a launch; None if it runs out of memory.

        Raises:
            RuntimeError: If it fails otherwise.
        """
        self.launches += 1
        overlay = {MICRO_BATCH: size, **({MODEL: {CHECKPOINT_EVERY: every}} if every else {})}
        launch_id = f"launch-{self.launches}"
        asked = request(self.script, overlay, launch_id=launch_id, slots=RANKS, cwd=self.folder, steps=(3, 10))
        record, report = follow(self.launcher, replace(asked, device_memory_bytes=self.limit_bytes), lambda _: None)
        if report.outcome is Outcome.OUT_OF_MEMORY:
            return None
        if report.outcome is not Outcome.MEASURED:
            raise RuntimeError(report.message)
        return record.metrics(flops_per_sample=0)

    def largest(self, every: int) -> int:
        """Return the largest micro-batch that fits in two launches; 0 if not even 1 does."""

        def is_small_enough(size: int) -> bool:
            return all(self.metrics(every, size) is not None for _ in range(2))

        fits, fails = 0, 1
        while is_small_enough(fails):
            fits, fails = fails, 2 * fails
        while fails - fits > 1:
            middle = (fits + fails) // 2
            fits, fails = (middle, fails) if is_small_enough(middle) else (fits, middle)
        return fits


def main() -> None:
    """Print a row per choice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--example", choices=list(ARGS), default="gpt")
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--args", nargs=argparse.REMAINDER, help="instead of those in this file")
    options = parser.parse_args()
    script = EXAMPLES[options.example]
    script = replace(script, args=(*script.args, *(options.args or ARGS[options.example])))
    with tempfile.TemporaryDirectory() as folder:
        launcher = local_launcher(Path(folder), devices=cpu_devices(RANKS), base_env=dict(os.environ), warm=True)
        with closing(launcher):
            example = Example(launcher=launcher, script=script, folder=folder)
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
