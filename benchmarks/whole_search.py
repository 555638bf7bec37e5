"""A whole search on examples/gpt by our methods and by DeepSpeed's own autotuner, one after the other.

    .venv/bin/pip install --no-deps --target .cache/peers tabulate      # once: DeepSpeed's autotuner needs it
    PYTHONPATH=.cache/peers .venv/bin/python -m benchmarks.whole_search [--json results.json]

``demo`` is what ``make demo`` runs, ``demo-torchrun`` the same by plain torchrun, ``random`` what it ran before
``guided`` was there. ``quick`` makes as many launches as DeepSpeed's autotuner does here, and like it measures nothing
twice.

DeepSpeed's autotuner runs in its fast mode, its default, as on one machine without ssh: a stand-in for pdsh runs its
commands here (and passes on none that kill by name), and a small script around the example takes the config as the
autotuner hands it over, in base64. It would not start otherwise. On a CPU it takes the host's memory for the
device's, and spends minutes on micro-batches of 1024. It is held to ``LARGEST`` samples, therefore, and ours by
``--device-memory`` to what lets some 110 fit. ``--unbounded`` leaves both to their defaults; ``--limit`` ends what
takes too long.

Afterwards the configs that came out are measured again by plain torchrun, in turns, with the same steps: what each
search hands over is compared side by side.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
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

import psutil

from benchmarks.launch_overhead import EXAMPLES, Launch, run
from benchmarks.pdsh import write_pdsh
from optuna_dsat.config import ds_config
from optuna_dsat.launch.devices import Devices, cpu_devices, detect_devices
from optuna_dsat.launch.protocol import LaunchRequest, ScriptCommand
from optuna_dsat.launch.torchrun import TorchrunLauncher
from optuna_dsat.runtime.events import StepMeasured, decode_event

EXAMPLE = EXAMPLES["gpt"]
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
DEVICE_MEMORY = "900MiB"
LARGEST = 128
"""Largest micro-batch that DeepSpeed's autotuner may try, unless it is unbounded."""
DEEPSPEED_STEPS = 6
"""Steps of a launch of DeepSpeed's autotuner; it records their mean in microseconds."""
START, STEPS = 4, 12
"""First and last step that count when the results are compared."""


OURS = {
    "demo-torchrun": ("guided", "--launcher", "torchrun", "--max-trials", "12", "--confirm", "2"),
    "demo": ("guided", "--max-trials", "12", "--confirm", "2"),
    "random": ("random", "--max-trials", "12", "--confirm", "2"),
    "quick": ("guided", "--max-trials", "5", "--confirm", "0"),
}
"""What follows ``optuna-dsat`` in our searches."""
SEARCHES = (*OURS, "deepspeed")


@dataclass(frozen=True, kw_only=True)
class Search:
    """What a search took and handed over."""

    wall_s: float
    launches: int
    steps_s: float
    """Seconds between the boundaries of steps, over all launches; by DeepSpeed's autotuner, of its timers' phases."""
    config: Mapping[str, Any] | None
    """None where it was ended before it had one."""


def ours(folder: Path, name: str, *, unbounded: bool) -> Search:
    """Run one of our searches."""
    config = str(EXAMPLE.config)
    command = [
        *(str(Path(sys.executable).with_name("optuna-dsat")), *OURS[name], str(EXAMPLE.script), config),
        *("--study", "s", "--storage", f"sqlite:///{folder}/study.db", "--output-dir", str(folder)),
        *("--zero-stages", "0 1 2 3", *([] if unbounded else ["--device-memory", DEVICE_MEMORY])),
        *("--quiet", "--", "--deepspeed_config", config),
    ]
    started = time.monotonic()
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    wall_s = time.monotonic() - started
    launches = [file.parent for file in (folder / "s").glob("*/report.json")]
    return Search(
        wall_s=wall_s,
        launches=len(launches),
        steps_s=sum(_steps_s(launch) for launch in launches),
        config=json.loads((folder / "s/best_ds_config.json").read_text()),
    )


def _steps_s(launch: Path) -> float:
    """Return the seconds of all steps of a launch, of its slowest rank."""
    found = [decode_event(line) for file in launch.glob("events/*.jsonl") for line in file.read_text().splitlines()]
    ranks = collections.defaultdict[int, float](float)
    for event in found:
        if isinstance(event, StepMeasured):
            ranks[event.rank] += event.latency_s
    return max(ranks.values(), default=0.0)


