"""A whole guided search of the model that fills the GPU, and a recorded landscape; both go on from part to part."""

from __future__ import annotations

import json
import shlex
import sys
from typing import Any

from benchmarks.prove_gpu.context import Command, Context, dsat
from benchmarks.prove_gpu.filling import load_filling
from benchmarks.prove_gpu.proof import ROOT, PartOverError, Status, Verdict, replace, scrubbed
from benchmarks.prove_gpu.sizing import size_for

__all__ = ["guided", "landscape"]

_TRIALS, _CONFIRM = 12, 2
_INTERRUPTED = 130
_LANDSCAPE_SHARE = 1 / 8
"""Share of the GPU that the landscape's launches may allocate: its model is small, for they are many."""
STAGES = (2, 3)
"""ZeRO stages of the landscape; that of ``examples/gpt`` is among them, as a search of the record starts from it."""


def guided(context: Context) -> Verdict:
    """Search the model that fills the GPU; a search that an earlier part interrupted is resumed."""
    model = load_filling(context)
    folder = context.folder("guided-search")
    storage = f"sqlite:///{folder}/study.db"
    if any(folder.glob("filling/trial-*")):
        words, shown = dsat("resume", "filling", "--storage", storage, "--json")
    else:
        for left in folder.glob("study.db*"):  # of a search that an earlier part ended before its first trial
            left.unlink()
        options = ("--max-trials", str(_TRIALS), "--confirm", str(_CONFIRM), "--zero-stages", "0", "1", "2", "3")
        places = ("--study", "filling", "--storage", storage, "--output-dir", str(folder), "--json")
        gpus = ("--gpus-per-trial", str(len(context.devices.devices)))
        script = (str(model.script.script), str(model.script.config))
        words, shown = dsat("guided", *script, *options, *gpus, *places, "--", *model.script.args)
    done = context.run(words, cwd=ROOT, shown=shown, log="guided", clean_stop=True)
    if done.exit_code == _INTERRUPTED:
        raise PartOverError
    if done.exit_code:
        figures = {"stderr": done.stderr.splitlines()[-12:]}
        why = f"It exited with {done.exit_code}: {done.last_line}"
        return Verdict(status=Status.FAILED, why=why, figures=figures, command=shown)
    return _found(context, done, gpu_bytes=model.hardware.device_memory_bytes)


def _found(context: Context, done: Command, *, gpu_bytes: int) -> Verdict:
    result = done.result()
    figures: dict[str, Any] = {
        "reason": result["reason"],
        "launches": result["launches"],
        "gpu_minutes": result["slot_minutes"],
        "flops_per_gpu": result["value"],
        "flops_per_gpu_low": result["low"],
        "flops_per_gpu_high": result["high"],
        "throughput_samples_per_s": result["metrics"].get("throughput"),
        "speed_up": result["speed_up"],
        "peak_share": result["metrics"].get("peak_allocated_bytes", 0.0) / gpu_bytes,
        "config": result["config"],
    }
    replace(context.state / "best_ds_config.json", json.dumps(result["config"], indent=2))
    ended = ", ".join(f"{count} {outcome}" for outcome, count in sorted(result["launches"].items()))
    speed_up = result["speed_up"]
    others = set(result["launches"]) - {"measured", "out_of_memory", "host_out_of_memory", "pruned"}
    words = "unknown" if speed_up is None else f"{speed_up:.2f}"
    why = f"{result['reason']}: speed-up {words} over micro-batch 1 at ZeRO 1, {figures['peak_share']:.0%} of the GPU; "
    why += f"launches: {ended}."
    good = speed_up is not None and speed_up >= 1 and result["low"] is not None and not others
    status = Status.PROVEN if good else Status.FELL_SHORT
    return Verdict(status=status, why=why, figures=figures, command=done.shown)


def landscape(context: Context) -> Verdict:
    """Record what becomes of a small GPT at two ZeRO stages, and search the record."""
    folder = context.folder("landscape")
    output = folder / "landscape.json"
    gpus = str(len(context.devices.devices))
    limit_bytes = round(context.machine.memory_bytes * _LANDSCAPE_SHARE)
    size = size_for(limit_bytes)
    example = ROOT / "examples" / "gpt"
    script = [str(example / "train.py"), str(example / "ds_config.json")]
    options = [
        "--stages",
        *map(str, STAGES),
        "--buckets",
        "5e6",
        "--gpus",
        gpus,
        "--device-memory",
        f"{limit_bytes // 2**20}MiB",
    ]
    arguments = ["--deepspeed_config", script[1], *size.arguments()]
    words = [str(output), *script, *options, "--folder", str(folder), "--", *arguments]
    shown = shlex.join(["python", "-m", "benchmarks.record_landscape", *words])
    command = [sys.executable, "-m", "benchmarks.record_landscape", *words]
    done = context.run(command, cwd=ROOT, shown=shown, log="landscape", clean_stop=True)
    if done.exit_code:
        why = f"It exited with {done.exit_code}: {done.last_line}"
        return Verdict(status=Status.FAILED, why=why, figures={"stderr": done.stderr.splitlines()[-12:]}, command=shown)
    recorded = output.read_text(encoding="utf-8")
    replace(context.state / output.name, json.dumps(scrubbed(json.loads(recorded), state=context.state), indent=1))
    runs = json.loads(recorded)["runs"]
    outcomes = [run["outcome"] for run in runs]
    figures: dict[str, Any] = {
        "runs": len(runs),
        "outcomes": {one: outcomes.count(one) for one in sorted(set(outcomes))},
    }
    figures["edges"] = {
        f"zero-{stage}": max((r["micro_batch"] for r in _measured(runs, stage)), default=0) for stage in STAGES
    }
    if not all(figures["edges"].values()) or set(outcomes) - {"measured", "out_of_memory"}:
        why = f"Launches ended as {figures['outcomes']}."
        return Verdict(status=Status.FELL_SHORT, why=why, figures=figures, command=shown)
    searched = [*("--recorded", str(output)), *("--methods", "guided", "--seeds", "1", "--budget", "8")]
    played = context.run(
        [sys.executable, "-m", "benchmarks.search_efficiency", *searched],
        cwd=ROOT,
        shown=shlex.join(["python", "-m", "benchmarks.search_efficiency", *searched]),
        log="landscape-search",
    )
    figures["searched"] = played.exit_code == 0
    why = f"{len(runs)} launches are in landscape.json, which can {'' if figures['searched'] else 'not '}be searched."
    status = Status.PROVEN if figures["searched"] else Status.FELL_SHORT
    return Verdict(status=status, why=why, figures=figures, command=shown)


def _measured(runs: list[dict[str, Any]], stage: int) -> list[dict[str, Any]]:
    return [run for run in runs if run["zero"].get("stage") == stage and run["outcome"] == "measured"]
