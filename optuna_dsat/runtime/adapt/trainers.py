"""Applies the launch's config to trainers, which read it long before ``deepspeed.initialize``.

``transformers`` and ``accelerate`` build the model under ``zero.Init`` at ZeRO 3, fill in ``"auto"`` values, and
compare the config with ``TrainingArguments``. Therefore the overlay is applied to their copy of the config, and the
batch sizes of ``TrainingArguments`` are set to the launch's, as is their precision if a launch is in bf16; the
script's other settings are unchanged.

Lightning's DeepSpeed strategy, for its Trainer and for Fabric, builds the model likewise. The Trainer rejects a config
with ``gradient_accumulation_steps``, since it has an argument for it; that argument is set to the launch's value
instead. Batches come from the script's loader. Lightning's and accelerate's precision is set to a launch's bf16.

Measured launches do not evaluate, save, log, resume, push or report to trackers. This module imports none of these
libraries.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from optuna_dsat.runtime.adapt.accelerate import AccelerateConfig
from optuna_dsat.runtime.adapt.ranks import wrong_number
from optuna_dsat.runtime.adapt.side_effects import silent_loggers
from optuna_dsat.runtime.events import Event, TrainerFound
from optuna_dsat.runtime.imports import patch
from optuna_dsat.runtime.overlay import (
    GRADIENT_ACCUMULATION,
    MICRO_BATCH,
    LaidConfig,
    effective_config,
    flatten,
    is_bf16,
    scripts_own,
)
from optuna_dsat.runtime.rank import LaunchPlan, Rank


class TrainerHook:
    """Patches a library once the script has imported it."""

    framework: str
    """``TrainerFound.framework``."""

    def __init__(
        self,
        *,
        plan: LaunchPlan,
        rank: Rank,
        write: Callable[[Event], None],
        note_fact: Callable[..., None] = lambda **_: None,
        if_failed: Callable[[Event], None] = lambda _: None,
    ) -> None:
        """Patch nothing yet.

        ``note_fact`` gets fields of ``EngineReady`` that are known before the engine, and ``if_failed`` events that
        count only if the script fails before it trains.
        """
        self._plan = plan
        self._rank = rank
        self._write = write
        self._note_fact = note_fact
        self._if_failed = if_failed
        self._reported = False

    def callbacks(self) -> dict[str, Callable[[Any], None]]:
        """Return module name -> function to call with the module once it is imported."""
        raise NotImplementedError

    def take_on(self, plan: LaunchPlan) -> bool:
        """Continue with another trial's launch; return whether a library accumulates otherwise from now on."""
        self._plan = plan
        return False

    def _laid(self, config: Mapping[str, Any], *, without: str = "") -> LaidConfig:
        """Return a library's copy of the config with the overlay applied, without a key that the library rejects."""
        laid = effective_config(config, self._plan.overlay)
        laid.pop(without, None)
        return LaidConfig(config, laid)

    def _report(self, *, micro_batch: int | None, accumulation: int, options: Mapping[str, str]) -> bool:
        """Record the trainer with the script's values, once; return whether this was the first call."""
        is_first, self._reported = not self._reported, True
        if is_first:
            self._write(self._found(micro_batch=micro_batch, accumulation=accumulation, options=options))
        return is_first

    def _found(self, *, micro_batch: int | None, accumulation: int, options: Mapping[str, str]) -> TrainerFound:
        return TrainerFound(
            rank=self._rank.rank,
            time=time.time(),
            framework=self.framework,
            micro_batch=micro_batch,
            gradient_accumulation_steps=accumulation,
            options=options,
        )


TRAINER_FIELDS = {MICRO_BATCH: "per_device_train_batch_size", GRADIENT_ACCUMULATION: "gradient_accumulation_steps"}
"""Key of the DeepSpeed config -> field of ``TrainingArguments`` that must have the same value."""

BF16_ENABLED, TRAINER_PRECISION = "bf16.enabled", {"bf16": True, "fp16": False}
"""Key of the DeepSpeed config that enables bf16, and the fields of ``TrainingArguments`` that agree with it."""

