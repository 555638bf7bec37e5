"""The training loop: batches, reporting periods, validations and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from optuna_dsat.integrations.deepspeed_trial.checkpoints import (
    STEPS_COMPLETED,
    Checkpoints,
    newest_checkpoint,
    random_states,
    restore_random_states,
)
from optuna_dsat.integrations.deepspeed_trial.context import DeepSpeedTrialContext
from optuna_dsat.integrations.deepspeed_trial.loaders import (
    DataLoader,
    EndlessBatches,
    Position,
    ValidationBatches,
    training_batches,
)
from optuna_dsat.integrations.deepspeed_trial.metrics import Averages, MetricsFile, by_name, reduced
from optuna_dsat.integrations.deepspeed_trial.trial import DeepSpeedTrial, PyTorchCallback
from optuna_dsat.runtime.adapt.batch_sources import length_of
from optuna_dsat.script.trial_class import Length

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class Periods:
    """Length of training, and periods of reports, validations and checkpoints."""

    max_length: Length
    report: Length
    """Period of reporting training metrics."""
    validation: Length | None = None
    """Period of validations; None for a single validation after the last batch."""
    checkpoint: Length | None = None
    """Period of checkpoints; None for a single checkpoint after the last batch."""


class Training:
    """Trains a model definition. Construct it on all ranks (collective), after the definition.

    Raises:
        RuntimeError: If the definition registered no engine.
        TypeError: If a loader cannot be sharded and checks were not disabled.
        ValueError: If no rank reports, no rank reads data, or the ranks disagree on the data-parallel size.
    """

    def __init__(self, trial: DeepSpeedTrial, context: DeepSpeedTrialContext) -> None:
        self._trial = trial
        self._context = context
        self._ranks = context.distributed
        self._callbacks = _checked(trial.build_callbacks())
        self._unit = context.mpu
        if not context.engines:
            raise RuntimeError("No engine is known: call context.wrap_model_engine in the trial's __init__.")
        self._engine = context.engines[0]
        self._train_batch_size = int(self._engine.train_batch_size())
        self._check_roles()
        self._stream = self._build_stream()
        self._micro_batches_per_epoch = self._agreed(None if self._stream is None else self._stream.per_epoch)
        self._averages = Averages()
        self._returned: list[dict[str, Any]] = []
        """Results of the definition's methods in the current period, for callbacks."""
        self._validation: Any = None
        self._validation_calls = 0
        self._batches = 0

    @property
    def _accumulation(self) -> int:
        """Micro-batches of a batch; a launch of a search may change them between two batches."""
        return int(self._engine.gradient_accumulation_steps())

    def measure(self) -> None:
        """Train indefinitely; the runtime ends the process after the last profile step."""
        self._reset(training=True)
        self._call("on_trial_startup", 0, None)
        self._call("on_training_start")
        while True:
            self._train_batch(counts=False)

    def run(self, periods: Periods, *, folder: Path | None = None, resume: bool = False) -> None:
        """Train to the end or until a stop is requested.

        A validation follows the last batch; a checkpoint follows the last batch or the stop.

        Args:
            periods: Length of training, and periods of reports, validations and checkpoints.
            folder: Folder for checkpoints and ``metrics.jsonl``; None to write neither.
            resume: Whether to resume from the newest checkpoint, if any.

        Raises:
            FileExistsError: If the folder contains checkpoints and ``resume`` is False.
            ValueError: If a length is in epochs and the loader has no length, or the checkpoint was saved by a training
                with other settings.
        """
        total, report = self._length(periods.max_length), self._length(periods.report)
        validate = total if periods.validation is None else self._length(periods.validation)
        save = total if periods.checkpoint is None else self._length(periods.checkpoint)
        self._build_validation()
        checkpoints = None if folder is None else Checkpoints(folder, rank=self._ranks.rank)
        self._start(checkpoints, resume=resume)
        path = None if folder is None else folder / METRICS
        output = MetricsFile(path, steps_completed=self._batches) if self._ranks.rank == 0 else None
        self._reset(training=True)
        try:
            self._call("on_training_start")
            while self._batches < total:
                self._train_batch()
                ends = self._batches == total
                validates, saves = ends or self._batches % validate == 0, ends or self._batches % save == 0
                if not (validates or saves or self._batches % report == 0):
                    continue
                # Periods never span a checkpoint, so that resumed training reports the same metrics.
                self._end_period(output)
                if validates:
                    self._report(output, "validation", self._validate())
                    self._reset(training=True)
                stops = any(self._ranks.allgather(self._context.get_stop_requested()))
                if (saves or stops) and checkpoints is not None:
                    self._save(checkpoints)
                if stops:
                    break
        finally:
            self._call("on_trial_shutdown")
            self._context.close()

    def _call(self, method: str, *args: Any) -> None:
        for callback in self._callbacks.values():
            getattr(callback, method)(*args)

    def _end_period(self, output: MetricsFile | None) -> None:
        metrics = self._reduced(training=True)
        self._report(output, "training", metrics)
        self._call("on_training_workload_end", metrics, self._take_returned())
        self._reset(training=True)

    def _train_batch(self, *, counts: bool = True) -> None:
        micro_batches = self._batches * self._accumulation
        epoch = 0 if self._micro_batches_per_epoch is None else micro_batches // self._micro_batches_per_epoch
        self._context.batches = self._stream
        per_epoch = self._batches_per_epoch()
        if per_epoch is not None and self._batches % per_epoch == 0:
            self._call("on_training_epoch_start", self._batches // per_epoch)
        whole = self._context.use_pipeline_parallel or not self._context.automatic_accumulation
        for _ in range(1 if whole else self._accumulation):
            metrics = self._trial.train_batch(self._stream, epoch, self._batches)
            if counts and self._unit.should_report_metrics:
                self._add(metrics, where="train_batch")
        self._check_accumulation()
        if per_epoch is not None and (self._batches + 1) % per_epoch == 0:
            self._call("on_training_epoch_end", self._batches // per_epoch)
        self._batches += 1
        self._context.finished_batches = self._batches

    def _add(self, metrics: Any, *, weight: float = 1.0, where: str) -> None:
        """Add the result of the definition's method ``where`` to the period."""
        self._averages.add(metrics, weight=weight, where=where)
        if self._callbacks:
            named = by_name(metrics, where=where)
            tensors = {name: value.detach() for name, value in named.items() if isinstance(value, torch.Tensor)}
            self._returned.append({**named, **tensors})

    def _take_returned(self) -> list[dict[str, Any]]:
        """Return the results of the period, with tensors moved to the CPU, and start the next period."""
        taken, self._returned = self._returned, []
        return [
            {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in metrics.items()}
            for metrics in taken
        ]

    def _check_accumulation(self) -> None:
        """Reject a batch that ended within a gradient accumulation: engine steps and counted batches would diverge."""
        done = getattr(self._engine, "micro_steps", 0)
        if self._context.use_pipeline_parallel or done % self._accumulation == 0:
            return
        how = (
            "each call of train_batch trains on one micro-batch"
            if self._context.automatic_accumulation
            else "train_batch trains on all micro-batches of a batch after disable_auto_grad_accumulation()"
        )
        raise RuntimeError(
            f"The first engine has trained on {done} micro-batches after {self._batches + 1} batches of "
            f"{self._accumulation} (gradient_accumulation_steps): {how}, by forward, backward and step."
        )

    def _validate(self) -> dict[str, Any]:
        """Run a validation and return its metrics; restores the random states, so that training is unaffected."""
        self._reset(training=False)
        states = random_states()
        batches = None if self._validation is None else ValidationBatches(self._validation)
        self._context.batches = batches
        for engine in self._context.engines:
            engine.eval()
        self._call("on_validation_start")
        self._call("on_validation_epoch_start")
        with torch.no_grad():
            for index in range(self._validation_calls):
                metrics = self._trial.evaluate_batch(batches, index)
                if self._unit.should_report_metrics:
                    samples = 0 if batches is None else batches.taken()
                    self._add(metrics, weight=samples or 1, where="evaluate_batch")
        self._call("on_validation_epoch_end", self._take_returned())
        for engine in self._context.engines:
            engine.train()
        restore_random_states(states)
        metrics = self._reduced(training=False)
        self._call("on_validation_end", metrics)
        return metrics

    def _reduced(self, *, training: bool) -> dict[str, Any]:
        reducers = [registered for registered in self._context.reducers if registered.serves(training=training)]
        return reduced(self._averages, reducers, self._ranks, reports=self._unit.should_report_metrics)

    def _reset(self, *, training: bool) -> None:
        for registered in self._context.reducers:
            if registered.serves(training=training):
                registered.reducer.reset()

    def _report(self, output: MetricsFile | None, kind: str, metrics: Mapping[str, Any]) -> None:
        if output is not None:
            records = self._batches * self._train_batch_size
            output.write({"kind": kind, STEPS_COMPLETED: self._batches, "records": records, "metrics": metrics})

    def _save(self, checkpoints: Checkpoints) -> None:
        position = None if self._stream is None else asdict(self._stream.position)
        callbacks = {name: callback.state_dict() for name, callback in self._callbacks.items()}
        state = {"position": position, "states": random_states(), "callbacks": callbacks}
        self._call("on_checkpoint_save_start", state)
        folder = checkpoints.save(
            self._batches,
            write=lambda path: self._trial.save(self._context, path),
            rank_state=state,
            shared_state=self._identity(),
        )
        self._call("on_checkpoint_write_end", str(folder))
        self._call("on_checkpoint_upload_end", folder.name)

    def _start(self, checkpoints: Checkpoints | None, *, resume: bool) -> None:
        # The first rank looks for all: a file system of the network may show others an earlier state.
        newest = self._ranks.broadcast(None if checkpoints is None else newest_checkpoint(checkpoints.folder))
        if checkpoints is None or newest is None:
            self._call("on_trial_startup", 0, None)
            return
        if not resume:
            raise FileExistsError(f"{checkpoints.folder} holds checkpoints: resume from them, or name another folder.")
        state = checkpoints.read_shared_state(newest)
        for key, value in self._identity().items():
            if state.get(key) != value:
                raise ValueError(f"{newest} was saved with {key} {state.get(key)}, and this training has {value}.")
        completed = state[STEPS_COMPLETED]
        self._call("on_trial_startup", completed, newest.name)
        rank_state = checkpoints.read_rank_state(newest)
        self._call("on_checkpoint_load_start", rank_state)
        self._trial.load(self._context, newest)
        for name, saved in rank_state.get("callbacks", {}).items():
            if name in self._callbacks:
                self._callbacks[name].load_state_dict(saved)
        if self._stream is not None and rank_state["position"] is not None:
            self._stream.restore(Position(**rank_state["position"]))
        restore_random_states(rank_state["states"])
        self._batches = self._context.finished_batches = completed

    def _identity(self) -> dict[str, Any]:
        """Return the settings that must be equal when training resumes from a checkpoint."""
        return {
            "world_size": self._ranks.size,
            "engines": len(self._context.engines),
            "train_batch_size": self._train_batch_size,
            "gradient_accumulation_steps": self._accumulation,
            "seed": self._context.get_trial_seed(),
        }

    def _length(self, length: Length) -> int:
        if self._micro_batches_per_epoch is None and length.unit == "epochs":
            raise ValueError("The training data loader has no length: give lengths in batches or records, not epochs.")
        per_epoch = self._batches_per_epoch() or 1
        return length.batches(per_epoch=per_epoch, train_batch_size=self._train_batch_size)

    def _batches_per_epoch(self) -> int | None:
        """Return the global batches per epoch, at least 1; None if the loader has no length."""
        count = self._micro_batches_per_epoch
        return None if count is None else max(1, count // self._accumulation)

    def _check_roles(self) -> None:
        unit = self._unit
        roles = self._ranks.allgather(
            (unit.should_build_data_loader, unit.should_report_metrics, unit.data_parallel_world_size)
        )
        builds, reports, sizes = (list(column) for column in zip(*roles))
        if not any(builds) or not any(reports):
            raise ValueError(
                "At least one rank builds data loaders and at least one reports; the ModelParallelUnits that were set "
                f"say {builds} and {reports}."
            )
        if len(set(sizes)) > 1:
            raise ValueError(f"data_parallel_world_size is the same on all ranks; got {sizes}.")

    def _build_stream(self) -> EndlessBatches | None:
        if not self._unit.should_build_data_loader:
            return None
        return training_batches(self._loader("build_training_data_loader"), self._context.shard())

    def _build_validation(self) -> None:
        """Build the validation data and agree on the number of its batches; collective."""
        count: int | None = None
        if self._unit.should_build_data_loader:
            loader = self._loader("build_validation_data_loader")
            if isinstance(loader, DataLoader):
                loader = loader.validation(self._context.shard())
            elif type(loader).__name__ == "RepeatingLoader":
                loader = loader.loader
            self._validation, count = loader, length_of(loader)
        result = self._agreed(count)
        if result is None:
            raise ValueError("The validation data loader has no length: the ranks cannot agree on the batches of it.")
        each = self._accumulation if self._context.use_pipeline_parallel else 1
        if result < each:
            raise ValueError(
                f"The validation data has {result} batches on a rank, and a pipeline takes {each} of them at once "
                "(gradient_accumulation_steps): give it more data, or accumulate less."
            )
        self._validation_calls = result // each

    def _loader(self, method: str) -> Any:
        loader = getattr(self._trial, method)()
        if loader is None or (self._context.checks_loaders and not isinstance(loader, DataLoader)):
            raise TypeError(
                f"{method} returns a DataLoader of optuna_dsat.integrations.deepspeed_trial; got "
                f"{type(loader).__name__}. Call context.disable_dataset_reproducibility_checks() to use it as it is."
            )
        return loader

    def _agreed(self, count: int | None) -> int | None:
        """Return the minimum count over the ranks that read data; None if any of them has None; collective."""
        counts = self._ranks.allgather((self._unit.should_build_data_loader, count))
        known = [number for builds, number in counts if builds]
        return None if None in known else min(known)


def _checked(callbacks: Any) -> dict[str, PyTorchCallback]:
    if not isinstance(callbacks, Mapping) or not all(isinstance(item, PyTorchCallback) for item in callbacks.values()):
        raise TypeError(
            "build_callbacks returns a mapping of names to PyTorchCallbacks of "
            f"optuna_dsat.integrations.deepspeed_trial; got {callbacks!r}."
        )
    return dict(callbacks)
