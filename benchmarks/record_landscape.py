"""Record a real landscape: what becomes of one model under many configurations, launch by launch, on this machine.

    python -m benchmarks.record_landscape --job gpt
    python -m benchmarks.record_landscape OUTPUT.json SCRIPT DS_CONFIG [--stages 1 2 3] [--offload] [--buckets 5e6 5e8]
        [--gpus 1 | --cpu-ranks 2] [--device-memory 10GiB] [--longest-step 1] [-- SCRIPT_ARGS]

By time (``--job``, ``--longest-step``): every ZeRO stage and offload at micro-batches 1, 2, 3, 4, ... until a step
takes ``--longest-step`` seconds, and at one or two sizes beyond. Short launches find these sizes first; then each
configuration is launched ``--repeat`` times, each round in an order of its own. A launch beside which the machine was
not quiet (``benchmarks/recording/quiet.py`` says what that is) is repeated up to twice, and marked. ``--minutes`` thins
the sizes out until all of it fits.

By memory (otherwise): for each ZeRO stage, offload and reduce bucket, micro-batches 1, 2, 4, ... are launched until one
runs out of memory, then the edge between the last that ran and the first that did not is bisected. ``--device-memory``
imitates a smaller one: on a GPU by torch's per-process memory fraction, on the CPU by a limit on the ranks' data
segment; both give a genuine out-of-memory.

What is recorded can be searched: ``benchmarks.search_efficiency --recorded OUTPUT.json``; a job's record lies in
``benchmarks/landscapes`` and is part of every table. Interrupted, it keeps what it has and goes on from there when
started again. Launches are warm, as those of a search. The CUDA path goes through the tuner's own launcher and has not
been run on a GPU yet.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import secrets
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, chdir, closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.recorded import LANDSCAPES_FOLDER, key_of, summary
from benchmarks.recording.jobs import JOBS
from benchmarks.recording.quiet import QuietRule, Watch
from benchmarks.recording.rounds import Recorder
from optuna_dsat.config.op_builders import operators_of
from optuna_dsat.config.structures import STRUCTURES
from optuna_dsat.errors import DsatError
from optuna_dsat.launch.devices import cpu_devices
from optuna_dsat.launch.torchrun import TorchrunLauncher
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.atomic_write import write_text_atomic
from optuna_dsat.study.profile import measure_profile
from optuna_dsat.study.profiled import Profiled
from optuna_dsat.study.space import space_of
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.study.user_config import user_config
from optuna_dsat.tuning.devices import search_devices
from optuna_dsat.tuning.options import TuneOptions
from optuna_dsat.tuning.spec_builder import build_spec

__all__ = ["configurations", "edge_walk", "main"]

FORMAT = 2
"""1 had neither rounds nor a rule for quiet."""
_LARGEST = 2**14
_NAMES = ("torch", "deepspeed", "optuna", "optuna-dsat")
_LONGEST_STEP_S = 1.0
"""Of a job."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Record; see the module's docstring."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    cut = given.index("--") if "--" in given else len(given)
    args = _job_filled_in(_parser().parse_args(given[:cut]), given[cut + 1 :])
    with ExitStack() as stack:
        folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="landscape-")))
        args.output, folder = args.output.absolute(), folder.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if args.job:
            stack.enter_context(chdir(folder))  # what a script writes beside itself goes there, too
        try:
            _run(args, folder, shlex.join(["python", "-m", "benchmarks.record_landscape", *given]))
        except (DsatError, ValueError) as error:
            raise SystemExit(str(error)) from error
        except KeyboardInterrupt:
            raise SystemExit(f"Interrupted: {args.output} has what was launched; start it again to go on.") from None


