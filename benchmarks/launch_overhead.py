"""Where the time of a launch goes, phase by phase, by plain torchrun and warm, side by side in one run.

    python -m benchmarks.launch_overhead [--examples gpt huggingface] [--launches 5]

Launches the user's own config of each example, taking turns between the two launchers, after a profile launch that
teaches the warm one what to import. Phases, in seconds, are those of the slowest rank:

- launcher: from the tuner's start of the launch to the first line of a rank;
- imports: until DeepSpeed is imported (what the script imports after it counts as its own);
- init_distributed: the process group, wherever the script has it made;
- script: all else until ``deepspeed.initialize`` (other imports, model, data) and after it until the first step ends,
  without the step itself;
- initialize: ``deepspeed.initialize``, without a process group that it makes;
- first step, steady steps: the steps;
- tear-down: from the last event to all processes gone and slots free.

"Outside of steps" is the wall time without the steps: what a launch costs beside what it measures.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from optuna_dsat.config import ds_config, user_file
from optuna_dsat.launch.follow import follow
from optuna_dsat.launch.launcher import TorchrunLauncher, local_launcher
from optuna_dsat.launch.machine.devices import Devices, cpu_devices, detect_devices
from optuna_dsat.launch.protocol import LaunchRequest, ScriptCommand
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.agent.preload import Preload
from optuna_dsat.runtime.events import EngineReady, Event, ModulesImported, RankStarted, StepMeasured

ROOT = Path(__file__).parents[1]
STEPS = 6
PHASES = ("launcher", "imports", "init_distributed", "script", "initialize", "first step", "steady steps", "tear-down")

OVERLAYS = "warm, overlays"
"""Launches in a world of their own (``optuna_dsat/runtime/isolation/world.py``)."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """A training script, its DeepSpeed config and its arguments."""

    script: Path
    config: Path
    args: tuple[str, ...] = ()


EXAMPLES = {
    "gpt": Script(script=ROOT / "examples/gpt/train.py", config=ROOT / "examples/gpt/ds_config.json"),
    "huggingface": Script(
        script=ROOT / "examples/huggingface/train.py",
        config=ROOT / "examples/huggingface/ds_config.json",
        args=(
            *("--deepspeed", str(ROOT / "examples/huggingface/ds_config.json")),
            *("--output_dir", "output", "--do_train", "--report_to", "none"),
        ),
    ),
}


E = TypeVar("E", bound=Event)


@dataclass(kw_only=True)
class Launch:
    """One launch: when it was started and over (Unix times), and its events."""

    started: float
    ended: float = 0.0
    events: list[Event] = field(default_factory=list)

    def of(self, kind: type[E]) -> list[E]:
        """Return the events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]

    def phases(self) -> dict[str, float]:
        """Return the seconds of each phase, of the rank whose first line came last."""
        rank = max(self.of(RankStarted), key=lambda event: event.time)
        engine = next(e for e in self.events if isinstance(e, EngineReady) and e.rank == rank.rank)
        steps = sorted(
            (e for e in self.events if isinstance(e, StepMeasured) and e.rank == rank.rank), key=lambda e: e.step
        )
        spans = {name: seconds for name, (_, seconds) in engine.spans.items()}
        begun = {name: start for name, (start, _) in engine.spans.items()}
        group = spans.get("init_distributed", 0.0)
        inside = begun.get("init_distributed", 0.0) >= begun["initialize"]
        first, steady = steps[0].latency_s, sum(step.latency_s for step in steps[1:])
        last = max(event.time for event in self.events)
        result = {
            "launcher": rank.time - self.started,
            "imports": spans["imports"],
            "init_distributed": group,
            "initialize": spans["initialize"] - (group if inside else 0.0),
            "first step": first,
            "steady steps": steady,
            "tear-down": self.ended - last,
        }
        result["script"] = max(0.0, self.ended - self.started - sum(result.values()))
        return {name: result[name] for name in PHASES}

    def outside(self) -> float:
        """Return the wall time outside of training steps."""
        phases = self.phases()
        return self.ended - self.started - phases["first step"] - phases["steady steps"]


def request(
    script: Script,
    overlay: Mapping[str, Any],
    *,
    launch_id: str,
    slots: int,
    cwd: str,
    steps: tuple[int, int],
    purpose: str = "trial",
    isolation: str = "off",
    timeout_s: float | None = None,
) -> LaunchRequest:
    """Return a launch of a script's config under an overlay.

    Args:
        script: The script.
        overlay: Overrides its config.
        launch_id: Name of the launch.
        slots: Ranks to start.
        cwd: Working directory.
        steps: First and last step that count.
        purpose: As in ``LaunchRequest``.
        isolation: As in ``LaunchRequest``.
        timeout_s: As in ``LaunchRequest``.
    """
    own = ds_config.effective(user_file.load(script.config).raw)
    return LaunchRequest(
        launch_id=launch_id,
        purpose=purpose,
        command=ScriptCommand(script=str(script.script), args=script.args, cwd=cwd, config_path=str(script.config)),
        ds_config=ds_config.merge(own, overlay),
        overlay=overlay,
        slots=slots,
        start_profile_step=steps[0],
        end_profile_step=steps[1],
        timeout_s=timeout_s,
        isolation=isolation,
    )


