"""A whole guided search of the model that fills the GPU, which goes on from part to part."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.prove_gpu.context import Command, Context, dsat
from benchmarks.prove_gpu.filling import load_filling
from benchmarks.prove_gpu.proof import ROOT, PartOverError, Status, Verdict, replace

__all__ = ["guided"]

_TRIALS, _CONFIRM = 12, 2
_INTERRUPTED = 130


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
