"""Settings that change numbers, and a compiled engine: they train alike, and one whose losses differ is found out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from optuna_dsat.config.conditions import BF16_MASTER, BF16_STATES
from optuna_dsat.launch.follow import follow
from optuna_dsat.launch.launcher import TorchrunLauncher
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.overlay import COMPILE, MODEL
from optuna_dsat.study.confirm.loss_check import STEPS_OF_NUMBERS, TOLERANCES, check_loss
from optuna_dsat.study.spec import make_spec
from tests.harness.launches import DS_CONFIG, SCRIPTS

from .conftest import CONFIG, RANKS, Launch

pytestmark = pytest.mark.torchrun
EXAMPLE = "gpt"
ARGS = ("train.py", "--layers=1", "--hidden=32", "--heads=2", "--seq=32", "--deepspeed_config", CONFIG)


def test_bf16_for_fp32_and_its_states_train_alike(launch: Launch) -> None:
    zero = {"zero_optimization": {"stage": 2}}
    bf16 = {"enabled": True}
    states = {**bf16, BF16_STATES: True, BF16_MASTER: True}
    overlays: dict[str, dict[str, Any]] = {
        "fp32": zero,
        "bf16": {**zero, "bf16": bf16},
        "states": {**zero, "bf16": states},
    }
    losses = {}
    for name, overlay in overlays.items():
        launched = launch(*ARGS, overlay=overlay, launch_id=name, end_profile_step=6)
        assert launched.report.outcome is Outcome.MEASURED, launched.report
        assert launched.engine.precision == ("fp32" if name == "fp32" else "bf16")
        losses[name] = [step.loss for step in launched.record.boundaries]
    for name in ("bf16", "states"):
        assert losses[name] == pytest.approx(losses["fp32"], rel=TOLERANCES["bf16"])
    assert losses["fp32"] != losses["bf16"] != losses["states"]


def test_a_config_whose_losses_differ_is_found_out(tmp_path: Path, warm_launcher: TorchrunLauncher) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(DS_CONFIG), encoding="utf-8")
    script = SCRIPTS / "close_values.py"
    spec = make_spec(
        name="close",
        method="random",
        script={"script": str(script), "args": (str(path),), "cwd": str(tmp_path), "config_path": str(path)},
        ds_config=DS_CONFIG,
        allow=("lossy",),
        device="cpu",
        slots_per_trial=RANKS,
        output_dir=str(tmp_path / "out"),
    )
    check = check_loss(
        spec,
        {**DS_CONFIG, "bf16": {"enabled": True}},
        data_parallel_size=RANKS,
        launch=lambda request: follow(warm_launcher, request),
        name="close",
        steps=STEPS_OF_NUMBERS,
    )
    assert check.agrees is False, check
    assert (check.precision, check.own_difference) == ("bf16", 0.0)
    assert [len(values) for values in check.losses.values()] == [STEPS_OF_NUMBERS] * 3


WITHOUT_A_BACKEND = """import torch
import torch._dynamo.utils

whole = torch.nn.Module.compile
torch.nn.Module.compile = lambda module, **given: whole(module, **{**given, "backend": "aot_eager"})
"""
GRAPHS = 'torch._dynamo.utils.counters["stats"]["unique_graphs"]'


def test_a_script_is_compiled_once_and_trains_alike(launch: Launch, example: Path) -> None:
    script = example / "train.py"
    told = script.read_text(encoding="utf-8").replace(
        "            engine.step()\n", f'            engine.step()\n            print("graphs", {GRAPHS}, flush=True)\n'
    )
    script.write_text(told.replace("import torch\n", WITHOUT_A_BACKEND, 1), encoding="utf-8")
    zero = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}
    losses, graphs = [], []
    for name, overlay in (("plain", zero), ("compiled", {**zero, MODEL: {COMPILE: True}})):
        launched = launch(*ARGS, overlay=overlay, launch_id=name, start_profile_step=3, end_profile_step=6)
        assert launched.report.outcome is Outcome.MEASURED, launched.report
        losses.append([step.loss for step in launched.record.boundaries])
        graphs.append([line for line in launched.output.splitlines() if line.startswith("graphs")])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert set(graphs[0]) == {"graphs 0"}
    assert set(graphs[1]) == {"graphs 1"}, "one graph, from the first step on"