def run(launcher: TorchrunLauncher, asked: LaunchRequest) -> Launch:
    """Run one launch to its end."""
    launch = Launch(started=time.time())
    _, report = follow(launcher, asked, launch.events.append)
    launch.ended = time.time()
    if report.outcome is not Outcome.MEASURED:
        raise SystemExit(f"{asked.launch_id}: {report.message}\n{report.error_excerpt}")
    return launch


def measure(example: Script, *, launches: int, devices: Devices, folder: Path) -> dict[str, list[Launch]]:
    """Return the launches by plain torchrun, warm, and warm in overlays, made in turns."""
    slots, cwd, sizes = len(devices.devices), str(folder), ds_config.batch_overlay(2)  # plain where a trainer sets them
    launchers = {
        "torchrun": local_launcher(folder / "torchrun", devices=devices),
        "warm": local_launcher(folder / "warm", devices=devices, warm=True, on_notice=print),
    }
    kinds = {"torchrun": ("torchrun", "off"), "warm": ("warm", "off"), OVERLAYS: ("warm", "auto")}
    result: dict[str, list[Launch]] = {name: [] for name in kinds}
    for name in launchers:
        (folder / name).mkdir()
    try:
        asked = request(example, sizes, launch_id="profile", purpose="profile", slots=slots, cwd=cwd, steps=(1, 2))
        imported = run(launchers["warm"], asked).of(ModulesImported)[0]
        launchers["warm"].prepare(Preload.learned(imported))
        for number in range(launches + 1):  # the first of each waits for the imports, or warms the disk's cache
            for name, (starter, isolation) in kinds.items():
                launch_id = f"launch-{isolation}-{number}"
                asked = request(
                    example, sizes, launch_id=launch_id, slots=slots, cwd=cwd, steps=(1, STEPS), isolation=isolation
                )
                launch = run(launchers[starter], asked)
                if number:
                    result[name].append(launch)
    finally:
        for launcher in launchers.values():
            launcher.close()
    return result


def table(found: dict[str, list[Launch]]) -> list[str]:
    """Return the medians as rows of a Markdown table."""
    names = list(found)
    rows = [f"| phase (s) | {' | '.join(names)} |", f"|---|{'--:|' * len(names)}"]
    for phase in PHASES:
        medians = [statistics.median(launch.phases()[phase] for launch in found[name]) for name in names]
        rows.append(f"| {phase} | " + " | ".join(f"{value:.2f}" for value in medians) + " |")
    outside = {name: statistics.median(launch.outside() for launch in found[name]) for name in names}
    rows.append("| **outside of steps** | " + " | ".join(f"**{outside[name]:.2f}**" for name in names) + " |")
    rows.append("")
    rows.append(f"Warm takes {outside['warm'] / outside['torchrun']:.1%} of torchrun's time outside of steps.")
    pairs = list(zip(found[OVERLAYS], found["warm"], strict=True))
    more = statistics.median(isolated.outside() - plain.outside() for isolated, plain in pairs)
    steps = statistics.median(
        isolated.phases()["steady steps"] / plain.phases()["steady steps"] for isolated, plain in pairs
    )
    rows.append(
        f"Overlays take {more:.3f} s more a launch; steady steps take {steps:.3f} times as long (medians of pairs)."
    )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", nargs="+", choices=sorted(EXAMPLES), default=sorted(EXAMPLES))
    parser.add_argument("--launches", type=int, default=5, help="launches of each kind that count")
    args = parser.parse_args(argv)
    devices = detect_devices()
    devices = cpu_devices(2) if devices.kind == "cpu" else devices
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "deepspeed", "transformers"))
    print(
        f"{len(devices.devices)} x {devices.devices[0].name}, {os.cpu_count()} cores, {versions}, "
        f"Python {platform.python_version()}; medians of {args.launches}\n"
    )
    for name in args.examples:
        with tempfile.TemporaryDirectory(prefix="launch-overhead-") as temporary:
            result = measure(EXAMPLES[name], launches=args.launches, devices=devices, folder=Path(temporary))
        print(f"#### examples/{name}\n")
        print("\n".join(table(result)) + "\n", flush=True)


if __name__ == "__main__":
    main()
