"""Pruning and killing of CUDA jobs: how soon the GPU's memory is free again, by NVML."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.launch_overhead import EXAMPLES
from benchmarks.prove_gpu.context import Context
from benchmarks.prove_gpu.filling import EDGES, load_filling
from benchmarks.prove_gpu.proof import NotRunError, Status, Verdict
from optuna_dsat.config.ds_config import batch_overlay
from optuna_dsat.launch.launcher import TorchrunLauncher
from optuna_dsat.launch.machine.nvml import Nvml
from optuna_dsat.launch.protocol import Finished, LaunchReport, Observed
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.events import RankStarted, StepMeasured

_TOLERANCE_BYTES = 64 * 2**20
_STEPS = 1_000_000
"""Never reached: the launch is ended before."""
_AT_STEP = 3
"""Step after which a launch is ended."""
_FREE_LIMIT_S = 30.0
_LAUNCH_LIMIT_S = 150.0
End = Callable[[TorchrunLauncher, list[int]], None]
"""Ends the launch ``ended``, whose ranks have these process ids."""


@dataclass(kw_only=True)
class _Ended:
    """How a launch was ended, and its result."""

    pids: list[int]
    forked: bool = False
    steps: int = 0
    ended_at: float | None = None
    finished_at: float | None = None
    report: LaunchReport | None = None
    before_bytes: int = 0
    during_bytes: int = 0
    free_s: float | None = None
    """From the end to the memory free, by NVML."""


def pruning(context: Context) -> Verdict:
    """Stop a training launch as a pruner does."""

    def stop(launcher: TorchrunLauncher, _: list[int]) -> None:
        launcher.stop("ended", message="pruned to see its memory come back")

    return _both(context, "pruning", stop)


def killing(context: Context) -> Verdict:
    """Kill a rank of a training launch."""

    def kill(_: TorchrunLauncher, pids: list[int]) -> None:
        os.kill(pids[-1], signal.SIGKILL)

    return _both(context, "killing", kill)


def _both(context: Context, name: str, end: End) -> Verdict:
    """End a launch, forked and by plain torchrun; another one must run on the same GPU right afterwards."""
    gpt, small = EXAMPLES["gpt"], batch_overlay(2)
    figures: dict[str, Any] = {}
    wrong: list[str] = []
    for kind in ("warm", "torchrun"):
        with context.launcher(context.folder(name) / kind, warm=kind == "warm") as launcher:
            if kind == "warm":  # the first forked launch is on trial: it is to be one that ends well
                context.launch(launcher, gpt, small, launch_id="before", steps=3)
            ended = _end_one(context, launcher, end)
            follower = context.launch(launcher, gpt, small, launch_id="after", steps=3).report
        assert ended.report is not None
        figures[kind] = {
            "outcome": ended.report.outcome.value,
            "forked": ended.forked,
            "used_before_bytes": ended.before_bytes,
            "used_while_training_bytes": ended.during_bytes,
            "memory_free_after_s": ended.free_s,
            "next_launch": follower.outcome.value,
        }
        wrong += [f"{kind}: {text}" for text in _wrong(ended, name, follower)]
        wrong += ["warm: the launch was not forked"] if kind == "warm" and not ended.forked else []
    if wrong:
        return Verdict(status=Status.FELL_SHORT, why="; ".join(wrong), figures=figures)
    slowest = max(figures[kind]["memory_free_after_s"] for kind in figures)
    why = f"The memory was free again within {slowest:.1f} s, forked and by torchrun, and the next launch ran."
    return Verdict(status=Status.PROVEN, why=why, figures=figures)


def _end_one(context: Context, launcher: TorchrunLauncher, end: End) -> _Ended:
    """Run the model that fills the GPU, at a small micro-batch, or else the small GPT, and end it."""
    nvml = Nvml()
    try:
        script, overlay = load_filling(context).script, {**batch_overlay(1), "zero_optimization": EDGES["zero-1"]}
    except NotRunError:
        script, overlay = EXAMPLES["gpt"], batch_overlay(2)
    context.require(30.0)
    ended = _Ended(pids=[], before_bytes=_used(context, nvml))
    limit_s = min(_LAUNCH_LIMIT_S, context.left_s)
    launcher.start(context.request(script, overlay, launch_id="ended", steps=_STEPS, timeout_s=limit_s))
    while ended.finished_at is None or _is_awaited(ended):
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
            end(launcher, ended.pids)
            ended.ended_at = time.monotonic()
        if ended.ended_at is not None and ended.free_s is None and _is_free(context, nvml, ended):
            ended.free_s = time.monotonic() - ended.ended_at
    return ended


def _is_awaited(ended: _Ended) -> bool:
    """Return whether the memory of a launch that was ended is not free yet, and can still be in time."""
    in_time = ended.ended_at is not None and time.monotonic() - ended.ended_at < _FREE_LIMIT_S
    return ended.free_s is None and in_time


def _is_free(context: Context, nvml: Nvml, ended: _Ended) -> bool:
    listed = {pid for device in context.devices.devices for pid in nvml.use(device.nvml_id).processes or ()}
    return not listed & set(ended.pids) and _used(context, nvml) <= ended.before_bytes + _TOLERANCE_BYTES


def _used(context: Context, nvml: Nvml) -> int:
    """Return the memory in use on all GPUs, by anyone."""
    used = [nvml.use(device.nvml_id).used_bytes for device in context.devices.devices]
    if None in used:
        raise NotRunError("NVML does not report the memory in use on a GPU")
    return sum(item or 0 for item in used)


def _wrong(ended: _Ended, name: str, follower: LaunchReport) -> list[str]:
    assert ended.report is not None
    outcome, wrong = ended.report.outcome, []
    unexpected = {Outcome.MEASURED, Outcome.OUT_OF_MEMORY, Outcome.STALLED, Outcome.TIMEOUT}
    if outcome in unexpected or (outcome is Outcome.PRUNED) is not (name == "pruning"):
        wrong.append(f"the outcome is {outcome.value}")
    if ended.ended_at is None:
        wrong.append(f"it never came to step {_AT_STEP}: {ended.report.message}")
    elif ended.free_s is None:
        wrong.append(f"the memory was not free after {_FREE_LIMIT_S:.0f} s")
    if ended.during_bytes - ended.before_bytes < _TOLERANCE_BYTES:
        wrong.append("NVML saw no memory in use while it trained")
    if follower.outcome is not Outcome.MEASURED:
        wrong.append(f"the next launch ended with {follower.outcome.value}: {follower.message}")
    return wrong
