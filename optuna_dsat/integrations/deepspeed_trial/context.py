"""What a model definition is given: hyperparameters, its place among the ranks, and where it registers things."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from optuna_dsat.integrations.deepspeed_trial.engines import check_engine, feed_pipeline
from optuna_dsat.integrations.deepspeed_trial.loaders import Shard
from optuna_dsat.integrations.deepspeed_trial.model_parallel import ModelParallelUnit, unit_of
from optuna_dsat.integrations.deepspeed_trial.reducers import FunctionReducer, MetricReducer, RegisteredReducer
from optuna_dsat.runtime.meter import is_pipeline
from optuna_dsat.runtime.overlay import merge, read_config
from optuna_dsat.runtime.rank import World
from optuna_dsat.runtime.reporting import trial_config

__all__ = ["AttrDict", "DeepSpeedTrialContext", "DistributedContext", "overwrite_deepspeed_config"]


class AttrDict(dict[str, Any]):
    """A dict whose entries are attributes too, nested ones included, as the package ``attrdict`` has it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__({key: _attributes(value) for key, value in dict(*args, **kwargs).items()})

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"There is no entry {name!r}; there are {', '.join(self) or 'none'}.") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = _attributes(value)


class DistributedContext:
    """This process among the others, under the names that Determined gives.

    Args:
        world: From the environment.
    """

    def __init__(self, world: World) -> None:
        self.rank, self.size = world.rank, world.size
        self.local_rank, self.local_size = world.local_rank, world.local_size

    def get_rank(self) -> int:
        """Return the global rank, from 0."""
        return self.rank

    def get_size(self) -> int:
        """Return the ranks of the launch."""
        return self.size

    def get_local_rank(self) -> int:
        """Return the rank on this host, from 0."""
        return self.local_rank

    def get_local_size(self) -> int:
        """Return the ranks on this host."""
        return self.local_size