LIGHTNING_BF16 = {"16-true": "bf16-true", "16-mixed": "bf16-mixed", "32-true": "bf16-mixed", 16: "bf16", 32: "bf16"}
"""Precision of Lightning, to which it converts inputs -> the precision that agrees with bf16; a number before 2.0."""

_ACCELERATE_BF16 = 'mixed_precision="bf16" in the script\'s Accelerator'
_FABRIC_BF16 = 'precision="bf16-mixed" in the script\'s Fabric'
"""``EngineReady.bf16_argument`` of scripts without a trainer."""

_PLUGIN_FIELDS = {
    "gradient_accumulation_steps": GRADIENT_ACCUMULATION,
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
}
"""Field of accelerate's ``DeepSpeedPlugin`` -> config key that it duplicates."""

_ARGUMENTS_OF_FILL_MATCH = ("mismatches", "must_match")
"""Named arguments of ``DeepSpeedPlugin.fill_match``; all other keywords are dotted config keys to fill in."""

_MEASURING_ARGUMENTS = {
    "auto_find_batch_size": False,  # would hide an out-of-memory error and measure another batch size
    "do_eval": False,
    "do_predict": False,
    "eval_on_start": False,
    "eval_strategy": "no",
    "evaluation_strategy": "no",  # its name before transformers 4.46
    "load_best_model_at_end": False,
    "push_to_hub": False,
    "report_to": "none",
    "resume_from_checkpoint": None,
    "save_strategy": "no",
}
"""Field of ``TrainingArguments`` -> value in measured launches."""

_NEED_EVALUATION = ("reduce_lr_on_plateau", "greedy")
"""Schedules that ``TrainingArguments`` rejects without evaluation; with them the evaluation strategy is kept, and a
callback cancels evaluation at every step."""

_DISABLED_METHODS = ("create_model_card", "init_hf_repo", "push_to_hub", "save_state")
"""Methods of the Trainer that are disabled in measured launches."""

SCHEDULE_LENGTH_KEYS = ("total_num_steps", "warmup_num_steps")
"""Scheduler parameters that the Trainer computes from the training length and compares with the config. They depend on
the micro-batch, so launches use the computed values."""


