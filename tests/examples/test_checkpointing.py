"""Activation checkpointing of an unchanged script: it is measured, saves memory, and keeps the losses."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from optuna_dsat.cost.memory import ModelProfile
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.overlay import CHECKPOINT_EVERY, MODEL

from .conftest import CONFIG, Launch

pytestmark = pytest.mark.torchrun
EXAMPLE = "gpt"
LAYERS = 8
ARGS = ("train.py", f"--layers={LAYERS}", "--seq=256", "--deepspeed_config", CONFIG)


def overlay(every: int, *, micro_batch: int = 4) -> dict[str, Any]:
    model = {MODEL: {CHECKPOINT_EVERY: every}} if every else {}
    return {"train_micro_batch_size_per_gpu": micro_batch, "zero_optimization": {"stage": 2}, **model}


def test_the_blocks_of_a_script_are_measured_and_with_checkpoints_it_fits_and_trains_alike(launch: Launch) -> None:
    profiled = launch(*ARGS, overlay=overlay(0, micro_batch=1), launch_id="profile", purpose="profile")
    assert profiled.report.outcome is Outcome.MEASURED, profiled.report
    profile = ModelProfile.from_json(asdict(profiled.profile))
    assert (profile.blocks, profile.no_checkpointing) == (LAYERS, "")
    assert 0.8 < profile.block_share < 1
    assert profile.block_bytes_per_sample < profile.activation_bytes_per_sample
    assert profile.block_input_bytes_per_sample == LAYERS * 256 * 160 * 4
    plain = launch(*ARGS, overlay=overlay(0), launch_id="plain")
    assert plain.report.outcome is Outcome.MEASURED, plain.report
    peak = max(step.peak_allocated_bytes for step in plain.steps)
    saved = 4 * (profile.activation_bytes(0) - profile.activation_bytes(1))
    limit = int(peak - 0.6 * saved)  # the peak of every block is that of the optimizer's step
    fits = launch(*ARGS, overlay=overlay(1), launch_id="fits", device_memory_bytes=limit)
    assert fits.report.outcome is Outcome.MEASURED, fits.report
    assert MODEL not in fits.directory.config.read_text(encoding="utf-8")
    losses = [sorted(step.loss or 0.0 for step in launched.steps) for launched in (plain, fits)]
    assert losses[0] == losses[1]
