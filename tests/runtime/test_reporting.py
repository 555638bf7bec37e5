"""Public functions for scripts: outside a trial, in a trial, and around observed and unobserved steps."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import optuna_dsat
from optuna_dsat.runtime.events import RankFailed, StepMeasured
from optuna_dsat.runtime.hook import DeepSpeedHook
from optuna_dsat.runtime.measure.meter import RankState
from tests.harness.meter import Engine, FakeClock, MeterBench
from tests.harness.ranks import ROOT, Starter, WarmRanks, plan_of, rank_of, script


class Unseen(Engine):
    """Engine that counts its steps as DeepSpeed does, and whose unwrapped methods are called."""

    def __init__(self, clock: FakeClock, accumulation: int = 1) -> None:
        super().__init__(clock, accumulation)
        self.global_steps = 0

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.module(*args, **kwargs)
        return super().forward()

    def step(self) -> None:
        self.global_steps += self.is_gradient_accumulation_boundary()
        super().step()


def unseen_micro_step(bench: MeterBench, size: int = 4) -> None:
    engine = bench.engine
    loss = Unseen.forward(engine, torch.ones(size, 2))
    Unseen.backward(engine, loss)
    Unseen.step(engine)


def test_steps_that_nobody_sees_are_counted_by_their_contexts() -> None:
    bench = MeterBench(lambda clock: Unseen(clock, accumulation=2))
    for size in (4, 6, 4):
        bench.clock.time += 10.0  # data
        with bench.meter.micro_batch():
            assert bench.state.phase == "forward"
            unseen_micro_step(bench, size)
    [step] = bench.steps
    assert (step.latency_s, step.samples, step.observed_micro_batch) == (26.5, 10, 6)
    assert (step.forward_s, step.backward_s, step.step_s) == (0.0, 0.0, 0.0)
    assert bench.state.phase == "between"


def test_steps_that_are_seen_are_counted_once() -> None:
    bench = MeterBench(Unseen)
    with bench.meter.micro_batch():
        bench.micro_step()
    assert [(step.samples, step.forward_s, step.backward_s) for step in bench.steps] == [(4, 1.0, 2.0)]


def test_a_context_around_a_whole_training_leaves_its_steps_alone() -> None:
    bench = MeterBench(Unseen)
    with bench.meter.micro_batch():
        bench.micro_step()
        bench.micro_step()
    assert [(step.step, step.latency_s, step.samples) for step in bench.steps] == [(1, 3.25, 4), (2, 3.25, 4)]
    assert bench.left == 1


def test_a_step_that_is_seen_in_part_keeps_the_phases_that_were() -> None:
    bench = MeterBench(Unseen)
    with bench.meter.micro_batch():
        loss = bench.engine(torch.ones(5, 2))
        bench.engine.backward(loss)
        Unseen.step(bench.engine)
    [step] = bench.steps
    assert (step.samples, step.forward_s, step.backward_s, step.step_s) == (5, 1.0, 2.0, 0.0)


def test_batches_completed_are_those_that_the_script_says_else_the_engines() -> None:
    bench = MeterBench(lambda clock: Unseen(clock, accumulation=2))
    bench.micro_step()
    bench.micro_step()
    engine = bench.engine
    assert isinstance(engine, Unseen)
    engine.global_steps = 300  # from a loaded checkpoint
    bench.micro_step()
    bench.micro_step()
    bench.state.steps_completed = 1000  # a count of the script
    bench.micro_step()
    bench.micro_step()
    assert [step.steps_completed for step in bench.steps] == [1, 301, 1000]


def test_evaluation_in_a_context_feeds_nothing() -> None:
    bench = MeterBench(Unseen)
    with bench.meter.micro_batch():
        bench.engine.module.eval()
        Unseen.forward(bench.engine, torch.ones(64, 2))
        bench.engine.module.train()
        unseen_micro_step(bench)
    assert bench.steps[0].samples == 4


def test_an_observer_looks_at_the_whole_until_a_phase_is_seen() -> None:
    seen: list[Any] = []

    class Observation:
        def __init__(self, phase: str, step: int) -> None:
            self.name = f"{phase} {step}"

        def __enter__(self) -> None:
            seen.append(f"in {self.name}")

        def __exit__(self, *_: object) -> None:
            seen.append(f"out {self.name}")

    observer = SimpleNamespace(observe=Observation, boundary=lambda step, samples: seen.append((step, samples)))
    bench = MeterBench(Unseen, observer)
    with bench.meter.micro_batch():
        unseen_micro_step(bench)
    assert seen == ["in batch 1", "out batch 1", (1, 4)]
    seen.clear()
    with bench.meter.micro_batch():
        loss = Unseen.forward(bench.engine, torch.ones(4, 2))
        bench.engine.backward(loss)
        bench.engine.step()
    phases = ["in batch 2", "out batch 2", "in backward 2", "out backward 2", "in step 2", "out step 2"]
    assert seen == [*phases, (2, 4)]


def test_outside_a_trial_nothing_happens_and_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, optuna_dsat\n"
        "with optuna_dsat.dsat_reporting_context('core context', op=None, steps_completed=3) as nothing:\n"
        "    print(nothing, sorted({'optuna', 'torch', 'deepspeed', 'pydantic', 'rich'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "None []\n"


def test_outside_a_trial_the_config_is_the_base_with_its_overwrites(tmp_path: Path) -> None:
    base = {"train_batch_size": 4, "optimizer": {"type": "Adam", "params": {"lr": 1.0}}, "tensorboard": {}}
    (tmp_path / "ds.json").write_text(json.dumps(base), encoding="utf-8")
    hparams: dict[str, Any] = {"deepspeed_config": "ds.json"}
    assert optuna_dsat.get_ds_config_from_hparams(hparams, base_dir=tmp_path) == base
    hparams["overwrite_deepspeed_args"] = {"optimizer.params": {"lr": 2.0}, "tensorboard": None}
    assert optuna_dsat.get_ds_config_from_hparams(hparams, tmp_path) == {
        "train_batch_size": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 2.0}},
    }


@pytest.mark.parametrize(
    ("hparams", "error", "message"),
    [
        ({}, ValueError, "names the DeepSpeed config.*None"),
        ({"deepspeed_config": {"stage": 1}}, ValueError, "names the DeepSpeed config"),
        ({"deepspeed_config": "gone.json"}, FileNotFoundError, "'gone.json', but there is no file"),
        ({"deepspeed_config": "x", "overwrite_deepspeed_args": [1]}, ValueError, "object of settings"),
    ],
)
def test_hparams_that_name_no_config_are_refused(
    hparams: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        optuna_dsat.get_ds_config_from_hparams(hparams, tmp_path)


def test_in_a_trial_its_settings_lie_over_the_overwrites(start: Starter) -> None:
    text = (
        "import json, sys, optuna_dsat\n"
        "hparams = {'deepspeed_config': sys.argv[1], 'overwrite_deepspeed_args': {'train_micro_batch_size_per_gpu': 5,"
        " 'gradient_clipping': 1.0}}\n"
        "print(json.dumps(optuna_dsat.get_ds_config_from_hparams(hparams)))\n"
        "print('optuna' in sys.modules)\n"
    )
    overlay = {"train_micro_batch_size_per_gpu": 7, "zero_optimization": {"stage": 3}}
    launch = start.alone(script(start, text), str(start.user_config), overlay=overlay)
    assert launch.exit_code == 0, launch.log("stderr")
    config, optuna = launch.log("stdout").splitlines()
    assert json.loads(config)["train_micro_batch_size_per_gpu"] == 7
    assert json.loads(config)["zero_optimization"]["stage"] == 3
    assert json.loads(config)["gradient_clipping"] == 1.0
    assert optuna == "False"


@pytest.mark.torchrun
def test_a_launch_records_the_batches_that_its_script_says_it_has_completed(
    start: Starter, warm_ranks: WarmRanks
) -> None:
    text = (
        "import sys, deepspeed, torch\n"
        "from optuna_dsat import dsat_reporting_context\n"
        "def step():\n"
        "    for _ in range(engine.gradient_accumulation_steps()):\n"
        "        engine.backward(engine(torch.ones(engine.train_micro_batch_size_per_gpu(), 4)).mean())\n"
        "        engine.step()\n"
        "with dsat_reporting_context('core context', op='op', steps_completed=500):\n"
        "    model = torch.nn.Linear(4, 1)\n"
        "    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=sys.argv[1])\n"
        "    step()\n"
        "with dsat_reporting_context(engine, steps_completed=torch.tensor(501)):\n"
        "    step()\n"
        "step()\n"
        "with dsat_reporting_context(engine, steps_completed=503.0):\n"
        "    step()\n"
    )
    overlay = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    launch = start.torchrun(script(start, text), str(start.user_config), overlay=overlay, warm=warm_ranks)
    assert [step.steps_completed for step in launch.of(StepMeasured)] == [500, 501, 3]
    assert "'float' object cannot be interpreted as an integer" in launch.of(RankFailed)[0].message


def test_a_context_without_any_engine_says_what_it_needs(start: Starter, stubs: Path) -> None:
    text = "import deepspeed, optuna_dsat\nwith optuna_dsat.dsat_reporting_context('core', 'op'):\n    pass\n"
    launch = start.alone(script(start, text), stubs=stubs)
    [failure] = launch.of(RankFailed)
    assert failure.error_type == "RuntimeError"
    assert "knows no engine to measure: give dsat_reporting_context the DeepSpeed engine" in failure.message


def test_an_allocators_error_in_a_context_is_counted_though_the_script_catches_it() -> None:
    bench = MeterBench(Unseen)
    writer: Any = None
    hook = DeepSpeedHook(
        plan=plan_of(), rank=rank_of(), writer=writer, state=RankState(device="cpu"), exit_process=lambda: None
    )
    hook._meter = bench.meter
    with suppress(RuntimeError), hook.reporting(bench.engine, None):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.")
    assert hook._state.allocation_failures == 1
