"""Record a real landscape: launch one script under many configurations on this machine, for searches to be played on.

    python -m benchmarks.record_landscape OUTPUT.json SCRIPT DS_CONFIG [--stages 1 2 3] [--offload]
        [--gpus 1 | --cpu-ranks 2] [--device-memory 10GiB] [--longest-step 1] [--rounds 3] [-- SCRIPT_ARGS]

For each ZeRO stage and offload, micro-batches 1, 2, 4, ... are launched until one runs out of memory; the edge between
the last that ran and the first that did not is then bisected. ``--longest-step`` stops earlier, at the first
micro-batch whose step takes that many seconds. ``--device-memory`` imitates a smaller memory. With ``--rounds`` every
configuration that ran is launched again, in a new order each round: a slow minute of the machine meets it once only.
Launches are warm, as those of a search. ``benchmarks.search_efficiency --recorded OUTPUT.json`` searches the record.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.recorded import structure_of, summary
from optuna_dsat.config import ds_config
from optuna_dsat.config.op_builders import operators_of
from optuna_dsat.config.structures import STRUCTURES
from optuna_dsat.errors import DsatError
from optuna_dsat.launch.follow import follow
from optuna_dsat.launch.launcher import local_launcher
from optuna_dsat.launch.measurement import GlobalStep
from optuna_dsat.launch.protocol import Launcher
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.files import write_text_atomic
from optuna_dsat.study.profile.profile import measure_profile
from optuna_dsat.study.profile.script import user_config
from optuna_dsat.study.requests import launch_request
from optuna_dsat.study.space import space_of
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.tuning.options.tune_options import TuneOptions
from optuna_dsat.tuning.spec_builder import build_spec, search_devices

_LARGEST = 2**14
_WARM_UP, _LEAST_STEPS, _MOST_STEPS, _WINDOW_S = 2, 2, 300, 0.8


def main(arguments: Sequence[str] | None = None) -> None:
    """Record; see the module's docstring."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    cut = given.index("--") if "--" in given else len(given)
    args = _parser().parse_args(given[:cut])
    args.script_args = given[cut + 1 :]
    with tempfile.TemporaryDirectory(prefix="landscape-") as folder:
        try:
            _run(args, Path(folder), shlex.join(["python", "-m", "benchmarks.record_landscape", *given]))
        except DsatError as error:
            raise SystemExit(str(error)) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.record_landscape", description=__doc__.split("\n")[0])
    parser.add_argument("output", type=Path, help="file that receives the landscape (JSON)")
    parser.add_argument("script", type=Path)
    parser.add_argument("ds_config", type=Path)
    parser.add_argument("--stages", type=int, nargs="+", choices=[0, 1, 2, 3], default=[1, 2, 3])
    parser.add_argument("--offload", action="store_true", help="try the offloads of each stage as well")
    parser.add_argument("--gpus", type=int, help="GPUs of a launch (default all)")
    parser.add_argument("--cpu-ranks", type=int, help="run on the CPU with this many ranks")
    parser.add_argument("--device-memory", help="memory that one rank may allocate, such as 10GiB")
    parser.add_argument("--longest-step", type=float, metavar="SECONDS", help="stop at steps of this length")
    parser.add_argument("--rounds", type=int, default=1, help="launches of each configuration (default 1)")
    return parser


def configurations(stages: Sequence[int], *, offload: bool) -> list[dict[str, Any]]:
    """Return ZeRO sections: every stage, with every offload that it knows."""
    known = [structure for structure in STRUCTURES if structure.stage in stages and (offload or not structure.offloads)]
    return [item.zero_section() for item in known]


