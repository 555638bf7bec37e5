"""Offload with pinned memory: what it takes off the GPU, and what pinning does to the step."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.prove_gpu.context import Context, batch_overlay
from benchmarks.prove_gpu.filling import load_filling
from benchmarks.prove_gpu.proof import Status, Verdict, replace
from optuna_dsat.outcome import Outcome

__all__ = ["offload"]

_BUCKET = 50_000_000
_LAUNCH_S = 40.0
"""What a launch may take, at a guess."""
_KINDS: dict[str, tuple[str, ...]] = {
    "none": (),
    "optimizer": ("offload_optimizer",),
    "both": ("offload_optimizer", "offload_param"),
}
_LEAST_SHARE = 0.5
"""Of the bytes that the memory model says an offload takes off the GPU, so much must be seen."""


def offload(context: Context) -> Verdict:
    """Launch the model that fills the GPU at ZeRO 3 without offload, and with offloads, pinned and not.

    What earlier parts launched is kept.
    """
    model = load_filling(context)
    folder = context.folder("offload-pinned")
    kept = folder / "launches.json"
    launches: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}
    with context.launcher(folder / "launches") as launcher:
        for name, zero in _configurations():
            if name in launches:
                continue
            context.require(_LAUNCH_S)
            done = context.launch(
                launcher, model.script, batch_overlay(1, zero_optimization=zero), launch_id=name, steps=3
            )
            counted = done.record.counted
            launches[name] = {
                "outcome": done.report.outcome.value,
                "message": done.report.message,
                "peak_bytes": done.record.peak_bytes,
                "predicted_bytes": model.predicted_bytes(zero, 1),
                "rss_bytes": max((step.rss_bytes for step in done.record.steps), default=0),
                "step_s": counted[-1].latency_s if counted else None,
                "forked": done.forked,
            }
            replace(kept, json.dumps(launches, indent=1))
    return _judged(launches)


def _configurations() -> Iterator[tuple[str, dict[str, Any]]]:
    for kind, sections in _KINDS.items():
        for pinned in (True, False) if sections else (False,):
            places = {section: {"device": "cpu", "pin_memory": pinned} for section in sections}
            yield kind + ("-pinned" if pinned else ""), {"stage": 3, "reduce_bucket_size": _BUCKET, **places}


def _judged(launches: Mapping[str, Any]) -> Verdict:
    figures: dict[str, Any] = dict(launches)
    wrong = [
        f"{name}: {launch['outcome']}: {launch['message']}"
        for name, launch in launches.items()
        if launch["outcome"] != Outcome.MEASURED
    ]
    whole = launches["none"]
    for name, launch in launches.items():
        if not name.endswith("-pinned") or launch["outcome"] != Outcome.MEASURED:
            continue
        saved, expected = (whole[key] - launch[key] for key in ("peak_bytes", "predicted_bytes"))
        figures[f"{name}_saved_bytes"], figures[f"{name}_expected_bytes"] = saved, expected
        if launches[name.removesuffix("-pinned")]["step_s"]:
            figures[f"{name}_step_s"] = launch["step_s"]
            figures[f"{name}_step_over_unpinned"] = launch["step_s"] / launches[name.removesuffix("-pinned")]["step_s"]
        if saved < _LEAST_SHARE * expected:
            wrong.append(f"{name} took {saved / 2**30:.2f} GiB off the GPU, {expected / 2**30:.2f} were predicted")
    if wrong:
        return Verdict(status=Status.FELL_SHORT, why="; ".join(wrong), figures=figures)
    one, both = (figures[f"{name}-pinned_saved_bytes"] / 2**30 for name in ("optimizer", "both"))
    why = f"Pinned, the optimizer's offload took {one:.2f} GiB off the GPU, both took {both:.2f} GiB."
    return Verdict(status=Status.PROVEN, why=why, figures=figures)