def _job_filled_in(args: argparse.Namespace, rest: list[str]) -> argparse.Namespace:
    """Return the arguments with what a job says, and the script's own as ``script_args``.

    Raises:
        SystemExit: If neither a job nor a script is named.
    """
    args.script_args = rest
    if args.job:
        job = JOBS[args.job]
        args.output = args.output or LANDSCAPES_FOLDER / f"{args.job}.json"
        args.script, args.ds_config, args.script_args = job.script, job.config, [*job.args, *rest]
        args.stages, args.offload = args.stages or [0, 1, 2, 3], True
        args.longest_step = args.longest_step or _LONGEST_STEP_S
    elif not (args.output and args.script and args.ds_config):
        raise SystemExit("Name a job (--job gpt), or OUTPUT.json SCRIPT DS_CONFIG.")
    args.stages = args.stages or [1, 2, 3]
    args.repeat = args.repeat or (2 if args.longest_step else 1)
    return args


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
        TorchrunLauncher(spec.study_dir, devices=devices, max_slots=spec.max_slots, warm=True, on_notice=_say)
    ) as launcher:
        profiled = measure_profile(spec, launcher, on_attempt=lambda _: None, on_report=lambda _report, _record: None)
        spec = profiled.followed_by(spec)
        launcher.prepare(profiled.preload, operators=operators_of(spec.ds_config, space_of(spec, profiled)))
        record = _begin(args.output, spec, profiled, command=command, device=devices.devices[0].name)
        buckets = [int(bucket) for bucket in args.buckets]
        recorder = Recorder(
            spec=spec,
            launcher=launcher,
            watch=Watch(
                rule=QuietRule(**record["quiet_rule"]),
                patience_s=args.patience if args.longest_step else 0.0,
                on_wait=_say,
            ),
            record=record,
            write=partial(_write, args.output, record),
            structures=list(configurations(args.stages, offload=args.offload, buckets=buckets)),
            longest_step_s=args.longest_step or 0.0,
            rounds=args.repeat,
            within_s=60 * args.minutes,
        )
        if args.longest_step:
            recorder.run()
        else:
            _walk_to_edges(recorder)
    told = record["summary"]
    print(
        f"{told['launches']} launches of {told['configurations']} configurations in {args.output}: they differ by "
        f"{told['noise']:.1%} from launch to launch, {told['not_quiet_share']:.0%} were not quiet, "
        f"{told['repeated_share']:.0%} are repeats"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.record_landscape", description=__doc__.split("\n")[0])
    parser.add_argument("output", type=Path, nargs="?", help="file that receives the landscape (JSON)")
    parser.add_argument("script", type=Path, nargs="?")
    parser.add_argument("ds_config", type=Path, nargs="?")
    parser.add_argument("--job", choices=list(JOBS), help="record this one, by time, into benchmarks/landscapes")
    parser.add_argument("--stages", type=int, nargs="+", choices=[0, 1, 2, 3], help="default 1 2 3, of a job all")
    parser.add_argument("--offload", action="store_true", help="try the offloads of each stage as well")
    parser.add_argument(
        "--buckets", type=float, nargs="+", default=[], help="reduce_bucket_size, in elements (default the config's)"
    )
    parser.add_argument("--gpus", type=int, help="GPUs of a launch (default all)")
    parser.add_argument("--cpu-ranks", type=int, help="run on the CPU with this many ranks")
    parser.add_argument("--device-memory", help="what one rank may allocate, such as 10GiB")
    parser.add_argument(
        "--longest-step", type=float, metavar="SECONDS", help="record by time, up to steps of this length (a job: 1)"
    )
    parser.add_argument("--repeat", type=int, help="launches of each configuration (default 2 by time, 1 by memory)")
    parser.add_argument("--minutes", type=float, default=15.0, help="by time: what all may take (default 15)")
    parser.add_argument(
        "--patience", type=float, default=300.0, metavar="SECONDS", help="for all waits for quiet (default 300)"
    )
    parser.add_argument("--folder", type=Path, help="folder of the launches (default one that is removed at the end)")
    return parser


def configurations(stages: Sequence[int], *, offload: bool, buckets: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield ZeRO sections: every stage with every offload that it knows and every bucket, the config's without any."""
    for structure in STRUCTURES:
        if structure.stage not in stages or (structure.offloads and not offload):
            continue
        sized = [{"reduce_bucket_size": bucket} for bucket in buckets] if structure.stage > 0 else []
        for section in sized or [{}]:
            yield {**structure.zero_section(), **section}


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


def _begin(output: Path, spec: StudySpec, profiled: Profiled, *, command: str, device: str) -> dict[str, Any]:
    """Return the record so far, a new one with the profile if there is none.

    Raises:
        ValueError: If the record was begun on another machine or with other versions.
    """
    hardware = {
        "device": device,
        "ranks": spec.slots_per_trial,
        "kind": spec.device,
        "cpu": cpu_devices(1).devices[0].name,
        "cores": os.cpu_count(),
        "host_memory_bytes": profiled.profile.host_memory_bytes,
    }
    versions = {"python": platform.python_version(), **_installed(profiled)}
    if output.is_file():
        found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        if (found["hardware"], found["versions"]) != (hardware, versions):
            raise ValueError(f"{output} was begun on another machine or with other versions: record into another file.")
        return found
    record: dict[str, Any] = {
        "format": FORMAT,
        "recorded": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": command,
        "hardware": hardware,
        "versions": versions,
        "quiet_rule": asdict(QuietRule()),
        "device_memory_bytes": profiled.profile.device_memory_bytes,
        "user_config": user_config(spec, data_parallel_size=profiled.data_parallel_size)[0],
        "profile": profiled.profile.to_json(),
        "seed": secrets.randbelow(2**31),
        "runs": [],
    }
    _write(output, record)
    return record


def _installed(profiled: Profiled) -> dict[str, str]:
    """Return the versions of what every launch uses, and of the trainer's library."""
    names = [*_NAMES, *(["transformers", "accelerate"] if profiled.trainer is not None else [])]
    return {name: importlib.metadata.version(name) for name in names}


def _walk_to_edges(recorder: Recorder) -> None:
    """Record every lineage to its edge of memory."""
    for zero in recorder.structures:
        _record(recorder, zero)
    recorder.record["summary"] = summary(recorder.record["runs"])
    recorder.write()


def _record(recorder: Recorder, zero: Mapping[str, Any]) -> None:
    """Walk one lineage to its edge."""
    key, all_runs = key_of(zero), recorder.record["runs"]
    while True:
        runs = [run for run in all_runs if key_of(run["zero"]) == key]
        size = edge_walk({run["micro_batch"]: run["outcome"] == Outcome.MEASURED for run in runs})
        if size is None:
            return
        for _ in range(recorder.rounds):
            recorder.watch.wait()
            run = recorder.launch(zero, size)
            all_runs.append(run)
            recorder.write()
            shown = f"{1e3 * run['latency_s']:.0f} ms" if run["outcome"] == Outcome.MEASURED else run["outcome"]
            _say(f"{run['zero']}, micro-batch {size}: {shown}")
            if run["outcome"] != Outcome.MEASURED:
                if not Outcome(run["outcome"]).infeasible:
                    return  # no edge can be found where launches fail for another reason
                break


def _write(output: Path, record: Mapping[str, Any]) -> None:
    """Write the record in one piece, a launch a line."""
    output.parent.mkdir(parents=True, exist_ok=True)
    parts = []
    for key, value in record.items():
        if key in ("runs", "scouts") and value:
            text = "[\n" + ",\n".join(f"  {json.dumps(run)}" for run in value) + "\n ]"
        else:
            text = json.dumps(value)
        parts.append(f" {json.dumps(key)}: {text}")
    write_text_atomic(output, "{\n" + ",\n".join(parts) + "\n}\n")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