def deepspeeds(folder: Path, slots: int, *, unbounded: bool, limit_s: float | None) -> Search:
    """Run DeepSpeed's autotuner in its fast mode, no longer than ``limit_s``."""
    own = ds_config.load(EXAMPLE.config).raw
    wanted: dict[str, bool | int] = {"enabled": True, "fast": True}
    if not unbounded:
        wanted["max_train_micro_batch_size_per_gpu"] = LARGEST
    config = {**own, "train_micro_batch_size_per_gpu": "auto", "autotuning": wanted}
    (folder / "ds_config.json").write_text(json.dumps(config))
    write_pdsh(folder)
    wrapper = folder / "train.py"
    wrapper.write_text(WRAPPER.format(script=str(EXAMPLE.script), folder=str(EXAMPLE.script.parent)))
    path = os.pathsep.join((str(folder), str(Path(sys.executable).parent), os.environ["PATH"]))
    packages = [str(Path(entry).resolve()) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    command = ["deepspeed", "--autotuning", "tune", "--num_gpus", str(slots), str(wrapper)]
    started = time.monotonic()
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(
            [*command, "--deepspeed_config", "ds_config.json"],
            cwd=folder,
            env={**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join(packages)},
            stdout=log,
            stderr=log,
        )
        ended = _ends_within(process, limit_s)
    wall_s = time.monotonic() - started
    launches = sum(1 for _ in (folder / "autotuning_results").glob("*/cmd.txt"))
    measured = [json.loads(file.read_text()) for file in (folder / "autotuning_results").glob("*/metrics.json")]
    steps_s = sum(one["latency"] * DEEPSPEED_STEPS / 1e6 for one in measured)
    if not ended:
        return Search(wall_s=wall_s, launches=launches, steps_s=steps_s, config=None)
    best = folder / "autotuning_results/ds_config_optimal.json"
    if not best.exists():  # it exits with 0 then, too
        raise SystemExit(f"DeepSpeed's autotuner found nothing:\n{(folder / 'log.txt').read_text()[-2000:]}")
    found = json.loads(best.read_text())
    found.pop("autotuning", None)
    return Search(wall_s=wall_s, launches=launches, steps_s=steps_s, config=found)


def _ends_within(process: subprocess.Popen[bytes], limit_s: float | None) -> bool:
    """Wait for a process; end it and all that it has started where it takes longer."""
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        for one in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()
        return False
    return True


def throughput(launch: Launch) -> float:
    """Return the samples per second over all ranks, end to end."""
    steps = [e for e in launch.events if isinstance(e, StepMeasured) and e.step >= START]
    slowest: dict[int, float] = {}
    for step in steps:
        slowest[step.step] = max(slowest.get(step.step, 0.0), step.latency_s)
    return sum(step.samples for step in steps) / sum(slowest.values())


def compare(
    configs: Mapping[str, Mapping[str, Any]], *, rounds: int, devices: Devices, folder: Path
) -> dict[str, float]:
    """Return the median throughput of what each search handed over, measured in turns by plain torchrun."""
    slots = len(devices.devices)
    launcher = TorchrunLauncher(folder, devices=devices)
    found: dict[str, list[float]] = {name: [] for name in configs}
    try:
        for number in range(rounds):
            for name, config in configs.items():
                triangle = ds_config.batch_triangle(config, world_size=slots)
                overlay = {
                    **config,
                    **ds_config.batch_overlay(triangle.micro_batch, triangle.gradient_accumulation_steps),
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
                    ds_config=ds_config.merge(config, overlay),
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
    parser.add_argument("--rounds", type=int, default=5, help="launches of each result when they are compared")
    parser.add_argument("--unbounded", action="store_true", help="limit neither memory nor micro-batch")
    parser.add_argument("--limit", type=float, help="seconds after which DeepSpeed's autotuner is ended")
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
            if name != "deepspeed":
                searches[name] = ours(folder, name, unbounded=args.unbounded)
            else:
                slots = len(devices.devices)
                searches[name] = deepspeeds(folder, slots, unbounded=args.unbounded, limit_s=args.limit)
            print(f"{name}: {searches[name].wall_s:.0f} s", file=sys.stderr)
        compared = Path(temporary, "compared")
        compared.mkdir()
        configs = {name: search.config for name, search in searches.items() if search.config is not None}
        speeds = compare(configs, rounds=args.rounds, devices=devices, folder=compared)
    print("| search | launches | wall time (s) | beside steps, per launch (s) | throughput handed over (samples/s) |")
    print("|---|--:|--:|--:|--:|")
    for name, search in searches.items():
        speed = f"{speeds[name]:.1f}" if name in speeds else "ended before it had a result"
        beside_s = (search.wall_s - search.steps_s) / search.launches
        print(f"| {name} | {search.launches} | {search.wall_s:.0f} | {beside_s:.1f} | {speed} |")
    if args.json:
        results = {name: {**vars(search), "throughput": speeds.get(name)} for name, search in searches.items()}
        args.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
