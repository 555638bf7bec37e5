"""Context of a model definition: hyperparameters, ranks, and registration of engines and reducers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from optuna_dsat.integrations.deepspeed_trial.loaders import Shard
from optuna_dsat.integrations.deepspeed_trial.metrics import FunctionReducer, MetricReducer, RegisteredReducer
from optuna_dsat.integrations.deepspeed_trial.ranks import DistributedContext, ModelParallelUnit, model_parallel_unit
from optuna_dsat.runtime.measure.engine import is_pipeline
from optuna_dsat.runtime.overlay import merge, read_config
from optuna_dsat.runtime.rank import GroupRank
from optuna_dsat.runtime.reporting import trial_config


class SilentWriter:
    """Replacement for a ``SummaryWriter`` that writes nothing and needs no TensorBoard."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_args, **_options: None


class AttrDict(dict[str, Any]):
    """Dict with attribute access to its entries, including nested entries, like ``attrdict.AttrDict``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__({key: _attributes(value) for key, value in dict(*args, **kwargs).items()})

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"There is no entry {name!r}; there are {', '.join(self) or 'none'}.") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = _attributes(value)


class DeepSpeedTrialContext:
    """Context passed to a ``DeepSpeedTrial``.

    Args:
        hparams: Hyperparameters; ``deepspeed_config`` is the path of this launch's config.
        experiment: The experiment configuration; None if only hyperparameters are given.
        tensorboard_dir: Folder for TensorBoard's files; None for ``tensorboard`` in the working directory.
        group: Rank and size of the process group.
        seed: Seed of data order and initialization.
        measuring: Whether this launch is part of a search: no evaluation, checkpoints or metrics.
    """

    def __init__(
        self,
        hparams: Mapping[str, Any],
        *,
        experiment: Mapping[str, Any] | None = None,
        tensorboard_dir: Path | None = None,
        group: GroupRank,
        seed: int = 0,
        measuring: bool = False,
    ) -> None:
        self.distributed = DistributedContext(group)
        self.engines: list[Any] = []
        self.reducers: list[RegisteredReducer] = []
        self.automatic_accumulation = True
        self.checks_loaders = True
        self.batches: Iterator[Any] | None = None
        """Iterator that ``train_batch()`` and ``eval_batch()`` of a pipeline engine read if they get none."""
        self.finished_batches = 0
        """Completed global batches; updated by the training loop."""
        self._hparams = AttrDict(hparams)
        self._experiment = None if experiment is None else dict(experiment)
        self._tensorboard_dir = tensorboard_dir or Path.cwd() / "tensorboard"
        self._writer: Any = None
        self._stop_requested = False
        self._seed = seed
        self._measuring = measuring
        self._unit: ModelParallelUnit | None = None

    def get_hparams(self) -> AttrDict:
        """Return the hyperparameters; ``deepspeed_config`` is the path of this launch's config."""
        return AttrDict(self._hparams)

    def get_hparam(self, name: str) -> Any:
        """Return a hyperparameter.

        Raises:
            KeyError: If the hyperparameter does not exist.
        """
        if name not in self._hparams:
            raise KeyError(f"There is no hyperparameter {name!r}; there are {', '.join(self._hparams) or 'none'}.")
        return self._hparams[name]

    def get_experiment_config(self) -> dict[str, Any]:
        """Return the experiment configuration.

        Raises:
            ValueError: If only hyperparameters are given.
        """
        if self._experiment is None:
            raise ValueError(
                "There is no experiment configuration, only hyperparameters: name a file with a section "
                "hyperparameters by --hparams."
            )
        return dict(self._experiment)

    def get_data_config(self) -> dict[str, Any]:
        """Return the ``data`` section of the experiment configuration; empty if missing."""
        return dict((self._experiment or {}).get("data") or {})

    def get_tensorboard_path(self) -> Path:
        """Return the folder of TensorBoard's files; during a search, each launch has a separate folder."""
        return self._tensorboard_dir

    def get_tensorboard_writer(self) -> Any:
        """Return the ``SummaryWriter`` of this rank; during a search, a writer that discards everything.

        Raises:
            ImportError: If TensorBoard is not installed.
        """
        if self._writer is None and self._measuring:
            self._writer = SilentWriter()
        elif self._writer is None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ImportError(
                    "context.get_tensorboard_writer() needs TensorBoard in the script's environment: pip install "
                    "tensorboard."
                ) from error
            self._writer = SummaryWriter(str(self._tensorboard_dir))
        return self._writer

    def close(self) -> None:
        """Flush and close the TensorBoard writer."""
        if self._writer is not None:
            self._writer.close()

    def set_stop_requested(self, stop_requested: bool) -> None:
        """Stop training at the end of the current reporting period, with a checkpoint.

        A request of any rank stops all ranks. It has no effect during a search.

        Raises:
            TypeError: If ``stop_requested`` is not a bool.
        """
        if not isinstance(stop_requested, bool):
            raise TypeError(f"set_stop_requested takes a bool; got {stop_requested!r}.")
        self._stop_requested = stop_requested

    def get_stop_requested(self) -> bool:
        """Return whether this rank requested to stop training."""
        return self._stop_requested

    def get_trial_seed(self) -> int:
        """Return the seed of this training."""
        return self._seed

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        from deepspeed.accelerator import get_accelerator

        return torch.device(get_accelerator().current_device_name())

    def to_device(self, data: Any) -> Any:
        """Return data with all tensors, also in mappings, lists and tuples, moved to this rank's device."""
        return _moved(data, self.device)

    def wrap_model_engine(self, model: Any) -> Any:
        """Register an engine and return it. The first engine defines the batch size; the others share its data.

        Args:
            model: The engine, i.e. the first return value of ``deepspeed.initialize``.

        Raises:
            TypeError: If ``model`` is not an engine.
            ValueError: If DeepSpeed does not support its configuration, or its data parallelism differs from the
                first engine's.
        """
        check_engine(model, measuring=self._measuring)
        if self.engines:
            first = self.engines[0]
            if int(model.dp_world_size) != int(first.dp_world_size) or is_pipeline(model) != is_pipeline(first):
                raise ValueError(
                    "All engines of a trial share one model parallelism: this one trains "
                    f"{model.dp_world_size} copies{' of a pipeline' * is_pipeline(model)}, the first "
                    f"{first.dp_world_size}{' of a pipeline' * is_pipeline(first)}."
                )
        elif self._unit is None:
            self._unit = model_parallel_unit(model, self.distributed)
        if is_pipeline(model):
            model.train_batch = self._feeding(model.train_batch)
            model.eval_batch = self._feeding(model.eval_batch)
        self.engines.append(model)
        return model

    def set_mpu(self, mpu: ModelParallelUnit) -> None:
        """Define which ranks share data, build data loaders and report metrics, if the engine does not.

        Args:
            mpu: The model parallelism of this rank.

        Raises:
            TypeError: If ``mpu`` is not a ``ModelParallelUnit``.
            ValueError: If its data-parallel size exceeds the number of ranks.
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
        """Model parallelism set by ``set_mpu``, else of the first engine.

        Raises:
            RuntimeError: If neither exists yet.
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
        """Register a reducer and return it; for a function, return a reducer with ``update(value)``.

        Args:
            reducer: A ``MetricReducer``, or a function of the list of values passed to ``update`` on all reporting
                ranks.
            name: Name of the metric; None if the reducer returns a mapping of metrics.
            for_training: Whether to report its metric in training.
            for_validation: Whether to report its metric in validation.

        Raises:
            TypeError: If ``reducer`` is neither.
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
        """Call ``train_batch`` once per global batch; it must accumulate gradients itself."""
        self.automatic_accumulation = False

    def disable_dataset_reproducibility_checks(self) -> None:
        """Accept any data loader, e.g. from ``deepspeed.initialize``; it must shard the data itself."""
        self.checks_loaders = False

    @property
    def use_pipeline_parallel(self) -> bool:
        """Whether the first engine is a pipeline engine."""
        return bool(self.engines) and is_pipeline(self.engines[0])

    def get_train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples per micro-batch and rank of the first engine, else of the config."""
        return int(self.engines[0].train_micro_batch_size_per_gpu()) if self.engines else self._batch_sizes()[0]

    train_micro_batch_size_per_gpu = property(get_train_micro_batch_size_per_gpu)
    _train_micro_batch_size_per_gpu = train_micro_batch_size_per_gpu  # a public example reads it

    def get_num_micro_batches_per_slot(self) -> int:
        """Return the micro-batches per global batch of the first engine, else of the config."""
        return int(self.engines[0].gradient_accumulation_steps()) if self.engines else self._batch_sizes()[1]

    num_micro_batches_per_slot = property(get_num_micro_batches_per_slot)

    @property
    def models(self) -> list[Any]:
        """The registered engines."""
        return self.engines

    def current_train_batch(self) -> int:
        """Return the number of completed global batches."""
        return self.finished_batches

    def shard(self) -> Shard:
        """Return the shard of the data that this rank reads."""
        return Shard(
            rank=self.mpu.data_parallel_rank,
            size=self.mpu.data_parallel_world_size,
            seed=self._seed,
            whole_batches=self.use_pipeline_parallel,
        )

    def _feeding(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method of a pipeline engine to read the trial's data unless given an iterator."""

        @functools.wraps(original)
        def batch(data_iter: Iterator[Any] | None = None, *args: Any, **kwargs: Any) -> Any:
            return original(self.batches if data_iter is None else data_iter, *args, **kwargs)

        return batch

    def _batch_sizes(self) -> tuple[int, int]:
        named = self._hparams.get("deepspeed_config")
        base = self._hparams if named is None else read_config(named)
        config = trial_config(merge(base, self._hparams.get("overwrite_deepspeed_args") or {}))
        ranks = self.distributed.size if self._unit is None else self._unit.data_parallel_world_size
        keys = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
        sizes = [config.get(key) for key in keys]
        micro, steps, whole = (size if isinstance(size, int) else None for size in sizes)
        if micro is None and whole is None:
            raise ValueError("The DeepSpeed config gives neither train_micro_batch_size_per_gpu nor train_batch_size.")
        if steps is None:
            steps = whole // (micro * ranks) if micro is not None and whole is not None else 1
        return micro if micro is not None else (whole or 0) // (steps * ranks), steps


def overwrite_deepspeed_config(
    base_ds_config: str | Mapping[str, Any], source_ds_dict: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a DeepSpeed config with settings merged into it and, in a trial, also the trial's settings.

    Args:
        base_ds_config: Path of a (H)JSON file, or the config itself.
        source_ds_dict: Settings to merge key by key; None removes a key.

    Raises:
        ValueError: If the base config cannot be read.
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
    if isinstance(data, (list, tuple)):
        return type(data)(_moved(item, device) for item in data)
    return data


def check_engine(engine: Any, *, measuring: bool) -> None:
    """Reject configurations that DeepSpeed 0.19 does not support or silently ignores.

    Args:
        engine: The first return value of ``deepspeed.initialize``.
        measuring: Whether this launch is part of a search. A search varies the ZeRO stage, so offloads that a stage
            does not use are then allowed.

    Raises:
        TypeError: If ``engine`` is not an engine.
        ValueError: If the configuration is not supported.
    """
    if not all(hasattr(engine, name) for name in ("train_batch_size", "zero_optimization_stage", "module")):
        raise TypeError(f"wrap_model_engine takes the engine that deepspeed.initialize returns first; got {engine!r}.")
    stage = int(engine.zero_optimization_stage())
    if is_pipeline(engine) and stage > 1:
        raise ValueError(
            f"A pipeline runs with ZeRO 0 or 1, not {stage}: it accumulates whole gradients over its micro-batches, "
            "which higher stages partition."
        )
    if measuring:
        return
    devices = [getattr(item, "device", None) for item in (engine.zero_offload_param(), engine.zero_offload_optimizer())]
    param, optimizer = (str(getattr(device, "value", device or "none")) for device in devices)
    if param != "none" and stage != 3:
        raise ValueError(
            f"offload_param is for ZeRO 3, not {stage}: only there are parameters partitioned, and DeepSpeed would "
            "keep them on the device without a word."
        )
    if optimizer != "none" and stage == 0:
        raise ValueError(
            "offload_optimizer is for ZeRO 1, 2 and 3: without ZeRO there is no optimizer of DeepSpeed's to offload."
        )
    if optimizer == "nvme" and stage != 3:
        raise ValueError(
            f"offload_optimizer to NVMe is for ZeRO 3, not {stage}: ZeRO 1 and 2 offload to the CPU alone."
        )
