"""Parts of the ``DeepSpeedTrial`` API that need a single rank."""

from __future__ import annotations

import copy
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler, TensorDataset

from optuna_dsat.integrations.deepspeed_trial import (
    AttrDict,
    DataLoader,
    DeepSpeedTrialContext,
    DistributedContext,
    ModelParallelUnit,
    PyTorchCallback,
    make_data_parallel_mpu,
    make_deepspeed_mpu,
)
from optuna_dsat.integrations.deepspeed_trial.context import check_engine
from optuna_dsat.integrations.deepspeed_trial.loaders import BatchPlan, PlainBatches, Position, Shard, training_batches
from optuna_dsat.integrations.deepspeed_trial.metrics import Averages, MetricsFile
from optuna_dsat.integrations.deepspeed_trial.training import Training, _checked
from optuna_dsat.launch.agent.command import launch_environment
from optuna_dsat.launch.machine.devices import cpu_devices
from optuna_dsat.launch.run_directory import RunDirectory
from optuna_dsat.runtime.failure import TooFewSamplesError
from optuna_dsat.runtime.rank import GroupRank, initializes_distributed_manually
from tests.harness.launches import request


def numbers(size: int) -> TensorDataset:
    return TensorDataset(torch.arange(size))


def plans(loader: DataLoader, ranks: int, **changes: Any) -> list[BatchPlan]:
    return [BatchPlan(loader, Shard(rank=rank, size=ranks, seed=5, **changes)) for rank in range(ranks)]


@pytest.mark.parametrize(("size", "ranks", "batch", "drop", "batches"), [(10, 2, 2, False, 3), (11, 2, 2, True, 2)])
def test_ranks_share_an_epoch(size: int, ranks: int, batch: int, drop: bool, batches: int) -> None:
    loader = DataLoader(numbers(size), batch_size=batch, shuffle=True, drop_last=drop)
    epochs = [[plan.training(epoch) for plan in plans(loader, ranks)] for epoch in (0, 0, 1)]
    assert epochs[0] == epochs[1] != epochs[2]
    seen = [index for rank in epochs[0] for part in rank for index in part]
    assert len(seen) == len(set(seen)) == (batches * batch * ranks if drop else size)
    assert {len(plan) for plan in plans(loader, ranks)} == {len(rank) for rank in epochs[0]} == {batches}


@pytest.mark.parametrize(("size", "ranks", "batch"), [(5, 2, 2), (15, 2, 4), (16, 4, 4), (7, 3, 2), (101, 2, 4)])
def test_validation_has_as_many_batches_everywhere_and_every_sample_once(size: int, ranks: int, batch: int) -> None:
    shares = [plan.validation() for plan in plans(DataLoader(numbers(size), batch_size=batch), ranks)]
    assert len({len(share) for share in shares}) == 1
    assert all(1 <= len(part) <= batch for share in shares for part in share)
    assert sorted(index for share in shares for part in share for index in part) == list(range(size))


def test_what_cannot_be_shared_out_is_left_out_where_batches_have_one_size() -> None:
    singles = [plan.validation() for plan in plans(DataLoader(numbers(5), batch_size=1), 2)]
    assert singles == [[[0], [2]], [[1], [3]]]
    whole = [plan.validation() for plan in plans(DataLoader(numbers(11), batch_size=2), 2, whole_batches=True)]
    assert whole == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    with pytest.raises(ValueError, match="has 1 sample: too few for a batch on each of 2 data-parallel ranks"):
        plans(DataLoader(numbers(1)), 2)[0].validation()
    with pytest.raises(TooFewSamplesError, match="training data has 1 sample: too few for a batch of 1"):
        training_batches(DataLoader(numbers(1)), Shard(rank=0, size=2))
    assert training_batches([], Shard(rank=0, size=2)).per_epoch is None, "no length to divide by"


def test_samplers_of_ones_own_are_shared_out_too() -> None:
    data = numbers(12)
    random = DataLoader(data, batch_size=2, sampler=RandomSampler(data))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first, second = (plan.training(3) for plan in plans(random, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert sorted(index for part in first + second for index in part) == list(range(12))
    batches = DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 4, drop_last=False))
    assert [plan.training(0) for plan in plans(batches, 2)] == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]


