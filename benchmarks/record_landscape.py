"""Record a real landscape: what becomes of one model under many configurations, launch by launch, on this machine.

    python -m benchmarks.record_landscape OUTPUT.json SCRIPT DS_CONFIG [--stages 1 2 3] [--offload] [--buckets 5e6 5e8]
        [--gpus 1 | --cpu-ranks 2] [--device-memory 10GiB] [--repeat 1] [-- SCRIPT_ARGS]

For each ZeRO stage, offload and reduce bucket, micro-batches 1, 2, 4, ... are launched until one runs out of memory,
then the edge between the last that ran and the first that did not is bisected. ``--device-memory`` imitates a smaller
one: on a GPU by torch's per-process memory fraction, on the CPU by a limit on the ranks' data segment; both give a
genuine out-of-memory. What is recorded can be searched: ``benchmarks.search_efficiency --recorded OUTPUT.json``.

Interrupted, it keeps what it has and goes on from there when started again. The CUDA path goes through the tuner's own
launcher and has not been run on a GPU yet.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.recorded import key_of
from optuna_dsat.config import ds_config
from optuna_dsat.launch.follow import follow
from optuna_dsat.launch.protocol import Launcher
from optuna_dsat.launch.torchrun import TorchrunLauncher
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.atomic_write import write_text_atomic
from optuna_dsat.study.launch_requests import launch_request
from optuna_dsat.study.profile import measure_profile
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.tuning.devices import search_devices
from optuna_dsat.tuning.options import TuneOptions
from optuna_dsat.tuning.spec_builder import build_spec

__all__ = ["configurations", "edge_walk", "main"]

FORMAT = 1
_LARGEST = 2**14
_NAMES = ("torch", "deepspeed", "optuna-dsat")


def main(arguments: Sequence[str] | None = None) -> None:
    """Record; see the module's docstring."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    cut = given.index("--") if "--" in given else len(given)
    own, rest = given[:cut], given[cut + 1 :]
    args = _parser().parse_args(own)
    options = TuneOptions(
        script=args.script,
        ds_config=args.ds_config,
        script_args=rest,
        gpus_per_trial=args.gpus,
        cpu_ranks=args.cpu_ranks,
        device_memory=args.device_memory,
        output_dir=args.folder,
        study=args.output.stem,
        zero_stages=args.stages,
    )
    devices = search_devices(options)
    spec = build_spec("guided", options, devices)
    command = shlex.join(["python", "-m", "benchmarks.record_landscape", *given])
    with closing(TorchrunLauncher(spec.study_dir, devices=devices, max_slots=spec.max_slots)) as launcher:
        record = _begin(args.output, spec, launcher, command=command, device=devices.devices[0].name)
        for overlay in configurations(args.stages, offload=args.offload, buckets=[int(b) for b in args.buckets]):
            _record(record, spec, launcher, overlay, output=args.output, repeat=args.repeat)
    print(f"{len(record['runs'])} runs in {args.output}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.record_landscape", description=__doc__.split("\n")[0])
    parser.add_argument("output", type=Path, help="file that receives the landscape (JSON)")
    parser.add_argument("script", type=Path)
    parser.add_argument("ds_config", type=Path)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3], choices=[0, 1, 2, 3])
    parser.add_argument("--offload", action="store_true", help="try the offloads of each stage as well")
    parser.add_argument("--buckets", type=float, nargs="+", default=[5e6, 5e8], help="reduce_bucket_size, in elements")
    parser.add_argument("--gpus", type=int, help="GPUs of a launch (default all)")
    parser.add_argument("--cpu-ranks", type=int, help="run on the CPU with this many ranks")
    parser.add_argument("--device-memory", help="what one rank may allocate, such as 10GiB")
    parser.add_argument("--repeat", type=int, default=1, help="launches of each configuration that ran (default 1)")
    parser.add_argument("--folder", type=Path, default=Path("landscape-launches"), help="folder of the launches")
    return parser


def configurations(stages: Sequence[int], *, offload: bool, buckets: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield ZeRO sections: every stage with every offload that it knows and every bucket."""
    for stage in stages:
        kinds: list[tuple[str, ...]] = [()]
        if offload and stage > 0:
            kinds.append(("offload_optimizer",))
        if offload and stage == 3:
            kinds += [("offload_param",), ("offload_optimizer", "offload_param")]
        for kind in kinds:
            for bucket in buckets if stage > 0 else buckets[:1]:
                yield {
                    "stage": stage,
                    **{key: {"device": "cpu", "pin_memory": True} for key in kind},
                    **({"reduce_bucket_size": bucket} if stage > 0 else {}),
                }


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


def _begin(output: Path, spec: StudySpec, launcher: Launcher, *, command: str, device: str) -> dict[str, Any]:
    """Return the record so far, with a profile."""
    if output.is_file():
        found: dict[str, Any] = json.loads(output.read_text())
        return found
    profiled = measure_profile(spec, launcher, on_attempt=lambda _: None, on_report=lambda _report, _record: None)
    record: dict[str, Any] = {
        "format": FORMAT,
        "recorded": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": command,
        "hardware": {"device": device, "ranks": spec.slots_per_trial, "kind": spec.device, "cores": os.cpu_count()},
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in _NAMES},
        },
        "device_memory_bytes": profiled.profile.device_memory_bytes,
        "user_config": dict(spec.ds_config),
        "profile": profiled.profile.to_json(),
        "runs": [],
    }
    _write(output, record)
    return record


def _record(
    record: dict[str, Any], spec: StudySpec, launcher: Launcher, zero: dict[str, Any], *, output: Path, repeat: int
) -> None:
    """Walk one lineage to its edge."""
    key = key_of(zero)
    while True:
        runs = [run for run in record["runs"] if key_of(run["zero"]) == key]
        size = edge_walk({run["micro_batch"]: run["outcome"] == Outcome.MEASURED for run in runs})
        if size is None:
            return
        for _ in range(repeat):
            run = _launch(spec, launcher, zero, size, number=len(record["runs"]))
            record["runs"].append(run)
            _write(output, record)
            shown = f"{1e3 * run['latency_s']:.0f} ms" if run["outcome"] == Outcome.MEASURED else run["outcome"]
            print(f"{zero}, micro-batch {size}: {shown}", file=sys.stderr, flush=True)
            if run["outcome"] != Outcome.MEASURED:
                if run["outcome"] not in (Outcome.OUT_OF_MEMORY, Outcome.HOST_OUT_OF_MEMORY):
                    return  # no edge can be found where launches fail for another reason
                break


def _launch(spec: StudySpec, launcher: Launcher, zero: dict[str, Any], size: int, *, number: int) -> dict[str, Any]:
    overlay = {**ds_config.batch_overlay(size), "zero_optimization": zero}
    request = launch_request(spec, launch_id=f"run-{number:04d}", purpose="trial", overlay=overlay)
    record, report = follow(launcher, request)
    run: dict[str, Any] = {
        "zero": zero,
        "micro_batch": size,
        "outcome": report.outcome.value,
        "startup_s": report.startup_s,
        "peak_bytes": record.peak_bytes,
    }
    if report.outcome is Outcome.MEASURED:
        metrics = record.metrics(flops_per_sample=0.0)
        run |= {f"{name}_s": metrics[name] for name in ("forward", "backward", "step", "latency")}
    return run


def _write(output: Path, record: Mapping[str, Any]) -> None:
    """Write the record in one piece."""
    output.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(output, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
