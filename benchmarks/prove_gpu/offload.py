"""Offload with pinned memory: what it takes off the GPU, and what pinning does to the step."""

from __future__ import annotations

from typing import Any

from benchmarks.prove_gpu.context import Context, batch_overlay
from benchmarks.prove_gpu.filling import load_filling
from benchmarks.prove_gpu.proof import Status, Verdict
from optuna_dsat.outcome import Outcome

__all__ = ["offload"]

_BUCKET = 50_000_000
_KINDS: dict[str, tuple[str, ...]] = {
    "none": (),
    "optimizer": ("offload_optimizer",),
    "both": ("offload_optimizer", "offload_param"),
}
_LEAST_SHARE = 0.5
"""Of the bytes that the memory model says an offload takes off the GPU, so much must be seen."""


def offload(context: Context) -> Verdict:
    """Launch the model that fills the GPU at ZeRO 3 without offload, and with both offloads, pinned and not."""
    model = load_filling(context)
    micro_batch = 1
    peaks: dict[str, int] = {}
    predicted: dict[str, int] = {}
    figures: dict[str, Any] = {}
    wrong: list[str] = []
    with context.launcher(context.folder("offload")) as launcher:
        for kind, sections in _KINDS.items():
            for pinned in (True, False) if sections else (False,):
                places = {section: {"device": "cpu", "pin_memory": pinned} for section in sections}
                zero = {"stage": 3, "reduce_bucket_size": _BUCKET, **places}
                name = kind + ("-pinned" if pinned else "")
                overlay = batch_overlay(micro_batch, zero_optimization=zero)
                context.require(40.0)
                done = context.launch(launcher, model.script, overlay, launch_id=name, steps=3)
                peaks[name] = done.record.peak_bytes
                predicted[name] = model.predicted_bytes(zero, micro_batch)
                counted = done.record.counted
                figures[name] = {
                    "outcome": done.report.outcome.value,
                    "peak_bytes": peaks[name],
                    "predicted_bytes": predicted[name],
                    "rss_bytes": max((step.rss_bytes for step in done.record.steps), default=0),
                    "step_s": counted[-1].latency_s if counted else None,
                    "forked": done.forked,
                }
                if done.report.outcome is not Outcome.MEASURED:
                    wrong.append(f"{name}: {done.report.outcome.value}: {done.report.message}")
    figures["gpu_bytes"] = model.hardware.device_memory_bytes
    for name in (name for name in peaks if name.endswith("-pinned") and figures[name]["outcome"] == "measured"):
        saved, expected = peaks["none"] - peaks[name], predicted["none"] - predicted[name]
        figures[f"{name}_saved_bytes"], figures[f"{name}_expected_bytes"] = saved, expected
        if saved < _LEAST_SHARE * expected:
            wrong.append(f"{name} took {saved / 2**30:.2f} GiB off the GPU, {expected / 2**30:.2f} were predicted")
    if wrong:
        return Verdict(status=Status.FELL_SHORT, why="; ".join(wrong), figures=figures)
    why = f"With both offloads pinned {figures['both-pinned_saved_bytes'] / 2**30:.2f} GiB left the GPU."
    return Verdict(status=Status.PROVEN, why=why, figures=figures)