def test_a_dataset_without_an_index_is_refused() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter([1])

    with pytest.raises(ValueError, match="disable_dataset_reproducibility_checks"):
        DataLoader(Stream())
    with pytest.raises(ValueError, match="exclude each other"):
        DataLoader(numbers(3), shuffle=True, sampler=[0, 1])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_position_leads_to_the_same_batches(workers: int) -> None:
    loader = DataLoader(numbers(10), batch_size=2, shuffle=True, num_workers=workers)
    shard = Shard(rank=1, size=2, seed=4)
    whole = training_batches(loader, shard)
    state = torch.get_rng_state()
    batches = [next(whole)[0].tolist() for _ in range(8)]
    assert torch.equal(torch.get_rng_state(), state), "loading moved torch's generator"
    assert whole.position == Position(epoch=2, offset=2)
    later = training_batches(loader, shard)
    later.restore(Position(epoch=1, offset=1))
    assert [next(later)[0].tolist() for _ in range(4)] == batches[4:]


def test_a_plain_loader_is_told_its_epochs_and_must_not_run_dry() -> None:
    words: list[int] = []
    sampler = SimpleNamespace(set_epoch=words.append)

    class Loader:
        def __init__(self) -> None:
            self.sampler = sampler

        def __len__(self) -> int:
            return 2

        def __iter__(self) -> Any:
            return iter([1, 2])

    batches = PlainBatches(Loader())
    assert [next(batches) for _ in range(5)] == [1, 2, 1, 2, 1]
    assert words == [0, 1, 2]
    assert (batches.position.epoch, batches.position.offset) == (2, 1)
    once = PlainBatches(iter([7]))
    assert next(once) == 7
    with pytest.raises(ValueError, match="yields no batch, or can be iterated over once only"):
        next(once)


def engine(*, stage: int, param: str | None = None, optimizer: str | None = None, kind: str = "Engine") -> Any:
    return type(
        kind,
        (),
        {
            "module": None,
            "train_batch_size": lambda _: 1,
            "zero_optimization_stage": lambda _: stage,
            "zero_offload_param": lambda _: param and SimpleNamespace(device=param),
            "zero_offload_optimizer": lambda _: optimizer and SimpleNamespace(device=optimizer),
        },
    )()


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"stage": 2, "kind": "PipelineEngine"}, "A pipeline runs with ZeRO 0 or 1, not 2"),
        ({"stage": 2, "param": "cpu"}, "offload_param is for ZeRO 3, not 2"),
        ({"stage": 0, "optimizer": "cpu"}, "offload_optimizer is for ZeRO 1, 2 and 3"),
        ({"stage": 2, "optimizer": "nvme"}, "to NVMe is for ZeRO 3, not 2"),
        ({"stage": 1, "optimizer": "cpu"}, ""),  # documented for 2 and 3; current DeepSpeed accepts 1
        ({"stage": 0, "kind": "PipelineEngine"}, ""),  # documented for 1
        ({"stage": 3, "param": "nvme", "optimizer": "nvme"}, ""),
        ({"stage": 1, "param": "none", "optimizer": "none"}, ""),
    ],
)
def test_an_engine_is_one_that_todays_deepspeed_runs_or_is_refused_with_the_reason(
    settings: dict[str, Any], refused: str
) -> None:
    with pytest.raises(ValueError, match=refused) if refused else nullcontext():
        check_engine(engine(**settings), measuring=False)
    with pytest.raises(TypeError, match=r"takes the engine that deepspeed\.initialize returns first"):
        check_engine(torch.nn.Linear(1, 1), measuring=True)


def test_a_model_parallel_unit_takes_either_name_once() -> None:
    unit = ModelParallelUnit(1, 2, should_report_metrics=False, should_build_dataloader=True)
    assert unit == ModelParallelUnit(1, 2, False, True)
    with pytest.raises(TypeError, match="takes should_build_data_loader once"):
        ModelParallelUnit(0, 1, True)
    with pytest.raises(ValueError, match="counts from 0 to data_parallel_world_size - 1; got 2 of 2"):
        ModelParallelUnit(2, 2, True, True)


