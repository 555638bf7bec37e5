"""Definitions of many kinds, trained one after another on two ranks; rank 0 writes down what it saw.

torchrun --nproc_per_node 2 scenarios.py FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from optuna_dsat.integrations.deepspeed_trial import (
    DataLoader,
    DeepSpeedTrial,
    DeepSpeedTrialContext,
    MetricReducer,
    ModelParallelUnit,
    PyTorchCallback,
)
from optuna_dsat.integrations.deepspeed_trial.checkpoints import seed_everything
from optuna_dsat.integrations.deepspeed_trial.training import Periods, Training
from optuna_dsat.runtime.rank import GroupRank
from optuna_dsat.script.trial_class import Length

WIDTH = 4
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 3,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 1000, "allgather_bucket_size": 1000},
    "steps_per_print": 1000000,
}


def samples(size: int = 64) -> TensorDataset:
    """Return numbers (size, WIDTH), each row its index, and their sums (size, 1)."""
    numbers: Tensor = torch.arange(size, dtype=torch.float32)[:, None].repeat(1, WIDTH) / size
    return TensorDataset(numbers, numbers.sum(1, keepdim=True))


class Plain(DeepSpeedTrial):
    """One engine, the package's own loader; notes what it is called with."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        self.calls: list[tuple[int, int]] = []
        self.rows: list[int] = []
        self.iterators: set[bool] = set()
        self.prepare()

    def prepare(self) -> None:
        self.engine = self.context.wrap_model_engine(self.build())

    def build(self, **config: Any) -> Any:
        model = nn.Linear(WIDTH, 1)
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config={**self.context.get_hparams(), **config}
        )
        return engine

    def build_training_data_loader(self) -> Any:
        return DataLoader(samples(), batch_size=self.context.get_train_micro_batch_size_per_gpu(), shuffle=True)

    def build_validation_data_loader(self) -> Any:
        return DataLoader(samples(15), batch_size=4)

    def loss(self, batch: Any, engine: Any = None) -> Tensor:
        numbers, sums = self.context.to_device(batch)
        self.rows += (numbers[:, 0] * 64).round().int().tolist()
        error: Tensor = (engine or self.engine)(numbers) - sums
        return error.square().mean()

    def train_batch(self, dataloader_iter: Iterator[Any] | None, epoch_idx: int, batch_idx: int) -> Any:
        self.calls.append((epoch_idx, batch_idx))
        assert dataloader_iter is not None
        loss = self.loss(next(dataloader_iter))
        self.engine.backward(loss)
        self.engine.step()
        return loss

    def evaluate_batch(self, dataloader_iter: Iterator[Any] | None, batch_idx: int) -> dict[str, Any]:
        assert dataloader_iter is not None
        assert not torch.is_grad_enabled()
        assert not self.engine.module.training
        numbers, _ = next(dataloader_iter)
        return {"mean": numbers[:, 0].mean()}


class TwoEngines(Plain):
    """The second engine has another batch size; the first counts."""

    def prepare(self) -> None:
        super().prepare()
        self.second = self.context.wrap_model_engine(self.build(gradient_accumulation_steps=1))

    def train_batch(self, dataloader_iter: Iterator[Any] | None, epoch_idx: int, batch_idx: int) -> Any:
        assert dataloader_iter is not None
        batch = next(dataloader_iter)
        losses = {}
        for name, engine in (("first", self.engine), ("second", self.second)):
            losses[name] = self.loss(batch, engine)
            engine.backward(losses[name])
            engine.step()
        self.calls.append((epoch_idx, batch_idx))
        return losses


class ByItself(Plain):
    """Accumulates gradients by itself."""

    def prepare(self) -> None:
        super().prepare()
        self.context.disable_auto_grad_accumulation()

    def train_batch(self, dataloader_iter: Iterator[Any] | None, epoch_idx: int, batch_idx: int) -> Any:
        micro = [super(ByItself, self).train_batch(dataloader_iter, epoch_idx, batch_idx) for _ in range(3)]
        return {"loss": torch.stack(micro).mean()}


class DeepSpeedLoader(Plain):
    """Trains on the loader that ``deepspeed.initialize`` made; validates on torch's."""

    checks = False

    def prepare(self) -> None:
        model = nn.Sequential(nn.Dropout(0.5), nn.Linear(WIDTH, 1))
        engine, _, self.loader, _ = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            training_data=samples(),
            config=dict(self.context.get_hparams()),
        )
        self.engine = self.context.wrap_model_engine(engine)
        if not self.checks:
            self.context.disable_dataset_reproducibility_checks()

    def build_training_data_loader(self) -> Any:
        return self.loader

    def build_validation_data_loader(self) -> Any:
        return torch.utils.data.DataLoader(samples(8), batch_size=4)


