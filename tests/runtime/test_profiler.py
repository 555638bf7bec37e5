"""Activations measured in the profile launch on a GPU; a stub accelerator accounts for memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from optuna_dsat.launch.agent.command import write_run_directory
from optuna_dsat.launch.protocol import Holder, LaunchRequest
from optuna_dsat.runtime.events import Event, ProfileMeasured
from optuna_dsat.runtime.measure.engine import Clock
from optuna_dsat.runtime.measure.memory import MemoryPeaks
from optuna_dsat.runtime.measure.meter import Meter, RankState
from optuna_dsat.runtime.measure.profiler import Profiler, _flop_counter, _saved_tensors
from optuna_dsat.runtime.rank import LaunchPlan
from optuna_dsat.study.profile.profile import measure_profile
from optuna_dsat.study.spec import make_spec
from tests.harness.ranks import rank_of

WORKSPACE, ACTIVATIONS = 32 * 2**20, 4608


class RequestedError(Exception):
    """Raised with the requested launch."""

    def __init__(self, request: LaunchRequest) -> None:
        super().__init__(request.launch_id)
        self.request = request


class RequestRecorder:
    """Launcher that raises instead of launching."""

    free_slots = 8
    waiting: tuple[str, ...] = ()

    def holders(self) -> tuple[Holder, ...]:
        return ()

    def start(self, request: LaunchRequest) -> None:
        raise RequestedError(request)


@pytest.fixture
def plan(tmp_path: Path) -> LaunchPlan:
    """Return the launch description of a study's first profile launch."""
    spec = make_spec(
        name="s",
        method="random",
        script={"script": "train.py", "cwd": str(tmp_path), "config_path": str(tmp_path / "ds.json")},
        ds_config={"train_micro_batch_size_per_gpu": 2},
        device="cuda",
        slots_per_trial=1,
        output_dir=str(tmp_path),
    )
    launcher: Any = RequestRecorder()
    with pytest.raises(RequestedError) as requested:
        measure_profile(spec, launcher, on_attempt=lambda _: None, on_report=lambda *_: None)
    return LaunchPlan.load(write_run_directory(requested.value.request, tmp_path).launch)


class Engine(torch.nn.Module):
    """Stub module: allocates a persistent workspace in the first forward, and activations until backward."""

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Linear(2, 1)
        self.allocated = 10**6
        self.warm = False
        self.accumulation = 1
        self.micro_steps = 0

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.allocated += ACTIVATIONS * len(batch) + (0 if self.warm else WORKSPACE)
        self.warm = True
        return torch.tensor(0.5)

    def backward(self, loss: torch.Tensor) -> torch.Tensor:
        self.allocated -= ACTIVATIONS
        return loss

    def step(self) -> None:
        self.micro_steps += 1

    def is_gradient_accumulation_boundary(self) -> bool:
        return self.micro_steps % self.accumulation == self.accumulation - 1


class GatheringEngine(Engine):
    """Gathers its parameters in forward and releases them in backward, as ZeRO 3 does from the second step on."""

    def __init__(self, *, alone: bool) -> None:
        super().__init__()
        self.warm = True
        self.alone = alone
        parameter: Any = self.module.weight
        parameter.ds_numel = 2**20
        parameter.ds_tensor = torch.empty(2**20 if alone else 2**19)
        parameter.data = torch.empty(0)
        self.parameter = parameter

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if self.alone:
            self.parameter.data = self.parameter.ds_tensor.view(-1)
        else:
            self.parameter.data = torch.empty(2**20)
            self.allocated += 4 * 2**20
        return super().forward(batch)

    def backward(self, loss: torch.Tensor) -> torch.Tensor:
        self.parameter.data = torch.empty(0)
        self.allocated -= 0 if self.alone else 4 * 2**20
        return super().backward(loss)


class LeftError(Exception):
    """Raised when the rank exits."""


def profile_of(
    engine: Engine, plan: LaunchPlan, batches: int = 9, backward: Callable[[torch.Tensor], Any] | None = None
) -> list[ProfileMeasured]:
    """Train until the rank exits or its data ends; return the profiles that it recorded."""
    accelerator = SimpleNamespace(
        device_name=lambda: "cuda", memory_allocated=lambda: engine.allocated, total_memory=lambda: 2**30
    )
    peaks = MemoryPeaks(allocated=7, reserved=8, resident=9)
    memory: Any = SimpleNamespace(sample=lambda: None, peaks=lambda: peaks)
    events: list[Event] = []

    def leave() -> None:
        raise LeftError

    profiler = Profiler(engine, accelerator=accelerator, plan=plan, rank=rank_of(), memory=memory, write=events.append)
    meter = Meter(
        engine,
        rank=0,
        write=events.append,
        clock=Clock(),
        memory=memory,
        state=RankState(),
        last_step=plan.end_profile_step,
        exit_process=leave,
        profiler=profiler,
    )
    meter.attach()
    with suppress(LeftError):
        for _ in range(batches):
            (backward or engine.backward)(engine(torch.ones(1, 2)))
            engine.step()
    return [event for event in events if isinstance(event, ProfileMeasured)]