class HuggingFaceHook(TrainerHook):
    """Patches ``transformers`` and ``accelerate`` once the script has imported them."""

    framework = "transformers"

    def __init__(self, *, plan: LaunchPlan, rank: Rank, write: Callable[[Event], None], **more: Any) -> None:
        super().__init__(plan=plan, rank=rank, write=write, **more)
        self._parses_command_line = False
        self._own: tuple[int, int, bool] | None = None
        """Batch sizes set by the script, before ``TrainingArguments`` got the launch's for the first time."""
        self._accelerate = AccelerateConfig(plan=plan, rank=rank, write=write)
        self._accumulating: list[Any] = []
        """Arguments of the Trainers that train."""

    def callbacks(self) -> dict[str, Callable[[Any], None]]:
        """Return module name -> function to call with the module once it is imported."""
        return {
            "accelerate.accelerator": self._accelerator_imported,
            "accelerate.utils.dataclasses": self._plugin_imported,
            "accelerate.utils.deepspeed": self._config_imported,
            "transformers.hf_argparser": self._parser_imported,
            "transformers.trainer": self._trainer_imported,
            "transformers.training_args": self._arguments_imported,
        }

    def take_on(self, plan: LaunchPlan) -> bool:
        """Continue with another trial's launch; the libraries read their accumulation steps in each step."""
        super().take_on(plan)
        steps, owners = plan.changes.get(GRADIENT_ACCUMULATION), [*self._accumulating, *self._accelerate.accelerators]
        for owner in owners if steps is not None else ():
            owner.gradient_accumulation_steps = steps
        for accelerator in self._accelerate.accelerators:
            accelerator.step = 0  # it counts forward passes
        return bool(owners) and steps is not None

    def _config_imported(self, module: Any) -> None:
        """Apply the overlay to every config of either library, before its ZeRO stage is read."""

        @patch(module.HfDeepSpeedConfig, "__init__")
        def init(original: Any, config: Any, *args: Any, **kwargs: Any) -> None:
            original(config, *args, **kwargs)
            laid = effective_config(config.config, self._plan.overlay)
            laid.setdefault("zero_optimization", {"stage": 0})  # accelerate rejects configs without this section
            params = (laid.get("scheduler") or {}).get("params")
            params = params if hasattr(config, "trainer_config_finalize") and isinstance(params, dict) else {}
            lengths = [key for key in SCHEDULE_LENGTH_KEYS if key in params]
            params.update(dict.fromkeys(lengths, "auto"))
            scripts = flatten(scripts_own(config.config))
            config.config = LaidConfig(config.config, laid)
            for key in (f"scheduler.params.{name}" for name in lengths):  # the computed lengths are the launch's
                config.config.note_own(key, scripts[key])
            config.set_stage_and_offload()

    def _plugin_imported(self, module: Any) -> None:
        """Synchronize the fields of accelerate's plugin with its config: parts of accelerate read the fields."""

        @patch(module.DeepSpeedPlugin, "set_mixed_precision")
        def set_mixed_precision(original: Any, plugin: Any, precision: str) -> None:
            if precision == "fp16":  # accelerate rejects a config in bf16
                self._note_fact(bf16_argument=_ACCELERATE_BF16)
                precision = "bf16" if is_bf16(self._plan.overlay) else precision
            original(plugin, precision)

        @patch(module.DeepSpeedPlugin, "__post_init__")
        def post_init(original: Any, plugin: Any, *args: Any, **kwargs: Any) -> None:
            steps, filled_in = plugin.gradient_accumulation_steps, {}

            def fill_match(*args: Any, **values: Any) -> None:
                filled_in.update({key: value for key, value in values.items() if key not in _ARGUMENTS_OF_FILL_MATCH})
                type(plugin).fill_match(plugin, *args, **values)

            plugin.fill_match = fill_match
            original(plugin, *args, **kwargs)
            del plugin.fill_match
            filled_in[GRADIENT_ACCUMULATION] = steps if isinstance(steps, int) else "auto"
            self._accelerate.note_filled_in(plugin.hf_ds_config.config, filled_in)
            for field, key in _PLUGIN_FIELDS.items():
                value = plugin.hf_ds_config.get_value(key)
                if value not in (None, "auto"):
                    setattr(plugin, field, value)

    def _accelerator_imported(self, module: Any) -> None:
        """Disable saving and loading of states: a checkpoint of another ZeRO stage cannot be loaded."""
        self._accelerate.patch_accelerator(module)
        if self._plan.measures:
            _disable_methods(module.Accelerator, "load_state", "save_model")
            _make_folder_only(module.Accelerator, "save_state", self._plan.world.protects, folder=_folder_of_state)

    def _parser_imported(self, module: Any) -> None:
        """Record whether ``TrainingArguments`` are parsed from the command line, so that its options can set them."""

        @patch(module.HfArgumentParser, "parse_args_into_dataclasses")
        def parse(original: Any, *args: Any, **kwargs: Any) -> Any:
            self._parses_command_line = True
            try:
                return original(*args, **kwargs)
            finally:
                self._parses_command_line = False

    def _arguments_imported(self, module: Any) -> None:
        @patch(module.TrainingArguments, "__post_init__")
        def post_init(original: Any, arguments: Any, *args: Any, **kwargs: Any) -> None:
            arguments._dsat_script_values = values = self._script_values(arguments)
            self._if_failed(self._found(micro_batch=values[0], accumulation=values[1], options={}))
            self._set_arguments(arguments)
            if self._plan.measures:
                self._disable_evaluation_and_saving(arguments)
            self._accelerate.provide_for(arguments)
            original(arguments, *args, **kwargs)
            self._accelerate.leave_optimizer_to(arguments)

    def _trainer_imported(self, module: Any) -> None:
        cls = module.Trainer
        if self._plan.measures:
            _disable_methods(cls, *_DISABLED_METHODS)
            _make_folder_only(cls, "_save_checkpoint", self._plan.world.protects, folder=_folder_of_checkpoint)
            _make_folder_only(cls, "save_model", self._plan.world.protects, folder=_folder_of_model)
            cls.evaluate = _no_evaluation
        callback = _no_evaluation_callback(module.TrainerCallback)
        early_stopping = sys.modules["transformers.trainer_callback"].EarlyStoppingCallback

        @patch(cls, "__init__")
        def init(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> None:
            arguments = kwargs.get("args", args[1] if len(args) > 1 else None)
            if arguments is not None:  # the script may have changed them since they were built
                self._set_arguments(arguments)
            original(trainer, *args, **kwargs)

        @patch(cls, "train")
        def train(original: Any, trainer: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
            self._report_arguments(trainer.args)
            self._accumulating.append(trainer.args)
            if self._plan.measures:
                resume_from_checkpoint = None  # of another ZeRO stage, and not part of the measurement
                trainer.remove_callback(early_stopping)  # requires evaluation
                trainer.add_callback(callback())  # the last callback overrides the others' decisions
            return original(trainer, resume_from_checkpoint, *args, **kwargs)

    def _script_values(self, arguments: Any) -> tuple[int, int, bool]:
        """Return the script's micro-batch and accumulation steps, and whether they come from its command line.

        Only the first ``TrainingArguments`` have them; copies by trl's trainers or parsers have the launch's.
        """
        micro_batch, accumulation = (int(getattr(arguments, field)) for field in TRAINER_FIELDS.values())
        result = micro_batch, accumulation, self._parses_command_line
        if self._own is not None:
            sizes = dict(zip(TRAINER_FIELDS, self._own[:2]))
            if result[:2] == tuple(self._plan.overlay.get(key, default) for key, default in sizes.items()):
                return self._own
        self._own = result
        return result

    def _set_arguments(self, arguments: Any) -> None:
        """Set the batch sizes, and the precision of a launch in bf16."""
        for field, is_on in TRAINER_PRECISION.items() if is_bf16(self._plan.overlay) else ():
            setattr(arguments, field, is_on)
        for key, field in TRAINER_FIELDS.items():
            value = self._plan.overlay.get(key)
            if isinstance(value, int):
                setattr(arguments, field, value)
                if getattr(arguments, "per_gpu_train_batch_size", None) is not None and key == MICRO_BATCH:
                    arguments.per_gpu_train_batch_size = None  # the deprecated name takes precedence

    def _disable_evaluation_and_saving(self, arguments: Any) -> None:
        schedule = getattr(arguments.lr_scheduler_type, "value", arguments.lr_scheduler_type)
        for name, value in _MEASURING_ARGUMENTS.items():
            if hasattr(arguments, name) and (schedule not in _NEED_EVALUATION or not name.startswith("eval")):
                setattr(arguments, name, value)
        # Extend the training to the last measured step even if the dataset is small.
        last = self._plan.most_steps
        if arguments.max_steps > 0:
            arguments.max_steps = max(arguments.max_steps, last)
        else:
            arguments.num_train_epochs = max(arguments.num_train_epochs, float(last))

    def _report_arguments(self, arguments: Any) -> None:
        values = getattr(arguments, "_dsat_script_values", None) or self._script_values(arguments)
        micro_batch, accumulation, by_option = values
        fields = {**TRAINER_FIELDS, **({} if getattr(arguments, "bf16", True) else {BF16_ENABLED: "bf16"})}
        options = {key: f"--{field}" for key, field in fields.items()} if by_option else {}
        is_first = self._report(micro_batch=micro_batch, accumulation=accumulation, options=options)
        if is_first and self._rank.rank == 0:
            sizes = [(field, getattr(arguments, field), value) for field, value in zip(TRAINER_FIELDS.values(), values)]
            words = [f"{field} {now}" + f" (the script has {value})" * (now != value) for field, now, value in sizes]
            end = "; nothing is evaluated, saved or sent." if self._plan.measures else "."
            print(f"optuna-dsat: {', '.join(words)}{end}", file=sys.stderr)


def _disable_methods(cls: Any, *names: str) -> None:
    for name in names:
        if hasattr(cls, name):  # other versions of the library lack the method
            patch(cls, name)(lambda *_, **__: None)


def _make_folder_only(cls: Any, name: str, is_safe: Callable[[Path], bool], *, folder: Callable[..., Path]) -> None:
    """Have a method that saves only make its folder, into which scripts write, if ``is_safe``; it returns the path."""

    @patch(cls, name)
    def save(_original: Any, *args: Any, **kwargs: Any) -> str:
        path = folder(*args, **kwargs)
        if is_safe(path):
            path.mkdir(parents=True, exist_ok=True)
        return str(path)


def _folder_of_state(accelerator: Any, output_dir: Any = None, *_: Any, **__: Any) -> Path:
    settings = accelerator.project_configuration
    if not settings.automatic_checkpoint_naming:
        return Path(output_dir)
    settings.iteration += 1
    return Path(accelerator.project_dir, "checkpoints", f"checkpoint_{settings.iteration - 1}")


def _folder_of_checkpoint(trainer: Any, *_: Any, **__: Any) -> Path:
    return Path(trainer.args.output_dir, f"checkpoint-{trainer.state.global_step}")


def _folder_of_model(trainer: Any, output_dir: Any = None, *_: Any, **__: Any) -> Path:
    return Path(output_dir or trainer.args.output_dir)


def _no_evaluation(trainer: Any, *_: Any, metric_key_prefix: str = "eval", **__: Any) -> dict[str, float]:
    """Replace ``Trainer.evaluate`` in measured launches; return a loss of NaN, since scripts may read it."""
    del trainer
    return {f"{metric_key_prefix}_loss": float("nan")}


def _no_evaluation_callback(base: Any) -> Any:
    """Return a ``TrainerCallback`` class that keeps the Trainer from evaluating and saving."""

    class SkipEvaluationAndSaving(base):  # type: ignore[misc]
        def on_step_end(self, _args: Any, _state: Any, control: Any, **_: Any) -> Any:
            control.should_evaluate = control.should_save = False
            return control

        on_epoch_end = on_step_end

    return SkipEvaluationAndSaving


_NEEDS_VALIDATION = frozenset({"Checkpoint", "EarlyStopping", "ModelCheckpoint"})
"""Class names of callbacks that save checkpoints or require validation metrics."""


class LightningHook(TrainerHook):
    """Patches Lightning once the script has imported it."""

    framework = "lightning"

    def callbacks(self) -> dict[str, Callable[[Any], None]]:
        """Return module name -> function to call with the module once it is imported."""
        result: dict[str, Callable[[Any], None]] = {}
        for fabric in ("lightning.fabric", "lightning_fabric"):  # the second is a package with the same code
            result[f"{fabric}.plugins.precision.deepspeed"] = partial(self._precision_imported, argument=_FABRIC_BF16)
            result[f"{fabric}.strategies.deepspeed"] = self._strategy_imported
        for pytorch in ("lightning.pytorch", "pytorch_lightning"):
            result[f"{pytorch}.plugins.precision.deepspeed"] = self._precision_imported
            result[f"{pytorch}.strategies.deepspeed"] = self._trainer_strategy_imported
            result[f"{pytorch}.trainer.trainer"] = self._trainer_imported
        return result

    def _strategy_imported(self, module: Any, *, without: str = "") -> None:
        """Apply the overlay to the config of every strategy, before its ZeRO stage is read."""

        @patch(module.DeepSpeedStrategy, "__init__")
        def init(original: Any, strategy: Any, *args: Any, **kwargs: Any) -> None:
            original(strategy, *args, **kwargs)
            if isinstance(strategy.config, Mapping):
                strategy.config = self._laid(strategy.config, without=without)

    def _precision_imported(self, module: Any, *, argument: str = "") -> None:
        @patch(getattr(module, "DeepSpeedPrecision", None) or module.DeepSpeedPrecisionPlugin, "__init__")
        def init(original: Any, plugin: Any, precision: Any, *args: Any, **kwargs: Any) -> None:
            self._note_fact(bf16_argument=argument)
            bf16 = LIGHTNING_BF16.get(precision, precision) if is_bf16(self._plan.overlay) else precision
            original(plugin, bf16, *args, **kwargs)

    def _trainer_strategy_imported(self, module: Any) -> None:
        self._strategy_imported(module, without=GRADIENT_ACCUMULATION)

        @patch(module.DeepSpeedStrategy, "_format_config")
        def set_accumulation_and_format(original: Any, strategy: Any) -> None:
            trainer = getattr(strategy.lightning_module, "trainer", None)
            if trainer is not None:
                steps = int(trainer.accumulate_grad_batches)
                if isinstance(self._plan.overlay.get(GRADIENT_ACCUMULATION), int):
                    trainer.accumulate_grad_batches = self._plan.overlay[GRADIENT_ACCUMULATION]
                self._report(micro_batch=None, accumulation=steps, options={})
            original(strategy)

    def _trainer_imported(self, module: Any) -> None:
        if not self._plan.measures:
            return
        signature = inspect.signature(module.Trainer.__init__)

        @patch(module.Trainer, "__init__")
        def init_as_launched(original: Any, *args: Any, **kwargs: Any) -> None:
            given = signature.bind(*args, **kwargs).arguments
            self._check_ranks(given.get("devices", "auto"), given.get("num_nodes", 1))
            original(*args, **kwargs)

        @patch(module.Trainer, "fit")
        def fit_without_validation(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
            self._disable_evaluation_and_saving(trainer)
            kwargs.pop("ckpt_path", None)  # of another ZeRO stage, and not part of the measurement
            return original(trainer, *args[:4], **kwargs)

    def _check_ranks(self, devices: Any, nodes: int) -> None:
        """Check early that the Trainer's device count is the launch's number of ranks; Lightning checks it later."""
        number = _number_of(devices)
        if number is not None and nodes * number != self._rank.world_size:
            on_nodes = f" on {nodes} nodes" if nodes > 1 else ""
            wrong = f"the script's Trainer asks for devices={devices!r}{on_nodes}"
            message = wrong_number(wrong, nodes * number, self._rank.world_size)
            raise ValueError(f'{message} or let the script say devices="auto"')

    def _disable_evaluation_and_saving(self, trainer: Any) -> None:
        trainer.callbacks = [
            callback
            for callback in trainer.callbacks
            if _NEEDS_VALIDATION.isdisjoint(base.__name__ for base in type(callback).__mro__)
        ]
        trainer.loggers = silent_loggers(trainer.loggers)
        trainer.limit_val_batches = 0
        trainer.num_sanity_val_steps = 0
        # Extend the training to the last measured step even if the dataset is small.
        loop, last = trainer.fit_loop, self._plan.most_steps
        if loop.max_epochs is not None and loop.max_epochs >= 0:
            loop.max_epochs = max(loop.max_epochs, last)
        if loop.epoch_loop.max_steps >= 0:
            loop.epoch_loop.max_steps = max(loop.epoch_loop.max_steps, last)


def _number_of(devices: Any) -> int | None:
    """Return the number of devices in the ``devices`` argument of Lightning's Trainer; None if unspecified.

    It is a number, a list of indices, either of these as text (``"2"``, ``"0,1"``), ``-1`` or ``"auto"``.
    """
    if isinstance(devices, str):
        indices = [word.strip() for word in devices.split(",") if word.strip()]
        if not all(index.isdigit() for index in indices):
            return None
        devices = int(indices[0]) if len(indices) == 1 and "," not in devices else indices
    if isinstance(devices, (list, tuple)):
        return len(devices)
    return devices if isinstance(devices, int) and devices > 0 else None
