"""A whole search on examples/gpt: by plain torchrun, warm, and by DeepSpeed's own autotuner, one after the other.

    .venv/bin/pip install --no-deps --target .cache/peers tabulate      # once: DeepSpeed's autotuner needs it
    PYTHONPATH=.cache/peers .venv/bin/python -m benchmarks.whole_search [--json results.json]

Ours is what ``make demo`` runs. DeepSpeed's autotuner runs in its fast mode, its default, as on one machine without
ssh: a stand-in for pdsh runs its commands here (and passes on none that kill by name), and a small script around the
example takes the config as the autotuner hands it over, in base64. It would not start otherwise.

Afterwards the configs that came out are measured again by plain torchrun, in turns, with the same steps: what each
search hands over is compared side by side.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.launch_overhead import EXAMPLES, Launch, run
from optuna_dsat import ds_config
from optuna_dsat.launch.devices import Devices, cpu_devices, detect_devices
from optuna_dsat.launch.protocol import LaunchRequest, ScriptCommand
from optuna_dsat.launch.torchrun import TorchrunLauncher
from optuna_dsat.runtime.events import StepMeasured

EXAMPLE = EXAMPLES["gpt"]
PDSH = """#!/bin/bash
# Stands for pdsh on one machine: runs the command here. Killing by name would reach the processes of others.
command=()
while [ $# -gt 0 ]; do
  case "$1" in -S) shift;; -f|-w|-R) shift 2;; *) command+=("$1"); shift;; esac