def group(size: int = 1) -> GroupRank:
    return GroupRank(rank=0, local_rank=0, world_size=size, local_world_size=size)


def context(size: int = 4, **hparams: Any) -> DeepSpeedTrialContext:
    return DeepSpeedTrialContext(hparams, group=group(size))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"train_micro_batch_size_per_gpu": 3}, (3, 1)),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 5}, (2, 5)),
        ({"train_batch_size": 24, "gradient_accumulation_steps": 3}, (2, 3)),
        ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2}, (2, 3)),
        ({"train_batch_size": 24}, (6, 1)),
    ],
)
def test_batch_sizes_are_known_before_there_is_an_engine(
    tmp_path: Path, config: dict[str, int], expected: tuple[int, int]
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(config))
    for given in (context(**config), context(deepspeed_config=str(tmp_path / "ds.json"))):
        assert (given.get_train_micro_batch_size_per_gpu(), given.get_num_micro_batches_per_slot()) == expected
        assert (given.train_micro_batch_size_per_gpu, given.num_micro_batches_per_slot) == expected, "as in Determined"


def test_a_smaller_data_parallel_size_makes_larger_shares() -> None:
    given = context(train_batch_size=24)
    given.set_mpu(ModelParallelUnit(0, 2, True, True))
    assert given.get_train_micro_batch_size_per_gpu() == 12
    assert (given.shard().rank, given.shard().size) == (0, 2)
    with pytest.raises(ValueError, match="data_parallel_world_size is 8, on 4 ranks"):
        given.set_mpu(ModelParallelUnit(0, 8, True, True))


def test_hyperparameters_are_attributes_too() -> None:
    args = context(deepspeed_config="ds.json", optimizer={"params": {"lr": 1}}).get_hparams()
    assert (args.optimizer.params.lr, args["deepspeed_config"], hasattr(args, "deepscale_config")) == (
        1,
        "ds.json",
        False,
    )
    copied = copy.copy(args)  # as deepspeed.initialize(args=...) does
    copied.deepspeed_config = None
    assert (args.deepspeed_config, copied["deepspeed_config"]) == ("ds.json", None)
    args.width = {"a": 2}
    assert args["width"].a == 2
    assert json.loads(json.dumps(args)) == AttrDict(args)


def test_data_is_moved_whatever_holds_it() -> None:
    moved = context().to_device({"a": [torch.ones(1), ("text", torch.zeros(1))], "b": 3})
    assert moved["a"][0].device.type == "cpu"
    assert moved["a"][1][0] == "text"
    assert moved["b"] == 3


def test_averages_are_weighted_and_start_over() -> None:
    averages = Averages()
    averages.add(torch.tensor(3.0), where="train_batch")
    averages.add({"loss": 6, "other": torch.tensor([1.0])}, weight=2, where="train_batch")
    assert averages.read() == {"loss": (15.0, 3.0), "other": (2.0, 2.0)}
    assert averages.read() == {}
    with pytest.raises(TypeError, match="evaluate_batch returns numbers or tensors of one element; 'logits' is"):
        averages.add({"logits": torch.ones(2)}, where="evaluate_batch")
    with pytest.raises(TypeError, match="train_batch returns metrics by name; got list"):
        averages.add([1], where="train_batch")