class DeepSpeedTrialContext:
    """Given to a ``DeepSpeedTrial``.

    Args:
        hparams: Hyperparameters; ``deepspeed_config`` leads to the config of this launch.
        data_config: The ``data`` section of an experiment configuration.
        world: This process among the others.
        seed: Seed of order and initialisation.
        measuring: Whether this is a launch of a search: no evaluation, no checkpoint, no report.
    """

    def __init__(
        self,
        hparams: Mapping[str, Any],
        *,
        data_config: Mapping[str, Any] | None = None,
        world: World,
        seed: int = 0,
        measuring: bool = False,
    ) -> None:
        self.distributed = DistributedContext(world)
        self.engines: list[Any] = []
        self.reducers: list[RegisteredReducer] = []
        self.automatic_accumulation = True
        self.checks_loaders = True
        self.batches: Iterator[Any] | None = None
        """What ``train_batch()`` and ``eval_batch()`` of a pipeline engine read where they are given nothing."""
        self.finished_batches = 0
        """Whole batches that are over; kept by the training loop."""
        self._hparams = AttrDict(hparams)
        self._data_config = dict(data_config or {})
        self._seed = seed
        self._measuring = measuring
        self._unit: ModelParallelUnit | None = None

    def get_hparams(self) -> AttrDict:
        """Return the hyperparameters; ``deepspeed_config`` leads to this launch's config, in a search the trial's."""
        return AttrDict(self._hparams)

    def get_hparam(self, name: str) -> Any:
        """Return a hyperparameter.

        Raises:
            KeyError: If there is none of this name.
        """
        if name not in self._hparams:
            raise KeyError(f"There is no hyperparameter {name!r}; there are {', '.join(self._hparams) or 'none'}.")
        return self._hparams[name]

    def get_data_config(self) -> dict[str, Any]:
        """Return the ``data`` section of an experiment configuration, empty where there is none."""
        return dict(self._data_config)

    def get_trial_seed(self) -> int:
        """Return the seed of this training."""
        return self._seed

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        from deepspeed.accelerator import get_accelerator

        return torch.device(get_accelerator().current_device_name())

    def to_device(self, data: Any) -> Any:
        """Return data with every tensor in it on this rank's device; mappings, lists and tuples are looked into."""
        return _moved(data, self.device)

    def wrap_model_engine(self, model: Any) -> Any:
        """Register an engine and return it. The first decides what a batch is; the others share its data.

        Args:
            model: What ``deepspeed.initialize`` returned first.

        Raises:
            TypeError: If it is no engine.
            ValueError: If DeepSpeed cannot train so, or the engine shares data between other ranks than the first.
        """
        check_engine(model, measuring=self._measuring)
        if self.engines:
            self._check_further(model)
        elif self._unit is None:
            self._unit = unit_of(model, rank=self.distributed.rank, world_size=self.distributed.size)
        if is_pipeline(model):
            feed_pipeline(model, lambda: self.batches)
        self.engines.append(model)
        return model

    def set_mpu(self, mpu: ModelParallelUnit) -> None:
        """Say which ranks share data, build loaders and report, where the engine does not know.

        Raises:
            TypeError: If it is no ``ModelParallelUnit``.
            ValueError: If there are more shares of the data than ranks.
        """
        if not isinstance(mpu, ModelParallelUnit):
            raise TypeError(f"set_mpu takes a ModelParallelUnit; got {mpu!r}.")
        if mpu.data_parallel_world_size > self.distributed.size:
            raise ValueError(
                f"data_parallel_world_size is {mpu.data_parallel_world_size}, on {self.distributed.size} ranks."
            )
        self._unit = mpu

    @property
    def mpu(self) -> ModelParallelUnit:
        """The model parallelism that was set, else the first engine's.

        Raises:
            RuntimeError: If neither is there yet.
        """
        if self._unit is None:
            raise RuntimeError("No engine is known yet: call context.wrap_model_engine in the trial's __init__ first.")
        return self._unit

    def wrap_reducer(
        self,
        reducer: MetricReducer | Callable[[list[Any]], Any],
        name: str | None = None,
        for_training: bool = True,
        for_validation: bool = True,
    ) -> Any:
        """Register a reducer and return it; of a function, an object with ``update(value)``.

        Args:
            reducer: A ``MetricReducer``, or a function of all values given to ``update`` on the ranks that report.
            name: Name of the metric; None where the reducer returns metrics by name.
            for_training: Whether its metric is reported in training.
            for_validation: Whether its metric is reported in validation.

        Raises:
            TypeError: If it is neither.
        """
        if not isinstance(reducer, MetricReducer):
            if not callable(reducer):
                raise TypeError(f"wrap_reducer takes a MetricReducer or a function; got {reducer!r}.")
            reducer = FunctionReducer(reducer)
        self.reducers.append(
            RegisteredReducer(reducer=reducer, name=name, for_training=for_training, for_validation=for_validation)
        )
        return reducer

    def disable_auto_grad_accumulation(self) -> None:
        """Have ``train_batch`` called once per batch: it accumulates gradients by itself."""
        self.automatic_accumulation = False

    def disable_dataset_reproducibility_checks(self) -> None:
        """Take any loader, also the one that ``deepspeed.initialize`` returned; sharding is left to it."""
        self.checks_loaders = False

    @property
    def use_pipeline_parallel(self) -> bool:
        """Whether the first engine is a pipeline."""
        return bool(self.engines) and is_pipeline(self.engines[0])

    def get_train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples of a micro-batch on one rank: the first engine's, before there is one the config's.

        Raises:
            ValueError: If there is neither engine nor config, or the config leaves it open.
        """
        return int(self.engines[0].train_micro_batch_size_per_gpu()) if self.engines else self._batch_sizes()[0]

    def get_num_micro_batches_per_slot(self) -> int:
        """Return the micro-batches of a batch (``gradient_accumulation_steps``), known as the micro-batch is."""
        return int(self.engines[0].gradient_accumulation_steps()) if self.engines else self._batch_sizes()[1]

    def current_train_batch(self) -> int:
        """Return the whole batches that are over."""
        return self.finished_batches

    def shard(self) -> Shard:
        """Return which part of the data this rank reads."""
        return Shard(
            rank=self.mpu.data_parallel_rank,
            size=self.mpu.data_parallel_world_size,
            seed=self._seed,
            whole_batches=self.use_pipeline_parallel,
        )

    def _check_further(self, engine: Any) -> None:
        first = self.engines[0]
        same = int(engine.dp_world_size) == int(first.dp_world_size) and is_pipeline(engine) == is_pipeline(first)
        if not same:
            raise ValueError(
                "All engines of a trial share one model parallelism: this one trains "
                f"{engine.dp_world_size} copies{' of a pipeline' * is_pipeline(engine)}, the first "
                f"{first.dp_world_size}{' of a pipeline' * is_pipeline(first)}."
            )

    def _batch_sizes(self) -> tuple[int, int]:
        """Return micro-batch and accumulation of the config, before there is an engine."""
        named = self._hparams.get("deepspeed_config")
        base = self._hparams if named is None else read_config(named)
        config = trial_config(merge(base, self._hparams.get("overwrite_deepspeed_args") or {}))
        micro, steps = config.get("train_micro_batch_size_per_gpu"), config.get("gradient_accumulation_steps")
        whole = config.get("train_batch_size")
        ranks = self.distributed.size if self._unit is None else self._unit.data_parallel_world_size
        if isinstance(micro, int):
            if isinstance(whole, int) and not isinstance(steps, int):
                return micro, whole // (micro * ranks)
            return micro, steps if isinstance(steps, int) else 1
        if not isinstance(whole, int):
            raise ValueError("The DeepSpeed config gives neither train_micro_batch_size_per_gpu nor train_batch_size.")
        steps = steps if isinstance(steps, int) else 1
        return whole // (steps * ranks), steps


def overwrite_deepspeed_config(
    base_ds_config: str | Mapping[str, Any], source_ds_dict: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a DeepSpeed config with settings laid over it; in a trial of a search with the trial's over both.

    Args:
        base_ds_config: Path of a (H)JSON file, or the config itself.
        source_ds_dict: Laid over it: objects merge key by key, None removes a key.

    Raises:
        ValueError: If the base is no config.
    """
    return trial_config(merge(read_config(base_ds_config), source_ds_dict))


def _attributes(value: Any) -> Any:
    if isinstance(value, Mapping):
        return AttrDict(value)
    return [_attributes(item) for item in value] if isinstance(value, list) else value


def _moved(data: Any, device: torch.device) -> Any:
    if hasattr(data, "to"):
        return data.to(device)
    if isinstance(data, Mapping):
        return {key: _moved(value, device) for key, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(_moved(item, device) for item in data))
    if isinstance(data, list | tuple):
        return type(data)(_moved(item, device) for item in data)
    return data
