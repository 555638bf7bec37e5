"""Pruning and killing of CUDA jobs: how soon the GPU's memory is free again, by NVML."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.prove_gpu.context import Context, Script, batch_overlay, request
from benchmarks.prove_gpu.filling import EDGES, load_filling
from benchmarks.prove_gpu.proof import ROOT, NotRunError, Status, Verdict
from optuna_dsat.launch.launcher import TorchrunLauncher
from optuna_dsat.launch.machine.nvml import Nvml
from optuna_dsat.launch.protocol import Finished, LaunchReport, Observed
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.events import RankStarted, StepMeasured

__all__ = ["killing", "pruning"]

GPT = Script(script=ROOT / "examples/gpt/train.py", config=ROOT / "examples/gpt/ds_config.json")
_TOLERANCE_BYTES = 64 * 2**20
_STEPS = 1_000_000
"""Never reached: the launch is ended before."""
_AT_STEP = 3
"""Step after which a launch is ended."""
_FREE_LIMIT_S = 30.0
_LAUNCH_LIMIT_S = 150.0


@dataclass(kw_only=True)
class _Ended:
    """How a launch was ended, and what became of it."""

    pids: list[int]
    forked: bool = False
    steps: int = 0
    ended_at: float | None = None
    finished_at: float | None = None
    report: LaunchReport | None = None
    before_bytes: int = 0
    during_bytes: int = 0
    after_bytes: int = 0
    free_s: float | None = None
    """From the end to the memory free, by NVML."""

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "outcome": None if self.report is None else self.report.outcome.value,
            "forked": self.forked,
            "used_before_bytes": self.before_bytes,
            "used_while_training_bytes": self.during_bytes,
            "used_afterwards_bytes": self.after_bytes,
            "memory_free_after_s": self.free_s,
            "slots_free_after_s": None
            if self.finished_at is None or self.ended_at is None
            else self.finished_at - self.ended_at,
        }


def pruning(context: Context) -> Verdict:
    """Stop a training launch as a pruner does."""

    def stop(launcher: TorchrunLauncher, launch_id: str, _: list[int]) -> None:
        launcher.stop(launch_id, message="pruned to see its memory come back")

    return _both(context, "pruning", stop, expected={Outcome.PRUNED})


def killing(context: Context) -> Verdict:
    """Kill a rank of a training launch."""

    def kill(_: TorchrunLauncher, __: str, pids: list[int]) -> None:
        os.kill(pids[-1], signal.SIGKILL)

    outcomes = set(Outcome) - {
        Outcome.MEASURED,
        Outcome.PRUNED,
        Outcome.OUT_OF_MEMORY,
        Outcome.STALLED,
        Outcome.TIMEOUT,
    }
    return _both(context, "killing", kill, expected=outcomes)


End = Callable[[TorchrunLauncher, str, list[int]], None]


def _both(context: Context, name: str, end: End, *, expected: set[Outcome]) -> Verdict:
    """End a launch, forked and by plain torchrun; another one must run on the same GPU right afterwards."""
    nvml = Nvml()
    figures: dict[str, Any] = {}
    wrong: list[str] = []
    script, overlay = _script(context)
    for kind in ("warm", "torchrun"):
        with context.launcher(context.folder(name) / kind, warm=kind == "warm") as launcher:
            if kind == "warm":  # the first forked launch is on trial: it is to be one that ends well
                context.launch(launcher, GPT, batch_overlay(2), launch_id="before", steps=3)
            ended = _end_one(context, launcher, nvml, end, script, overlay)
            follower = context.launch(launcher, GPT, batch_overlay(2), launch_id="after", steps=3)
        figures[kind] = {**ended.to_json(), "next_launch": follower.report.outcome.value}
        wrong += [f"{kind}: {text}" for text in _wrong(ended, expected, follower.report)]
        if kind == "warm" and not ended.forked:
            wrong.append("warm: the launch was not forked")
    figures |= {f"{kind}_memory_free_after_s": figures[kind]["memory_free_after_s"] or -1.0 for kind in figures}
    if wrong:
        return Verdict(status=Status.FELL_SHORT, why="; ".join(wrong), figures=figures)
    slowest = max(figures[kind]["memory_free_after_s"] for kind in ("warm", "torchrun"))
    why = f"The memory was free again within {slowest:.1f} s, forked and by torchrun, and the next launch ran."
    return Verdict(status=Status.PROVEN, why=why, figures=figures)


def _script(context: Context) -> tuple[Script, dict[str, Any]]:
    """Return the model that fills the GPU, at a small micro-batch; else the small GPT."""
    try:
        model = load_filling(context)
    except NotRunError:
        return GPT, batch_overlay(2)
    return model.script, batch_overlay(1, zero_optimization=EDGES["zero-1"])


def _end_one(
    context: Context, launcher: TorchrunLauncher, nvml: Nvml, end: End, script: Script, overlay: dict[str, Any]
) -> _Ended:
    limit_s = min(_LAUNCH_LIMIT_S, context.left_s)
    context.require(30.0)
    ended = _Ended(pids=[], before_bytes=_used(context, nvml))
    asked = request(context, script, overlay, launch_id="ended", steps=_STEPS, timeout_s=limit_s)
    launcher.start(asked)
    while ended.finished_at is None:
        for update in launcher.poll(0.2):
            if isinstance(update, Observed) and isinstance(update.event, RankStarted):
                ended.pids.append(update.event.pid)
                ended.forked = update.event.forked
            elif isinstance(update, Observed) and isinstance(update.event, StepMeasured):
                ended.steps = max(ended.steps, update.event.step)
            elif isinstance(update, Finished):
                ended.finished_at, ended.report = time.monotonic(), update.report
        if ended.steps >= _AT_STEP and ended.ended_at is None and ended.finished_at is None:
            ended.during_bytes = _used(context, nvml)
            end(launcher, "ended", ended.pids)
            ended.ended_at = time.monotonic()
        if ended.ended_at is not None and ended.free_s is None and _is_free(context, nvml, ended):
            ended.free_s = time.monotonic() - ended.ended_at
    while ended.free_s is None and ended.ended_at is not None and time.monotonic() - ended.ended_at < _FREE_LIMIT_S:
        if _is_free(context, nvml, ended):
            ended.free_s = time.monotonic() - ended.ended_at
        time.sleep(0.1)
    ended.after_bytes = _used(context, nvml)
    return ended


def _is_free(context: Context, nvml: Nvml, ended: _Ended) -> bool:
    listed = {pid for device in context.devices.devices for pid in nvml.use(device.nvml_id).processes or ()}
    return not listed & set(ended.pids) and _used(context, nvml) <= ended.before_bytes + _TOLERANCE_BYTES


def _used(context: Context, nvml: Nvml) -> int:
    """Return the memory in use on all GPUs, by anyone."""
    used = [nvml.use(device.nvml_id).used_bytes for device in context.devices.devices]
    if None in used:
        raise NotRunError("NVML does not tell how much memory of a GPU is in use")
    return sum(item or 0 for item in used)


def _wrong(ended: _Ended, expected: set[Outcome], follower: LaunchReport) -> list[str]:
    wrong = []
    if ended.report is None or ended.report.outcome not in expected:
        wrong.append(f"the outcome is {ended.report and ended.report.outcome.value}")
    if ended.ended_at is None:
        wrong.append(f"it never came to step {_AT_STEP}: {ended.report and ended.report.message}")
    elif ended.free_s is None:
        wrong.append(f"the memory was not free after {_FREE_LIMIT_S:.0f} s")
    if ended.during_bytes - ended.before_bytes < _TOLERANCE_BYTES:
        wrong.append("NVML saw no memory in use while it trained")
    if follower.outcome is not Outcome.MEASURED:
        wrong.append(f"the next launch ended with {follower.outcome.value}: {follower.message}")
    return wrong