def test_lines_past_the_checkpoint_and_torn_ones_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"steps_completed": 3}\n{"steps_completed": 4}\n{"steps_completed": 6}\n{"steps_comp')
    MetricsFile(path, steps_completed=4).write({"steps_completed": 5})
    assert path.read_text() == '{"steps_completed": 3}\n{"steps_completed": 4}\n{"steps_completed": 5}\n'
    assert capsys.readouterr().out == '{"steps_completed": 5}\n'


def test_either_variable_leaves_the_initialisation_to_the_definition(tmp_path: Path) -> None:
    assert initializes_distributed_manually({"DET_MANUAL_INIT_DISTRIBUTED": "1"})
    assert not initializes_distributed_manually({"OPTUNA_DSAT_MANUAL_INIT_DISTRIBUTED": "0"})
    environ = launch_environment(
        {"OPTUNA_DSAT_MANUAL_INIT_DISTRIBUTED": "1", "OPTUNA_DSAT_STORAGE": "sqlite:///x.db"},
        request=request(tmp_path),
        directory=RunDirectory(tmp_path / "trial-0000"),
        devices=cpu_devices(2).devices,
        kind="cpu",
        total_slots=2,
        mark="mark",
    )
    assert initializes_distributed_manually(environ)
    assert "OPTUNA_DSAT_STORAGE" not in environ


def test_an_experiment_configuration_is_there_as_a_whole_or_refused() -> None:
    given = DeepSpeedTrialContext({}, group=group(), experiment={"data": {"root": "d"}, "name": "x"})
    assert given.get_experiment_config() == {"data": {"root": "d"}, "name": "x"}
    assert given.get_data_config() == {"root": "d"}
    assert context().get_data_config() == {}
    with pytest.raises(ValueError, match="There is no experiment configuration, only hyperparameters"):
        context().get_experiment_config()


def test_a_measured_launch_writes_nothing_to_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = DeepSpeedTrialContext({}, group=group(), tensorboard_dir=tmp_path / "tb", measuring=True)
    writer = measured.get_tensorboard_writer()
    writer.add_scalar("loss", 1.0, 3)
    assert measured.get_tensorboard_writer() is writer
    measured.close()
    assert measured.get_tensorboard_path() == tmp_path / "tb"
    assert not (tmp_path / "tb").exists()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        context().get_tensorboard_writer()


def test_a_stop_is_requested_by_a_bool() -> None:
    given = context()
    assert not given.get_stop_requested()
    given.set_stop_requested(True)
    assert given.get_stop_requested()
    with pytest.raises(TypeError, match="takes a bool; got 'yes'"):
        given.set_stop_requested("yes")  # type: ignore[arg-type]


def test_all_ranks_resume_from_what_the_first_has_found(tmp_path: Path) -> None:
    training: Any = object.__new__(Training)
    training._ranks = SimpleNamespace(broadcast=lambda _: tmp_path / "batches-00000004")
    with pytest.raises(FileExistsError, match="holds checkpoints"):
        training._start(SimpleNamespace(folder=tmp_path), resume=False)


def test_accumulation_follows_the_engine() -> None:
    engine = SimpleNamespace(micro_steps=0, gradient_accumulation_steps=lambda: 2)

    def train_batch(*_: Any) -> None:
        engine.micro_steps += 1

    training: Any = object.__new__(Training)
    training._context = SimpleNamespace(use_pipeline_parallel=False, automatic_accumulation=True)
    training._engine, training._trial = engine, SimpleNamespace(train_batch=train_batch)
    training._micro_batches_per_epoch, training._stream, training._batches = None, None, 0
    for accumulation, micro_steps in ((2, 2), (1, 3)):
        engine.gradient_accumulation_steps = lambda steps=accumulation: steps
        training._train_batch(counts=False)
        assert engine.micro_steps == micro_steps


def test_callbacks_are_a_mapping_of_names() -> None:
    with pytest.raises(TypeError, match="build_callbacks returns a mapping of names to PyTorchCallbacks"):
        _checked([PyTorchCallback()])


@pytest.mark.parametrize(("stage", "expected"), [(0, (False, True)), (1, (False, False)), (2, (True, True))])
def test_roles_in_a_pipeline_follow_its_grid(stage: int, expected: tuple[bool, bool]) -> None:
    grid = SimpleNamespace(
        get_pipe_parallel_rank=lambda: stage,
        get_pipe_parallel_world_size=lambda: 3,
        get_slice_parallel_rank=lambda: 0,
        get_data_parallel_rank=lambda: 1,
        get_data_parallel_world_size=lambda: 2,
    )
    assert make_deepspeed_mpu(grid) == ModelParallelUnit(1, 2, *expected)
    alone = DistributedContext(group())
    assert make_data_parallel_mpu(alone) == ModelParallelUnit(0, 1, True, True)
    assert (alone.gather("x"), alone.allgather("x"), alone.broadcast("x")) == (["x"], ["x"], "x")
