"""A whole search on examples/gpt by our methods and by DeepSpeed's own autotuner, one after the other.

    .venv/bin/pip install --no-deps --target .cache/peers tabulate      # once: DeepSpeed's autotuner needs it
    PYTHONPATH=.cache/peers .venv/bin/python -m benchmarks.whole_search [--runs 3] [--limit 900] [--json results.json]

``guided`` has its defaults, and no limit on memory. ``deepspeed`` is DeepSpeed's autotuner at its defaults,
``deepspeed-bounded`` the same with micro-batches of at most ``LARGEST``: on a CPU it takes the host's memory for the
device's, and spends minutes on micro-batches of 1024. ``--limit`` ends what takes too long. ``quick`` makes as many
launches as DeepSpeed's autotuner does here, and like it measures nothing twice. It has ``--device-memory``, which lets
some 110 samples fit.

DeepSpeed's autotuner runs in its fast mode, its default, as on one machine without ssh: a stand-in for pdsh runs its
commands here (and passes on none that kill by name), and a small script around the example takes the config as the
autotuner hands it over, in base64. It would not start otherwise.

Afterwards the configs that came out are measured again by plain torchrun, in rounds whose order is drawn anew, with the
same steps; so is the first config of ours whose launch was within ``NEAR`` of the best that its search saw. Each
comparison is the mean ratio within rounds with its 95 % interval.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.launch_overhead import EXAMPLES, request, run
from benchmarks.pdsh import write_pdsh
from optuna_dsat.config import ds_config, user_file
from optuna_dsat.launch.launcher import local_launcher
from optuna_dsat.launch.machine.devices import Devices, cpu_devices, detect_devices
from optuna_dsat.launch.measurement import LaunchRecord
from optuna_dsat.launch.protocol import LaunchRequest
from optuna_dsat.metrics import Interval
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.events import Event, StepMeasured, decode_event
from optuna_dsat.study.confirm.rounds import paired_ratio
from optuna_dsat.study.spec import StudySpec

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
LARGEST = 128
"""Largest micro-batch that DeepSpeed's autotuner may try where it is bounded."""
DEEPSPEED_STEPS = 6
"""Steps of a launch of DeepSpeed's autotuner; it records their mean in microseconds."""
START, STEPS = 4, 12
"""First and last step that count when the results are compared."""
NEAR = 0.02
"""A config this close to the best is good enough to go on with."""

OURS = {
    "guided": ("guided",),
    "quick": (
        *("guided", "--max-trials", "5", "--confirm", "0"),
        *("--zero-stages", "0 1 2 3", "--device-memory", "900MiB"),
    ),
}
"""The method and its options in our searches."""
THEIRS = ("deepspeed", "deepspeed-bounded")
SEARCHES = (*OURS, *THEIRS)
EARLY = "guided, early"
"""Name of the first config of ``guided`` that was near the best."""


@dataclass(frozen=True, kw_only=True)
class Early:
    """The first launch of a search that was within ``NEAR`` of the best that the search saw."""

    after_s: float
    """From the search's start to the launch's end."""
    config: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Search:
    """What a search took and handed over."""

    wall_s: float
    launches: int
    steps_s: float
    """Seconds between the boundaries of steps, over all launches; by DeepSpeed's autotuner, of its timers' phases."""
    config: Mapping[str, Any] | None
    """None where it was ended before it had one."""
    early: Early | None = None
    """None for DeepSpeed's autotuner."""


def ours(folder: Path, name: str) -> Search:
    """Run one of our searches."""
    config = str(EXAMPLE.config)
    method, *options = OURS[name]
    command = [
        *(str(Path(sys.executable).with_name("optuna-dsat")), method, str(EXAMPLE.script), config, *options),
        *("--study", "s", "--storage", f"sqlite:///{folder}/study.db", "--output-dir", str(folder)),
        *("--quiet", "--", "--deepspeed_config", config),
    ]
    started, began = time.monotonic(), time.time()
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    wall_s = time.monotonic() - started
    launches = [file.parent for file in (folder / "s").glob("*/report.json")]
    return Search(
        wall_s=wall_s,
        launches=len(launches),
        steps_s=sum(_steps_s(launch) for launch in launches),
        config=json.loads((folder / "s/best_ds_config.json").read_text()),
        early=early([launch for launch in launches if launch.name.startswith("trial-")], began=began),
    )