done
case "${command[*]}" in *pkill*) exit 0;; esac
exec bash -c "${command[*]}"
"""
WRAPPER = """
import base64, runpy, sys, tempfile
from pathlib import Path
place = sys.argv.index("--deepspeed_config") + 1
config = Path(tempfile.mkstemp(suffix=".json")[1])
config.write_bytes(base64.urlsafe_b64decode(sys.argv[place]))
sys.argv[place] = str(config)
sys.argv[0] = {script!r}
sys.path[0] = {folder!r}
runpy.run_path({script!r}, run_name="__main__")
"""
SEARCHES = ("torchrun", "warm", "deepspeed")
LARGEST = 128
"""Largest micro-batch that DeepSpeed's autotuner may try. It takes the host's memory for the device's and would spend
minutes on a micro-batch of 1024; ours is held by ``--device-memory``, which lets some 110 samples fit."""
START, STEPS = 4, 12
"""First and last step that count when the results are compared."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """What a search took and handed over."""

    wall_s: float
    launches: int
    config: Mapping[str, Any]


def ours(folder: Path, launcher: str) -> Search:
    """Run the search of ``make demo`` with one of our launchers."""
    config = str(EXAMPLE.config)
    command = [
        *(str(Path(sys.executable).with_name("optuna-dsat")), "random", str(EXAMPLE.script), config),
        *("--study", "s", "--storage", f"sqlite:///{folder}/study.db", "--output-dir", str(folder)),
        *("--device-memory", "900MiB", "--zero-stages", "0 1 2 3", "--max-trials", "12", "--confirm", "2"),
        *("--launcher", launcher, "--quiet", "--", "--deepspeed_config", config),
    ]
    started = time.monotonic()
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    wall_s = time.monotonic() - started
    launches = sum(1 for _ in (folder / "s").glob("*/report.json"))
    return Search(wall_s=wall_s, launches=launches, config=json.loads((folder / "s/best_ds_config.json").read_text()))


def deepspeeds(folder: Path, slots: int) -> Search:
    """Run DeepSpeed's autotuner in its fast mode."""
    own = ds_config.load(EXAMPLE.config).raw
    wanted = {"enabled": True, "fast": True, "max_train_micro_batch_size_per_gpu": LARGEST}
    config = {**own, "train_micro_batch_size_per_gpu": "auto", "autotuning": wanted}
    (folder / "ds_config.json").write_text(json.dumps(config))
    (folder / "pdsh").write_text(PDSH)
    (folder / "pdsh").chmod(0o755)
    wrapper = folder / "train.py"
    wrapper.write_text(WRAPPER.format(script=str(EXAMPLE.script), folder=str(EXAMPLE.script.parent)))
    path = os.pathsep.join((str(folder), str(Path(sys.executable).parent), os.environ["PATH"]))
    packages = [str(Path(entry).resolve()) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    command = ["deepspeed", "--autotuning", "tune", "--num_gpus", str(slots), str(wrapper)]
    started = time.monotonic()
    with (folder / "log.txt").open("w") as log:
        subprocess.run(
            [*command, "--deepspeed_config", "ds_config.json"],
            cwd=folder,
            env={**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join(packages)},
            check=False,  # it also exits with 0 where it found nothing
            stdout=log,
            stderr=log,
        )
    wall_s = time.monotonic() - started
    best = folder / "autotuning_results/ds_config_optimal.json"
    if not best.exists():
        raise SystemExit(f"DeepSpeed's autotuner found nothing:\n{(folder / 'log.txt').read_text()[-2000:]}")
    found = json.loads(best.read_text())
    found.pop("autotuning", None)
    launches = sum(1 for _ in (folder / "autotuning_results").glob("*/cmd.txt"))
    return Search(wall_s=wall_s, launches=launches, config=found)


def throughput(launch: Launch) -> float:
    """Return the samples per second over all ranks, end to end."""
    steps = [e for e in launch.events if isinstance(e, StepMeasured) and e.step >= START]
    slowest: dict[int, float] = {}
    for step in steps:
        slowest[step.step] = max(slowest.get(step.step, 0.0), step.latency_s)
    return sum(step.samples for step in steps) / sum(slowest.values())


def compare(searches: Mapping[str, Search], *, rounds: int, devices: Devices, folder: Path) -> dict[str, float]:
    """Return the median throughput of what each search handed over, measured in turns by plain torchrun."""
    slots = len(devices.devices)
    launcher = TorchrunLauncher(folder, devices=devices)
    found: dict[str, list[float]] = {name: [] for name in searches}
    try:
        for number in range(rounds):
            for name, search in searches.items():
                triangle = ds_config.batch_triangle(search.config, world_size=slots)
                overlay = {
                    **search.config,
                    "train_batch_size": None,
                    "train_micro_batch_size_per_gpu": triangle.micro_batch,
                    "gradient_accumulation_steps": triangle.gradient_accumulation_steps,
                }
                asked = LaunchRequest(
                    launch_id=f"{name}-{number}",
                    purpose="trial",
                    command=ScriptCommand(
                        script=str(EXAMPLE.script),
                        args=("--deepspeed_config", str(EXAMPLE.config)),
                        cwd=str(folder),
                        config_path=str(EXAMPLE.config),
                    ),
                    ds_config=ds_config.merge(search.config, overlay),
                    overlay=overlay,
                    slots=slots,
                    start_profile_step=START,
                    end_profile_step=STEPS,
                )
                found[name].append(throughput(run(launcher, asked)))
    finally:
        launcher.close()
    return {name: statistics.median(values) for name, values in found.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Search, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--searches", nargs="+", choices=SEARCHES, default=SEARCHES)
    parser.add_argument("--rounds", type=int, default=3, help="launches of each result when they are compared")
    parser.add_argument("--json", type=Path, help="also write times and configs")
    args = parser.parse_args(argv)
    devices = detect_devices()
    devices = cpu_devices(2) if devices.kind == "cpu" else devices
    if devices.kind == "cpu":
        os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "2", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="whole-search-") as temporary:
        searches = {}
        for name in args.searches:
            folder = Path(temporary, name)
            folder.mkdir()
            own = name != "deepspeed"
            searches[name] = ours(folder, name) if own else deepspeeds(folder, len(devices.devices))
            print(f"{name}: {searches[name].wall_s:.0f} s", file=sys.stderr)
        compared = Path(temporary, "compared")
        compared.mkdir()
        speeds = compare(searches, rounds=args.rounds, devices=devices, folder=compared)
    print("| search | launches | wall time (s) | throughput handed over (samples/s) |")
    print("|---|--:|--:|--:|")
    for name, search in searches.items():
        print(f"| {name} | {search.launches} | {search.wall_s:.0f} | {speeds[name]:.1f} |")
    if args.json:
        results = {name: {**vars(search), "throughput": speeds[name]} for name, search in searches.items()}
        args.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
