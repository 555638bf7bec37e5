"""A model that fills the GPU: its profile, and the out-of-memory edge against the memory model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.launch_overhead import EXAMPLES, Script
from benchmarks.prove_gpu.context import Context
from benchmarks.prove_gpu.proof import NotRunError, Status, Verdict, write
from optuna_dsat.config import ds_config, user_file
from optuna_dsat.cost.memory import Hardware, ModelProfile, estimate, largest_micro_batch
from optuna_dsat.outcome import Outcome
from optuna_dsat.study.profile.profile import measure_profile
from optuna_dsat.tuning.options.tune_options import TuneOptions
from optuna_dsat.tuning.spec_builder import build_spec

FILL_LOW, FILL_HIGH = 0.6, 0.8
TOLERANCE = 0.10
"""Relative error of predicted edges and peaks up to which the memory model counts as right."""
_CLOSE = 0.03
"""The edge is known when the micro-batches that fit and that do not are this close, relatively."""
_MOST_LAUNCHES = 9
LAUNCH_S = 60.0
"""Time of a launch of the filling model, at a guess."""
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
_STATE_BYTES = 18
"""Bytes a parameter on one rank: 2 and 2 in half precision, 12 of fp32 weights and Adam's moments (ZeRO paper,
arXiv:1910.02054), and the room of a bucket."""
_ACTIVATION_FACTOR = 34
"""Bytes of activations a layer, token and hidden unit in half precision, with attention that stores no scores
(arXiv:2205.05198)."""
_STATES_SHARE = 0.18
"""Share of the GPU that states take: activations are to have most of it, and a model is built anew at each launch."""
_LARGEST_MICRO_BATCH = 32
"""About how many samples are to fit."""
_HEAD = 64
"""Width of an attention head."""
_HIDDEN_PER_LAYER = 80
"""Width over depth, between GPT-2's (64) and GPT-3's (128)."""


def size_for(memory_bytes: int) -> dict[str, int]:
    """Return options of ``examples/gpt`` whose states take ``_STATES_SHARE`` of a GPU; some thirty samples fill it."""
    params = memory_bytes * _STATES_SHARE / _STATE_BYTES
    hidden = max(_HEAD, _HEAD * round((params * _HIDDEN_PER_LAYER / 12) ** (1 / 3) / _HEAD))
    layers = max(2, round(params / (12 * hidden**2)))
    per_sample = memory_bytes * (0.9 - _STATES_SHARE) / _LARGEST_MICRO_BATCH
    tokens = per_sample / (_ACTIVATION_FACTOR * hidden * layers)
    return {"layers": layers, "hidden": hidden, "heads": hidden // _HEAD, "seq": max(64, 64 * round(tokens / 64))}


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


def filling(context: Context) -> Verdict:
    """Choose a model that fills the GPU, profile it, and run it where it is predicted to fill seven tenths."""
    folder, sizes = context.folder("filling"), size_for(context.machine["memory_bytes"])
    args = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    _write_config(context, folder / "ds_config.json")
    script = _script(folder, args)
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
    kept = {"profile": result.profile.to_json(), "args": args, "slots": len(context.devices.devices)}
    write(folder / "filling.json", json.dumps(kept, indent=1))
    return _fill(context, load_filling(context), folder)


def _script(folder: Path, args: list[str]) -> Script:
    config = folder / "ds_config.json"
    return Script(script=EXAMPLES["gpt"].script, config=config, args=("--deepspeed_config", str(config), *args))


def _write_config(context: Context, path: Path) -> None:
    # Half precision uses cuDNN's attention, which the stand-in does not have; bf16 needs compute capability 8.0.
    has_bf16 = int(context.machine["capability"].partition(".")[0] or 0) >= 8
    half = {"bf16" if has_bf16 else "fp16": {"enabled": True}}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": EDGES["zero-1"],
        **({} if context.machine["stand_in"] else half),
        "steps_per_print": 1_000_000,
    }
    write(path, json.dumps(config, indent=2))


def _fill(context: Context, model: Filling, folder: Path) -> Verdict:
    zero, whole = EDGES["zero-1"], model.hardware.device_memory_bytes
    predicted = model.predicted_edge(zero)
    figures: dict[str, Any] = {
        "model": " ".join(model.script.args[2:]),
        "params": model.profile.params,
        "activation_bytes_per_sample": model.profile.activation_bytes_per_sample,
        "gpu_bytes": whole,
        "predicted_edge": predicted,
    }
    if predicted < 1:
        return Verdict(status=Status.FELL_SHORT, why="By the memory model not even one sample fits.", figures=figures)
    middle = min(range(1, predicted + 1), key=lambda size: abs(model.predicted_bytes(zero, size) / whole - 0.7))
    overlay = {**ds_config.batch_overlay(middle), "zero_optimization": zero}
    with context.launcher(folder / "launches") as launcher:
        launched = context.launch(launcher, model.script, overlay, launch_id="middle", steps=4)
    share, measured = model.predicted_bytes(zero, middle) / whole, launched.record.peak_bytes / whole
    figures |= {"micro_batch": middle, "predicted_share": share, "measured_share": measured, **launched.times()}
    if launched.report.outcome is not Outcome.MEASURED:
        return Verdict(status=Status.FAILED, why=f"The launch: {launched.report.message}", figures=figures)
    status = Status.PROVEN if FILL_LOW <= measured <= FILL_HIGH else Status.FELL_SHORT
    why = f"Micro-batch {middle} takes {measured:.0%} of the GPU; {share:.0%} were predicted."
    return Verdict(status=status, why=why, figures=figures)


def load_filling(context: Context) -> Filling:
    """Return the model that the check ``filling`` chose.

    Raises:
        NotRunError: If it chose none.
    """
    folder = context.folder("filling")
    if not (folder / "filling.json").is_file():
        raise NotRunError("there is no model that fills the GPU (see the check `filling`)")
    kept = json.loads((folder / "filling.json").read_text(encoding="utf-8"))
    profile = ModelProfile.from_json(kept["profile"])
    return Filling(
        script=_script(folder, kept["args"]),
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

    Half of the prediction comes first, for its peak, then the prediction. Beyond it steps double until one does not
    fit; then the middle of the two is next.

    Args:
        known: Micro-batch -> whether it fitted.
        predicted: Largest micro-batch that is predicted to fit, at least 1.
    """
    fits = max((size for size, fitted in known.items() if fitted), default=0)
    bursts = min((size for size, fitted in known.items() if not fitted), default=None)
    if bursts is None:
        step = 2 * max(1, round(predicted * _CLOSE)) * 2 ** sum(size > predicted for size in known)
        return next((size for size in (max(1, predicted // 2), predicted) if size not in known), fits + step)
    return None if bursts - fits <= max(1, round(fits * _CLOSE)) else (fits + bursts) // 2


def edge(context: Context, *, name: str) -> Verdict:
    """Look for the largest micro-batch that fits at a configuration; earlier parts' launches are kept on disk."""
    model, zero, folder = load_filling(context), EDGES[name], context.folder(f"edge-{name}")
    predicted = model.predicted_edge(zero)
    if predicted < 1:
        return Verdict(status=Status.FELL_SHORT, why="By the memory model not even one sample fits.")
    kept = folder / "runs.json"
    runs: list[dict[str, Any]] = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else []
    with context.launcher(folder / "launches") as launcher:
        while len(runs) < _MOST_LAUNCHES and all(run["outcome"] in ("measured", "out_of_memory") for run in runs):
            known = {run["micro_batch"]: run["outcome"] == Outcome.MEASURED for run in runs}
            size = next_size(known, predicted=predicted)
            if size is None:
                break
            context.require(LAUNCH_S)
            overlay = {**ds_config.batch_overlay(size), "zero_optimization": zero}
            launched = context.launch(launcher, model.script, overlay, launch_id=f"batch-{size}", steps=3)
            runs.append(
                {
                    "micro_batch": size,
                    "outcome": launched.report.outcome.value,
                    "message": launched.report.message,
                    "peak_bytes": launched.record.peak_bytes,
                    "predicted_bytes": model.predicted_bytes(zero, size),
                    "forked": launched.forked,
                    **launched.times(),
                }
            )
            write(kept, json.dumps(runs, indent=1))
    return _edge_verdict(runs, predicted=predicted)


def _edge_verdict(runs: list[dict[str, Any]], *, predicted: int) -> Verdict:
    fitted = {run["micro_batch"]: run for run in runs if run["outcome"] == Outcome.MEASURED}
    figures: dict[str, Any] = {"predicted_edge": predicted, "runs": runs}
    odd = [run["message"] for run in runs if run["outcome"] not in ("measured", "out_of_memory")]
    if odd or not fitted:
        why = f"A launch ended otherwise: {odd[-1]}" if odd else "No launch fitted."
        return Verdict(status=Status.FAILED, why=why, figures=figures)
    largest, burst = max(fitted), len(fitted) < len(runs)
    errors = [run["predicted_bytes"] / run["peak_bytes"] - 1 for run in fitted.values() if run["peak_bytes"]]
    worst, off = max(errors, key=abs, default=1.0), predicted / largest - 1
    figures |= {"edge": largest, "edge_error": off, "worst_peak_error": worst}
    right = abs(off) <= max(TOLERANCE, 1 / largest) and abs(worst) <= TOLERANCE and burst
    why = (
        f"{largest} fit, {predicted} were predicted ({off:+.1%}); peaks were predicted within {abs(worst):.1%} "
        f"({len(errors)} launches).{'' if burst else ' No launch ran out of memory.'}"
    )
    return Verdict(status=Status.PROVEN if right else Status.FELL_SHORT, why=why, figures=figures)
