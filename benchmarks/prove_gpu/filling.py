"""A model that fills the GPU: its profile, and the out-of-memory edge against the memory model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.prove_gpu.context import Context, Launched, Script, batch_overlay
from benchmarks.prove_gpu.proof import ROOT, NotRunError, Status, Verdict, replace
from benchmarks.prove_gpu.runner import Check
from benchmarks.prove_gpu.sizing import size_for
from optuna_dsat.config import ds_config, user_file
from optuna_dsat.cost.memory import Hardware, ModelProfile, estimate, largest_micro_batch
from optuna_dsat.outcome import Outcome
from optuna_dsat.study.profile.profile import measure_profile
from optuna_dsat.tuning.options.tune_options import TuneOptions
from optuna_dsat.tuning.spec_builder import build_spec

__all__ = ["EDGES", "Filling", "edge_checks", "filling", "load_filling", "next_size"]

GPT = ROOT / "examples" / "gpt" / "train.py"
FILL_LOW, FILL_HIGH = 0.6, 0.8
TOLERANCE = 0.10
"""Relative error of predicted edges and peaks up to which the memory model counts as right."""
_CLOSE = 0.03
"""The edge is known when what fits and what does not are this close, relatively."""
_MOST_LAUNCHES = 8
_LAUNCH_S = 60.0
"""What a launch of the filling model may take, at a guess."""
_CPU = {"device": "cpu", "pin_memory": True}
_BUCKET = 50_000_000
EDGES: Mapping[str, Mapping[str, Any]] = {
    "zero-0": {"stage": 0},
    "zero-1": {"stage": 1, "reduce_bucket_size": _BUCKET},
    "zero-2": {"stage": 2, "reduce_bucket_size": _BUCKET},
    "zero-3": {"stage": 3, "reduce_bucket_size": _BUCKET},
    "zero-2-offload-optimizer": {"stage": 2, "reduce_bucket_size": _BUCKET, "offload_optimizer": _CPU},
    "zero-3-offload-both": {
        "stage": 3,
        "reduce_bucket_size": _BUCKET,
        "offload_optimizer": _CPU,
        "offload_param": _CPU,
    },
}
"""The six configurations whose edges are looked for."""


@dataclass(frozen=True, kw_only=True)
class Filling:
    """The model that fills the GPU."""

    script: Script
    profile: ModelProfile
    hardware: Hardware

    def config(self, zero: Mapping[str, Any]) -> dict[str, Any]:
        """Return the DeepSpeed config with this ZeRO section."""
        own = ds_config.effective(user_file.load(self.script.config).raw)
        return ds_config.merge(own, {"zero_optimization": dict(zero)})

    def predicted_bytes(self, zero: Mapping[str, Any], micro_batch: int) -> int:
        """Return the peak that the memory model predicts."""
        config = self.config(zero)
        return estimate(self.profile, config, micro_batch=micro_batch, hardware=self.hardware).device_bytes

    def predicted_edge(self, zero: Mapping[str, Any]) -> int:
        """Return the largest micro-batch that the memory model predicts to fit."""
        return largest_micro_batch(self.profile, self.config(zero), hardware=self.hardware)


def _write_config(context: Context, path: Path) -> None:
    # Half precision takes cuDNN's attention, which the stand-in does not have.
    half = {"bf16" if context.machine.has_bf16 else "fp16": {"enabled": True}}
    adam = {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "optimizer": adam,
        "zero_optimization": {"stage": 1, "reduce_bucket_size": _BUCKET},
        **({} if context.machine.stand_in else half),
        "steps_per_print": 1_000_000,
    }
    replace(path, json.dumps(config, indent=2))


def filling(context: Context) -> Verdict:
    """Choose a model that fills the GPU, profile it, and run it where it is predicted to fill seven tenths."""
    folder = context.folder("filling")
    script = Script(
        script=GPT, config=folder / "ds_config.json", args=size_for(context.machine.memory_bytes).arguments()
    )
    script = Script(script=GPT, config=script.config, args=("--deepspeed_config", str(script.config), *script.args))
    _write_config(context, script.config)
    options = TuneOptions(
        script=script.script,
        ds_config=script.config,
        script_args=list(script.args),
        zero_stages=[0, 1, 2, 3],
        output_dir=folder,
        study="profile",
        trial_timeout=max(1.0, context.left_s - 10.0),
    )
    spec = build_spec("guided", options, context.devices)
    with context.launcher(spec.study_dir, warm=False) as launcher:
        result = measure_profile(spec, launcher, on_attempt=lambda _: None, on_report=lambda _report, _record: None)
    slots = len(context.devices.devices)
    model = Filling(
        script=script,
        profile=result.profile,
        hardware=Hardware(
            world_size=slots,
            ranks_per_node=slots,
            device_memory_bytes=result.profile.device_memory_bytes,
            host_memory_bytes=result.profile.host_memory_bytes,
        ),
    )
    kept = {"profile": result.profile.to_json(), "args": list(script.args[2:]), "slots": slots}
    replace(folder / "filling.json", json.dumps(kept, indent=1))
    return _fill(context, model, folder, measured_with=result.measured_with)


def _fill(context: Context, model: Filling, folder: Path, *, measured_with: str) -> Verdict:
    zero = EDGES["zero-1"]
    whole = model.hardware.device_memory_bytes
    edge = model.predicted_edge(zero)
    figures: dict[str, Any] = {
        "model": " ".join(model.script.args[2:]),
        "params": model.profile.params,
        "activation_bytes_per_sample": model.profile.activation_bytes_per_sample,
        "gpu_bytes": whole,
        "profiled_at": measured_with,
        "predicted_edge": edge,
    }
    if edge < 1:
        return Verdict(
            status=Status.FELL_SHORT, why="The memory model says that not even one sample fits.", figures=figures
        )
    middle = min(range(1, edge + 1), key=lambda size: abs(model.predicted_bytes(zero, size) / whole - 0.7))
    share = model.predicted_bytes(zero, middle) / whole
    with context.launcher(folder / "launches") as launcher:
        launched = context.launch(
            launcher, model.script, batch_overlay(middle, zero_optimization=zero), launch_id="middle", steps=4
        )
    figures |= {"micro_batch": middle, "predicted_share": share, "outcome": launched.report.outcome.value}
    figures |= {"measured_share": launched.record.peak_bytes / whole, **_times(launched)}
    if launched.report.outcome is not Outcome.MEASURED:
        return Verdict(status=Status.FAILED, why=f"The launch: {launched.report.message}", figures=figures)
    measured = figures["measured_share"]
    right = FILL_LOW <= measured <= FILL_HIGH
    why = f"Micro-batch {middle} takes {measured:.0%} of the GPU; {share:.0%} were predicted."
    return Verdict(status=Status.PROVEN if right else Status.FELL_SHORT, why=why, figures=figures)


def _times(launched: Launched) -> dict[str, float]:
    counted = launched.record.counted
    if not counted:
        return {}
    seconds = sum(step.latency_s for step in counted)
    samples_per_s = sum(step.samples for step in counted) / seconds if seconds > 0 else 0.0
    return {
        "startup_s": launched.report.startup_s,
        "step_s": seconds / len(counted),
        "samples_per_s": samples_per_s,
    }


def load_filling(context: Context) -> Filling:
    """Return the model that the check ``filling`` chose.

    Raises:
        NotRunError: If it chose none.
    """
    folder = context.folder("filling")
    if not (folder / "filling.json").is_file():
        raise NotRunError("there is no model that fills the GPU (see the check `filling`)")
    kept = json.loads((folder / "filling.json").read_text(encoding="utf-8"))
    config = folder / "ds_config.json"
    profile = ModelProfile.from_json(kept["profile"])
    return Filling(
        script=Script(script=GPT, config=config, args=("--deepspeed_config", str(config), *kept["args"])),
        profile=profile,
        hardware=Hardware(
            world_size=kept["slots"],
            ranks_per_node=kept["slots"],
            device_memory_bytes=profile.device_memory_bytes,
            host_memory_bytes=profile.host_memory_bytes,
        ),
    )


def next_size(known: Mapping[int, bool], *, predicted: int) -> int | None:
    """Return the micro-batch to launch next on the way to the edge, None where it is known.

    Half of what is predicted comes first, for its peak; then what is predicted; from there steps that double, until
    one fits and one does not; then the middle of the two.

    Args:
        known: Micro-batch -> whether it fitted.
        predicted: Largest micro-batch that is predicted to fit, at least 1.
    """
    half, stride = max(1, predicted // 2), max(1, round(predicted * _CLOSE))
    if half not in known:
        return half
    fits = max((size for size, fitted in known.items() if fitted), default=0)
    bursts = min((size for size, fitted in known.items() if not fitted), default=None)
    if bursts is None:
        beyond = sum(size > predicted for size in known)
        return predicted if predicted not in known else predicted + stride * 2**beyond
    if bursts - fits <= max(1, round(fits * _CLOSE)):
        return None
    below = predicted - stride * 2 ** (sum(not fitted for fitted in known.values()) - 1)
    near_prediction = half < bursts <= predicted and fits <= half
    return below if near_prediction and fits < below < bursts else (fits + bursts) // 2


def edge_checks() -> Iterator[Check[Context]]:
    """Yield a check for each configuration whose edge is looked for."""
    for name in EDGES:

        def run(context: Context, name: str = name) -> Verdict:
            return _edge(context, name)

        yield Check(
            name=f"edge-{name}",
            asked=f"Out-of-memory edge and peaks at {name} are within {TOLERANCE:.0%} of the memory model's.",
            run=run,
            needs_s=2 * _LAUNCH_S,
            values=True,
        )


def _edge(context: Context, name: str) -> Verdict:
    model, zero = load_filling(context), EDGES[name]
    predicted = model.predicted_edge(zero)
    if predicted < 1:
        return Verdict(status=Status.FELL_SHORT, why="The memory model says that not even one sample fits.")
    folder = context.folder(f"edge-{name}")
    runs = _edge_runs(context, model, name, folder, predicted=predicted)
    fitted = {run["micro_batch"]: run for run in runs if run["outcome"] == Outcome.MEASURED}
    others = {run["outcome"] for run in runs} - {Outcome.MEASURED, Outcome.OUT_OF_MEMORY}
    figures: dict[str, Any] = {"predicted_edge": predicted, "runs": runs, "launches": len(runs)}
    if others or not fitted:
        why = f"A launch ended otherwise: {[run['message'] for run in runs if run['outcome'] != Outcome.MEASURED][-1]}"
        return Verdict(status=Status.FAILED, why=why, figures=figures)
    edge = max(fitted)
    burst = min((run["micro_batch"] for run in runs if run["micro_batch"] not in fitted), default=0)
    errors = [run["predicted_bytes"] / run["peak_bytes"] - 1 for run in fitted.values() if run["peak_bytes"]]
    worst = max(errors, key=abs, default=1.0)
    off = predicted / edge - 1
    figures |= {"edge": edge, "first_out_of_memory": burst, "edge_error": off, "worst_peak_error": worst}
    figures |= {"largest_peak_bytes": fitted[edge]["peak_bytes"], "gpu_bytes": model.hardware.device_memory_bytes}
    right = abs(off) <= max(TOLERANCE, 1 / edge) and abs(worst) <= TOLERANCE and burst > 0
    why = (
        f"{edge} fit, {predicted} were predicted ({off:+.1%}); peaks were predicted within {abs(worst):.1%} "
        f"({len(errors)} launches)."
    )
    if not burst:
        why += f" No launch ran out of memory within {_MOST_LAUNCHES} launches."
    return Verdict(status=Status.PROVEN if right else Status.FELL_SHORT, why=why, figures=figures)


def _edge_runs(context: Context, model: Filling, name: str, folder: Path, *, predicted: int) -> list[dict[str, Any]]:
    """Launch on the way to the edge; what earlier parts launched is kept beside the launches."""
    kept = folder / "runs.json"
    runs: list[dict[str, Any]] = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else []
    with context.launcher(folder / "launches") as launcher:
        while len(runs) < _MOST_LAUNCHES:
            known = {run["micro_batch"]: run["outcome"] == Outcome.MEASURED for run in runs}
            size = next_size(known, predicted=predicted)
            if size is None or any(not run["outcome"].endswith(("measured", "out_of_memory")) for run in runs):
                break
            context.require(_LAUNCH_S)
            overlay = batch_overlay(size, zero_optimization=EDGES[name])
            launched = context.launch(launcher, model.script, overlay, launch_id=f"batch-{size}", steps=3)
            runs.append(
                {
                    "micro_batch": size,
                    "outcome": launched.report.outcome.value,
                    "message": launched.report.message,
                    "peak_bytes": launched.record.peak_bytes,
                    "predicted_bytes": model.predicted_bytes(EDGES[name], size),
                    "rss_bytes": max((step.rss_bytes for step in launched.record.steps), default=0),
                    "forked": launched.forked,
                    **_times(launched),
                }
            )
            replace(kept, json.dumps(runs, indent=1))
    return runs