def edge_walk(known: Mapping[int, bool]) -> int | None:
    """Return the micro-batch to run next: doubled until one does not fit, then halfway to it; None at the end.

    Args:
        known: Micro-batch -> whether it ran.
    """
    fits = max((size for size, ran in known.items() if ran), default=0)
    bursts = min((size for size, ran in known.items() if not ran), default=None)
    if bursts is None:
        return None if fits >= _LARGEST else max(1, 2 * fits)
    if bursts - fits <= max(1, fits // 16):
        return None
    return (fits + bursts) // 2


def _run(args: argparse.Namespace, folder: Path, command: str) -> None:
    options = TuneOptions(
        script=args.script,
        ds_config=args.ds_config,
        script_args=args.script_args,
        gpus_per_trial=args.gpus,
        cpu_ranks=args.cpu_ranks,
        device_memory=args.device_memory,
        output_dir=folder,
        study=args.output.stem,
        zero_stages=args.stages,
    )
    devices = search_devices(options)
    spec = build_spec("guided", options, devices)
    with closing(
        local_launcher(spec.study_dir, devices=devices, max_slots=spec.max_slots, warm=True, on_notice=_say)
    ) as launcher:
        profiled = measure_profile(spec, launcher, on_attempt=lambda _: None, on_report=lambda _report, _record: None)
        spec = profiled.followed_by(spec)
        launcher.prepare(profiled.preload, operators=operators_of(spec.ds_config, space_of(spec, profiled)))
        record: dict[str, Any] = {
            "format": 2,
            "recorded": time.strftime("%Y-%m-%d", time.gmtime()),
            "command": command,
            "hardware": {"device": devices.devices[0].name, "ranks": spec.slots_per_trial, "kind": spec.device},
            "versions": {name: importlib.metadata.version(name) for name in ("torch", "deepspeed", "optuna")},
            "device_memory_bytes": profiled.profile.device_memory_bytes,
            "user_config": user_config(spec, data_parallel_size=profiled.data_parallel_size)[0],
            "profile": profiled.profile.to_json(),
            "runs": [],
        }
        runs: list[dict[str, Any]] = record["runs"]

        def launch(zero: Mapping[str, Any], size: int) -> None:
            runs.append(_launch(spec, launcher, zero, size, name=f"run-{len(runs):04d}"))
            _write(args.output, record)

        for zero in configurations(args.stages, offload=args.offload):
            while (size := _next_size(runs, zero, longest_step_s=args.longest_step)) is not None:
                launch(zero, size)
        measured = [run for run in runs if run["outcome"] == Outcome.MEASURED]
        for number in range(1, args.rounds):
            for run in random.Random(number).sample(measured, len(measured)):
                launch(run["zero"], run["micro_batch"])
    record["summary"] = summary(record["runs"])
    _write(args.output, record)
    print("{launches} launches of {configurations} configurations".format(**record["summary"]), f"in {args.output}")


def _next_size(
    runs: Sequence[Mapping[str, Any]], zero: Mapping[str, Any], *, longest_step_s: float | None
) -> int | None:
    """Return the micro-batch of a ZeRO section to launch next; None once its edge or the longest step is reached."""
    own = [run for run in runs if structure_of(run["zero"]) == structure_of(zero)]
    ended = [Outcome(run["outcome"]) for run in own]
    if any(outcome is not Outcome.MEASURED and not outcome.infeasible for outcome in ended):
        return None
    if longest_step_s is not None and any(run.get("latency_s", 0.0) >= longest_step_s for run in own):
        return None
    return edge_walk({run["micro_batch"]: outcome is Outcome.MEASURED for run, outcome in zip(own, ended, strict=True)})


def _launch(spec: StudySpec, launcher: Launcher, zero: Mapping[str, Any], size: int, *, name: str) -> dict[str, Any]:
    """Launch a configuration and return its record."""
    request = launch_request(
        spec,
        launch_id=name,
        purpose="trial",
        overlay={**ds_config.batch_overlay(size), "zero_optimization": dict(zero)},
        start_profile_step=_WARM_UP + 1,
        end_profile_step=_MOST_STEPS,
    )
    record, report = follow(launcher, request, enough=_enough)
    run: dict[str, Any] = {
        "zero": {key: value for key, value in zero.items() if value is not None},
        "micro_batch": size,
        "outcome": report.outcome.value,
        "startup_s": round(report.startup_s, 4),
        "peak_bytes": record.peak_bytes,
    }
    if report.outcome is Outcome.MEASURED:
        metrics = record.metrics(flops_per_sample=0.0)
        run |= {f"{phase}_s": round(metrics[phase], 7) for phase in ("forward", "backward", "step", "latency")}
    shown = f"{1e3 * run['latency_s']:.0f} ms" if "latency_s" in run else report.failure_in_words
    _say(f"{run['zero']}, micro-batch {size}: {shown}")
    return run


def _enough(counted: Sequence[GlobalStep]) -> bool:
    return len(counted) >= _LEAST_STEPS and sum(step.latency_s for step in counted) >= _WINDOW_S


def _write(output: Path, record: Mapping[str, Any]) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(output, json.dumps(record, indent=1) + "\n")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