def test_a_workspace_of_the_first_step_is_no_activation(plan: LaunchPlan) -> None:
    [profile] = profile_of(Engine(), plan)
    assert profile.activation_bytes_per_sample == ACTIVATIONS


def test_activations_are_per_sample_where_gradients_accumulate(plan: LaunchPlan) -> None:
    engine = Engine()
    engine.accumulation = 3
    [profile] = profile_of(engine, plan)
    assert profile.activation_bytes_per_sample == ACTIVATIONS


@pytest.mark.parametrize("alone", [False, True], ids=["among several ranks", "as the only rank"])
def test_parameters_that_zero_3_gathered_are_no_activations(plan: LaunchPlan, alone: bool) -> None:
    [profile] = profile_of(GatheringEngine(alone=alone), plan)
    assert profile.activation_bytes_per_sample == ACTIVATIONS
    assert profile.params == 2**20 + 1


def test_a_backward_pass_that_the_script_calls_itself_counts_as_two_forward_passes(plan: LaunchPlan) -> None:
    class Calculating(Engine):
        _support_torch_style_backward = True  # not at ZeRO 0

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = super().forward(batch) + self.module(batch).sum()
            return loss

    [observed] = profile_of(Calculating(), plan)
    [direct] = profile_of(Calculating(), plan, backward=torch.Tensor.backward)
    assert (observed.flops_per_sample, direct.flops_per_sample) == (4, 12)
    assert (observed.needs_zero, direct.needs_zero) == (False, True)


@pytest.mark.parametrize("layer", [torch.nn.LSTM, torch.nn.GRU])
def test_the_flops_of_a_recurrent_layer_are_counted(layer: Callable[[int, int], torch.nn.RNNBase]) -> None:
    recurrent, batch = layer(3, 5), torch.rand(7, 2, 3)
    with _flop_counter() as counter:
        forward = recurrent(batch)[0].sum()
        counted = counter.get_total_flops()
        forward.backward()
    matrices = sum(weight.numel() for weight in recurrent.parameters() if weight.dim() > 1)
    assert counted == 2 * 7 * 2 * matrices
    assert 2 * counted <= counter.get_total_flops() <= 3 * counted


def test_the_flops_of_a_recurrent_kernel_of_cuda_are_counted() -> None:
    counter = _flop_counter()
    weights = [torch.Size([20, 3]), torch.Size([20, 5]), torch.Size([20])]
    formula = counter.flop_registry[torch.ops.aten._cudnn_rnn]
    assert formula(torch.rand(7, 2, 3), [torch.rand(shape) for shape in weights], 4, out_val=None) == 2 * 7 * 2 * 160


def test_a_model_that_was_profiled_is_compiled_in_later_steps(plan: LaunchPlan) -> None:
    """Trials that continued a profile launch were measured without the script's torch.compile."""
    compiled = []

    def backend(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> Callable[..., Any]:
        compiled.append(graph)
        return graph.forward

    class Compiling(Engine):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return super().forward(doubled(batch))

    doubled = torch.compile(lambda batch: 2 * batch, backend=backend)
    assert len(profile_of(Compiling(), replace(plan, end_profile_step=1))) == 1
    assert not compiled
    doubled(torch.ones(1, 2))
    assert len(compiled) == 1


def test_data_that_ends_after_one_step_leaves_no_profile(plan: LaunchPlan) -> None:
    assert profile_of(Engine(), plan, batches=1) == []


class OverflowingEngine(Engine):
    """Skips its second update."""

    skipped_steps = 0

    def step(self) -> None:
        super().step()
        self.skipped_steps += self.micro_steps == 2


def test_a_profiled_step_that_was_skipped_is_profiled_again(plan: LaunchPlan) -> None:
    [profile] = profile_of(OverflowingEngine(), plan)
    assert profile.activation_bytes_per_sample == ACTIVATIONS


@pytest.mark.parametrize("tested", [False, True])
def test_deepspeed_decides_whether_an_optimizer_is_tested_with_zero(
    plan: LaunchPlan, tested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = Engine()
    engine.basic_optimizer = torch.optim.Rprop(torch.nn.Linear(1, 1).parameters())
    listed = SimpleNamespace(is_zero_supported_optimizer=lambda optimizer: tested and optimizer.param_groups != [])
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.zero.utils", listed)
    [profile] = profile_of(engine, plan)
    assert (profile.optimizer, profile.optimizer_tested) == ("Rprop", tested)


def test_a_formula_that_fails_does_not_end_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(flop_registry, torch.ops.aten.mm, lambda *_, **__: 1 // 0)
    with _flop_counter() as counter:
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert (counter.failed, counter.get_total_flops()) == (True, 0)
    assert counter.flop_registry[torch.ops.aten.mm](out_val=None) == 0, "torch before 2.4 calls it at each operation"


def test_rest_of_the_data_that_a_batch_is_cut_from_is_no_activation() -> None:
    """Of a batch cut from the training data its own elements are saved, of a slice of an activation all of them."""
    data, saved = torch.randn(1000, 4), dict[int, int]()
    layer = torch.nn.Linear(4, 16)
    with _saved_tensors(layer, saved):
        output = layer(data[4:6])
        output[:, :2].square()
    assert {data.data_ptr(): 2 * 4 * 4, output.data_ptr(): 2 * 16 * 4} == saved