def early(launches: Sequence[Path], *, began: float) -> Early | None:
    """Return the first of some launches that was near the best of them; None if none was measured.

    Args:
        launches: Their folders.
        began: Unix time of the search's start.
    """
    ended, rates = {}, {}
    for folder in launches:
        report = json.loads((folder / "report.json").read_text())
        if report["outcome"] == Outcome.MEASURED:
            ended[folder] = report["started_at"] + report["startup_s"] + report["measured_s"] + report["exit_s"]
            rates[folder] = _rate(_events(folder), start=StudySpec.model_fields["start_profile_step"].default)
    near = [folder for folder in rates if rates[folder] >= (1 - NEAR) * max(rates.values())]
    if not near:
        return None
    first = min(near, key=lambda folder: ended[folder])
    return Early(after_s=ended[first] - began, config=json.loads((first / "ds_config.json").read_text()))


def _rate(events: Sequence[Event], *, start: int) -> float:
    """Return the samples per second over all ranks, end to end, from step ``start`` on."""
    record = LaunchRecord(world_size=len({event.rank for event in events}), start_profile_step=start)
    for event in events:
        record.add(event)
    return record.metrics(flops_per_sample=0.0)["throughput"]


def _events(launch: Path) -> list[Event]:
    lines = [line for file in sorted(launch.glob("events/*.jsonl")) for line in file.read_text().splitlines()]
    return [event for event in map(decode_event, lines) if event is not None]


def _steps_s(launch: Path) -> float:
    """Return the seconds of all steps of a launch, of its slowest rank."""
    ranks = collections.defaultdict[int, float](float)
    for event in _events(launch):
        if isinstance(event, StepMeasured):
            ranks[event.rank] += event.latency_s
    return max(ranks.values(), default=0.0)


def deepspeeds(folder: Path, slots: int, *, bounded: bool, limit_s: float | None) -> Search:
    """Run DeepSpeed's autotuner in its fast mode, no longer than ``limit_s``."""
    own = user_file.load(EXAMPLE.config).raw
    wanted: dict[str, bool | int] = {"enabled": True, "fast": True}
    if bounded:
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
    steps_s = sum(item["latency"] * DEEPSPEED_STEPS / 1e6 for item in measured)
    if not ended:
        return Search(wall_s=wall_s, launches=launches, steps_s=steps_s, config=None)
    best = folder / "autotuning_results/ds_config_optimal.json"
    if not best.exists():  # it exits with 0 then, too
        raise SystemExit(f"DeepSpeed's autotuner found nothing:\n{(folder / 'log.txt').read_text()[-2000:]}")
    result = json.loads(best.read_text())
    result.pop("autotuning", None)
    return Search(wall_s=wall_s, launches=launches, steps_s=steps_s, config=result)


def _ends_within(process: subprocess.Popen[bytes], limit_s: float | None) -> bool:
    """Wait for a process; end it and all that it has started where it takes longer."""
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        for item in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                item.kill()
        process.wait()
        return False
    return True


def compare(
    configs: Mapping[str, Mapping[str, Any]], *, rounds: int, devices: Devices, folder: Path
) -> dict[str, dict[int, float]]:
    """Return the throughput of each config in each round, by plain torchrun, in an order drawn anew for each round."""
    result: dict[str, dict[int, float]] = {name: {} for name in configs}
    with contextlib.closing(local_launcher(folder, devices=devices)) as launcher:
        for number in range(rounds):
            for index, name in enumerate(random.sample(list(configs), len(configs))):
                asked = _request(configs[name], f"round-{number}-{index}", slots=len(devices.devices), cwd=folder)
                result[name][number] = _rate(run(launcher, asked).events, start=START)
    return result


def _request(config: Mapping[str, Any], launch_id: str, *, slots: int, cwd: Path) -> LaunchRequest:
    triangle = ds_config.batch_triangle(config, world_size=slots)
    sizes = ds_config.batch_overlay(triangle.micro_batch, triangle.gradient_accumulation_steps)
    script = replace(EXAMPLE, args=("--deepspeed_config", str(EXAMPLE.config)))
    return request(script, {**config, **sizes}, launch_id=launch_id, slots=slots, cwd=str(cwd), steps=(START, STEPS))