class Checked(DeepSpeedLoader):
    checks = True


class TorchLoader(DeepSpeedLoader):
    """Shuffles by torch's own generator."""

    def build_training_data_loader(self) -> Any:
        return torch.utils.data.DataLoader(samples(), batch_size=2, shuffle=True)


class Spread(MetricReducer):
    """The difference between the largest and the smallest value of all ranks."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def reset(self) -> None:
        self.values = []

    def per_slot_reduce(self) -> list[float]:
        return [min(self.values), max(self.values)]

    def cross_slot_reduce(self, per_slot_metrics: list[list[float]]) -> dict[str, float]:
        ends = [value for ends in per_slot_metrics for value in ends]
        return {"smallest": min(ends), "largest": max(ends)}


class Reducing(Plain):
    """A function in training, a ``MetricReducer`` in both."""

    def prepare(self) -> None:
        super().prepare()
        self.count = self.context.wrap_reducer(len, name="values", for_validation=False)
        self.spread = self.context.wrap_reducer(Spread())

    def train_batch(self, dataloader_iter: Iterator[Any] | None, epoch_idx: int, batch_idx: int) -> Any:
        self.count.update(batch_idx)
        self.spread.values.append(float(self.context.distributed.get_rank() * 10 + batch_idx))
        super().train_batch(dataloader_iter, epoch_idx, batch_idx)
        return {}

    def evaluate_batch(self, dataloader_iter: Iterator[Any] | None, batch_idx: int) -> dict[str, Any]:
        self.spread.values.append(float(100 + self.context.distributed.rank))
        return super().evaluate_batch(dataloader_iter, batch_idx)


class OneCopy(Plain):
    """Both ranks hold one copy of the model: rank 0 reads and reports for both."""

    def prepare(self) -> None:
        rank = self.context.distributed.get_rank()
        self.context.set_mpu(
            ModelParallelUnit(
                data_parallel_rank=0,
                data_parallel_world_size=1,
                should_report_metrics=rank == 0,
                should_build_dataloader=rank == 0,
            )
        )
        super().prepare()

    def train_batch(self, dataloader_iter: Iterator[Any] | None, epoch_idx: int, batch_idx: int) -> Any:
        return {"loss": super().train_batch(self.shared(dataloader_iter), epoch_idx, batch_idx)}

    def evaluate_batch(self, dataloader_iter: Iterator[Any] | None, batch_idx: int) -> dict[str, Any]:
        mean = super().evaluate_batch(self.shared(dataloader_iter), batch_idx)["mean"]
        return {"mean": mean if self.context.distributed.rank == 0 else -1e9}

    def shared(self, dataloader_iter: Iterator[Any] | None) -> Iterator[Any]:
        self.iterators.add(dataloader_iter is not None)
        batch = [None if dataloader_iter is None else next(dataloader_iter)]
        torch.distributed.broadcast_object_list(batch)
        return iter(batch)


class Pipeline(Plain):
    """Two stages; the engine takes its data by itself."""

    validation = 12

    def build(self, **config: Any) -> Any:
        layers = [nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 1)]
        model = PipelineModule(layers=layers, num_stages=2, loss_fn=nn.MSELoss())
        settings = {**self.context.get_hparams(), **config}
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
        return engine

    def build_validation_data_loader(self) -> Any:
        return DataLoader(samples(self.validation), batch_size=2)

    def train_batch(self, dataloader_iter: Iterator[Any] | None, epoch_idx: int, batch_idx: int) -> Any:
        self.calls.append((epoch_idx, batch_idx))
        return {"loss": self.engine.train_batch()}

    def evaluate_batch(self, dataloader_iter: Iterator[Any] | None, batch_idx: int) -> dict[str, Any]:
        self.calls.append((-1, batch_idx))
        return {"loss": self.engine.eval_batch()}


class Watching(PyTorchCallback):
    """Notes what it is called with; adds a metric of its own."""

    def __init__(self, trial: Watched) -> None:
        self.trial = trial
        self.called: list[Any] = []
        self.restored: list[str] = []

    def on_trial_startup(self, first_batch_idx: int, checkpoint_uuid: str | None) -> None:
        self.called.append(["startup", first_batch_idx, checkpoint_uuid])

    def on_training_epoch_end(self, epoch_idx: int) -> None:
        self.called.append(["epoch", epoch_idx])

    def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]) -> None:
        self.called.append(["workload", sorted(avg_metrics), len(batch_metrics)])

    def on_validation_epoch_end(self, outputs: list[dict[str, Any]]) -> None:
        self.called.append(["outputs", len(outputs) > 0])

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        metrics["added"] = 1.0

    def on_checkpoint_write_end(self, checkpoint_dir: str) -> None:
        self.called.append(["written", Path(checkpoint_dir).name])

    def on_trial_shutdown(self) -> None:
        self.called.append(["shutdown"])

    def state_dict(self) -> dict[str, Any]:
        return {"saved": "state"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.restored.append(state_dict["saved"])


class Watched(Plain):
    """Has a callback, and one rank requests the end after the second batch."""

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        self.watching = Watching(self)
        return {"watching": self.watching}

    def train_batch(self, dataloader_iter: Iterator[Any] | None, epoch_idx: int, batch_idx: int) -> Any:
        if batch_idx == 1 and self.context.distributed.get_rank() == 1:
            self.context.set_stop_requested(True)
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)


class Halves(Plain):
    """Trains on one micro-batch where it said that it accumulates by itself."""

    def prepare(self) -> None:
        super().prepare()
        self.context.disable_auto_grad_accumulation()


class ShortPipeline(Pipeline):
    validation = 4


class TwoTopologies(Pipeline):
    """A pipeline after an engine that is none."""

    def prepare(self) -> None:
        self.context.wrap_model_engine(Plain.build(self))
        super().prepare()


class NoEngine(Plain):
    def prepare(self) -> None:
        pass


OFFLOAD = {"zero_optimization": {**CONFIG["zero_optimization"], "offload_param": {"device": "cpu"}}}


def context(world: GroupRank, **config: Any) -> DeepSpeedTrialContext:
    seed_everything(3)
    return DeepSpeedTrialContext({**CONFIG, **config}, group=world, seed=3)


def train(trial_class: type[Plain], world: GroupRank, folder: Path, *, batches: int = 4, resume: bool = False) -> Plain:
    given = context(world)
    trial = trial_class(given)
    periods = Periods(
        max_length=Length.parse(f"{batches}batches"),
        report=Length.parse("1"),
        validation=Length.parse("4"),
        checkpoint=Length.parse("2"),
    )
    Training(trial, given).run(periods, folder=folder, resume=resume)
    return trial


def refused(trial_class: type[Plain], world: GroupRank, folder: Path, **config: Any) -> str:
    """Return the message with which a definition is refused."""
    given = context(world, **config)
    try:
        Training(trial_class(given), given).run(
            Periods(max_length=Length.parse("1"), report=Length.parse("1")), folder=folder
        )
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "it trained"


def main(folder: Path) -> None:
    deepspeed.init_distributed()
    world = GroupRank.from_environment()
    result: dict[str, Any] = {"refused": {}}

    def run(kind: type[Plain]) -> None:
        trial = train(kind, world, folder / kind.__name__)
        own = {
            "calls": trial.calls,
            "rows": trial.rows,
            "iterators": sorted(trial.iterators),
            "steps": [int(engine.global_steps) for engine in trial.context.engines],
        }
        result[kind.__name__] = trial.context.distributed.allgather(own)

    def resume(kind: type[Plain]) -> None:
        name = f"{kind.__name__}-resumed"
        train(kind, world, folder / name, batches=2)
        train(kind, world, folder / name, resume=True)

    def watch() -> None:
        parts = [train(Watched, world, folder / "Watched", resume=resumes) for resumes in (False, True)]
        ranks = parts[0].context.distributed
        own = {
            "called": [trial.watching.called for trial in parts if isinstance(trial, Watched)],
            "restored": [trial.watching.restored for trial in parts if isinstance(trial, Watched)],
            "gather": [ranks.gather(world.rank), ranks.gather_local(world.rank)],
            "allgather": [ranks.allgather(world.rank), ranks.allgather_local(world.rank)],
            "broadcast": [ranks.broadcast(world.rank), ranks.broadcast_local(world.rank)],
        }
        result["Watched"] = ranks.allgather(own)

    def refuse(kind: type[Plain], **config: Any) -> None:
        result["refused"][kind.__name__] = refused(kind, world, folder / "refused", **config)

    for kind in (Plain, TwoEngines, ByItself, DeepSpeedLoader, TorchLoader, Reducing, OneCopy):
        run(kind)
    resume(DeepSpeedLoader)
    resume(TorchLoader)
    watch()
    refuse(Checked)
    refuse(NoEngine)
    refuse(Halves)
    refuse(Plain, **OFFLOAD)
    # DeepSpeed keeps a pipeline's ranks for all engines that follow in the process, so pipelines come last.
    refuse(TwoTopologies)
    run(Pipeline)
    resume(Pipeline)
    refuse(ShortPipeline)
    if world.rank == 0:
        (folder / "found.json").write_text(json.dumps(result), encoding="utf-8")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
