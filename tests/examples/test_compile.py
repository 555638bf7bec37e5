"""A compiled engine of an unchanged script: it trains alike, and is compiled before the steps that count."""

from __future__ import annotations

from pathlib import Path

import pytest

from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.overlay import COMPILE, MODEL

from .conftest import CONFIG, Launch

pytestmark = pytest.mark.torchrun
EXAMPLE = "gpt"
ARGS = ("train.py", "--layers=1", "--hidden=32", "--heads=2", "--seq=32", "--deepspeed_config", CONFIG)
GRAPHS = 'torch._dynamo.utils.counters["stats"]["unique_graphs"]'


def test_a_script_is_compiled_once_and_trains_alike(launch: Launch, example: Path) -> None:
    script = example / "train.py"
    told = script.read_text(encoding="utf-8").replace(
        "            engine.step()\n", f'            engine.step()\n            print("graphs", {GRAPHS}, flush=True)\n'
    )
    script.write_text(told.replace("import torch\n", "import torch\nimport torch._dynamo.utils\n", 1), encoding="utf-8")
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