def table(searches: Mapping[str, Search], rates: Mapping[str, Mapping[int, float]]) -> list[str]:
    """Return what each search took and handed over, as rows of a Markdown table."""
    lines = [
        "| search | launches | wall time (s) | beside steps, per launch (s) | first near the best after (s) "
        "| throughput handed over (samples/s) |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, search in searches.items():
        speed = f"{statistics.median(rates[name].values()):.1f}" if name in rates else "ended before it had a result"
        beside_s = (search.wall_s - search.steps_s) / max(1, search.launches)
        near = "" if search.early is None else f"{search.early.after_s:.0f}"
        lines.append(f"| {name} | {search.launches} | {search.wall_s:.0f} | {beside_s:.1f} | {near} | {speed} |")
    return lines


def ratios(searches: Mapping[str, Search], rates: Mapping[str, Mapping[int, float]]) -> list[str]:
    """Return in words how ``guided`` compares with the autotuner, and its first config near the best with the best."""
    own, result = searches["guided"], []
    for name in THEIRS:
        if name not in searches:
            continue
        at_most = "at most " if searches[name].config is None else ""
        result.append(f"guided takes {at_most}{own.wall_s / searches[name].wall_s:.2f} of the wall time of {name}")
        if (ratio := paired_ratio(rates["guided"], rates.get(name, {}), maximize=True)) is not None:
            result.append(f"its config reaches {_in_words(ratio)} of the throughput of that of {name}")
    if own.early is not None:
        best = max(set(rates) - {EARLY}, key=lambda name: statistics.median(rates[name].values()))
        again = paired_ratio(rates.get(EARLY, rates["guided"]), rates[best], maximize=True)
        measured = "nothing" if again is None else _in_words(again)
        result.append(
            f"the first config near the best came after {own.early.after_s:.0f} s; measured again, it reaches "
            f"{measured} of the throughput of the fastest ({best})"
        )
    return result


def _in_words(ratio: Interval) -> str:
    if ratio.low is None or ratio.high is None:
        return f"{ratio.value:.3f}"
    return f"{ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"


def one_run(args: argparse.Namespace, devices: Devices) -> dict[str, Any]:
    """Run every search and compare what came out; print and return it."""
    with tempfile.TemporaryDirectory(prefix="whole-search-") as temporary:
        searches: dict[str, Search] = {}
        for name in args.searches:
            folder = Path(temporary, name)
            folder.mkdir()
            if name in OURS:
                searches[name] = ours(folder, name)
            else:
                bounded = name == "deepspeed-bounded"
                searches[name] = deepspeeds(folder, len(devices.devices), bounded=bounded, limit_s=args.limit)
            print(f"{name}: {searches[name].wall_s:.0f} s", file=sys.stderr, flush=True)
        configs = {name: search.config for name, search in searches.items() if search.config is not None}
        first = searches["guided"].early if "guided" in searches else None
        if first is not None and first.config != configs["guided"]:
            configs[EARLY] = first.config
        compared = Path(temporary, "compared")
        compared.mkdir()
        rates = compare(configs, rounds=args.rounds, devices=devices, folder=compared)
    print("\n".join(table(searches, rates)) + "\n")
    words = ratios(searches, rates) if "guided" in searches else []
    print("".join(f"- {line}.\n" for line in words), flush=True)
    return {"searches": {name: asdict(search) for name, search in searches.items()}, "rates": rates, "ratios": words}


def main(argv: Sequence[str] | None = None) -> None:
    """Search, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--searches", nargs="+", choices=SEARCHES, default=["guided", *THEIRS])
    parser.add_argument("--runs", type=int, default=1, help="how often all of it is done (default 1)")
    parser.add_argument("--rounds", type=int, default=5, help="launches of each result when they are compared")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds after which the autotuner is ended")
    parser.add_argument("--json", type=Path, help="also write times, configs and every measured value")
    args = parser.parse_args(argv)
    devices = detect_devices()
    devices = cpu_devices(2) if devices.kind == "cpu" else devices
    if devices.kind == "cpu":
        os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "2", "OMP_NUM_THREADS": "1"}
    runs = []
    for number in range(1, args.runs + 1):
        print(f"Run {number} of {args.runs}\n", flush=True)
        runs.append(one_run(args, devices))
        if args.json:
            args.json.write_text(json.dumps(runs, indent=2))


if __name__ == "__main__":
    main()
