"""Waits for the script to import torch and DeepSpeed, and wraps ``deepspeed.initialize``.

Imports neither. Modules imported later (transformers, accelerate) get the wrapped function.
"""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from fractions import Fraction
from functools import lru_cache, partial
from operator import index
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.adapt.accelerate import how_to_train_with_deepspeed, join_ranks
from optuna_dsat.runtime.adapt.batch_sources import BatchSources
from optuna_dsat.runtime.adapt.checkpointing import ENGINE_KNOBS, MODEL_KNOBS, CheckpointingError
from optuna_dsat.runtime.adapt.ranks import join_group, ranks_in_place
from optuna_dsat.runtime.adapt.side_effects import (
    disable_checkpoints,
    redirect_accelerates_tensorboard,
    redirect_tensorboard,
    tolerate_mismatched_checkpoints,
    tolerate_skipped_checkpoints,
)
from optuna_dsat.runtime.adapt.trainers import HuggingFaceHook, LightningHook
from optuna_dsat.runtime.events import CheckpointLoaded, CheckpointsOff, ConfigDiffers, EngineReady, Event, EventWriter
from optuna_dsat.runtime.failure import diagnose
from optuna_dsat.runtime.imports import ImportWatch, patch
from optuna_dsat.runtime.measure.blocks import gather_experts
from optuna_dsat.runtime.measure.engine import (
    SHM_OPERATOR,
    Clock,
    DeviceClock,
    OtherEngine,
    compile_without_limit,
    data_parallel_size,
    import_dependencies_of_initialize,
    is_engine,
    is_pipeline,
)
from optuna_dsat.runtime.measure.inputs import sample_counter
from optuna_dsat.runtime.measure.live import NotLiveError, change_all
from optuna_dsat.runtime.measure.memory import (
    CpuMemory,
    CudaMemory,
    limit_cuda_memory,
    limit_process_memory,
    support_uuid_visible_devices,
    unlink_shared_buffers,
    watch_caught_errors,
)
from optuna_dsat.runtime.measure.meter import Meter, RankState
from optuna_dsat.runtime.measure.profiler import Profiler
from optuna_dsat.runtime.overlay import MICRO_BATCH, MODEL, read_config, without_impossible_zero
from optuna_dsat.runtime.rank import LaunchPlan, Rank
from optuna_dsat.runtime.trial_config import TrialConfig, without_values

_MOST_STEPS_WITHOUT_ENGINE = 3
"""Number of optimizer steps before ``deepspeed.initialize`` after which a script counts as not using DeepSpeed."""
_TRAINERS = (HuggingFaceHook, LightningHook)  # they read the config before ``deepspeed.initialize`` does


class DeepSpeedHook:
    """Applies the trial's overlay to the script's config and attaches a ``Meter`` to the engine that trains.

    Construct it before reads of the user's config are redirected.
    """

    def __init__(
        self,
        *,
        plan: LaunchPlan,
        rank: Rank,
        writer: EventWriter,
        state: RankState,
        exit_process: Callable[[], None],
    ) -> None:
        self._plan = plan
        self._rank = rank
        self._writer = writer
        self._state = state
        self._exit_process = exit_process
        self._deepspeed: Any = None
        self._memory: CpuMemory | CudaMemory | None = None
        self._engine: Any = None
        self._engines: WeakKeyDictionary[Any, None] = WeakKeyDictionary()  # all that the script still has
        self._changed_model = False
        self._meter: Meter | None = None
        self._config = TrialConfig(plan, world_size=rank.world_size)
        self._batch_sources = BatchSources(
            micro_batch=self._config.micro_batch,
            follow=plan.batch_source,
            fed=lambda: state.fed - state.allocation_failures,
            repeat=plan.measures,
            noting=plan.purpose == "profile",
            outputs=Path(plan.trackers_dir) / "hydra" if plan.trackers_dir else None,
        )
        self._differences: dict[str, list[Any]] = {}
        """Differences between the config passed to ``get_ds_config_from_hparams`` and the user's file."""
        self._steps_without_engine = 0
        self._unwatch_optimizers: Callable[[], None] = lambda: None
        self._started = time.time()
        self._spans: dict[str, list[float]] = {}

    def install(self) -> None:
        """Start watching the script's imports."""
        rank, note_fact = self._rank, self._state.script_facts.update
        watched: dict[str, Callable[[ModuleType], None]] = {
            "torch": self._torch_imported,
            "deepspeed": self._deepspeed_imported,
            "torch.distributed": join_group(rank),
            **ranks_in_place(rank, on_spawn=partial(note_fact, starts_ranks=True)),
            "accelerate.state": partial(join_ranks, rank=rank, on_join=partial(note_fact, joins_ranks=True)),
        }
        write, if_failed = self._writer.write, self._state.if_failed.append
        self._trainers = [
            kind(plan=self._plan, rank=rank, note_fact=note_fact, write=write, if_failed=if_failed)
            for kind in _TRAINERS
        ]
        for trainer in self._trainers:
            watched |= trainer.callbacks()
        if self._plan.measures or self._plan.batch_source:
            self._batch_sources.install()
            watched |= self._batch_sources.callbacks()
        if self._plan.measures:
            watched["torch.optim.optimizer"] = self._optimizers_imported
            watched["deepspeed.utils.zero_to_fp32"] = partial(tolerate_skipped_checkpoints, skipped=self._state.saves)
        if self._plan.trackers_dir:
            folder = Path(self._plan.trackers_dir) / "tensorboard"
            redirect = partial(redirect_tensorboard, folder=folder)
            watched["torch.utils.tensorboard.writer"] = watched["tensorboardX.writer"] = redirect
            watched["accelerate.tracking"] = partial(redirect_accelerates_tensorboard, folder=folder)
        ImportWatch(watched).install()

    @property
    def _accelerator(self) -> Any:
        return self._deepspeed.accelerator.get_accelerator()

    def _optimizers_imported(self, optimizer: ModuleType) -> None:
        register = getattr(optimizer, "register_optimizer_step_post_hook", None)
        if register is not None:
            self._unwatch_optimizers = register(self._stepped_without_engine).remove

    def _stepped_without_engine(self, *_: Any) -> None:
        """Stop a script that trains without DeepSpeed early."""
        self._steps_without_engine += 1
        if self._steps_without_engine >= _MOST_STEPS_WITHOUT_ENGINE:
            self._unwatch_optimizers()
            raise RuntimeError(
                "the script trains without DeepSpeed: its optimizer stepped, and deepspeed.initialize was not called. "
                + how_to_train_with_deepspeed()
            )

    def _torch_imported(self, torch: ModuleType) -> None:
        watch_caught_errors(torch, self._state.note_error)
        if self._plan.device_memory_bytes is not None:
            limit_cuda_memory(torch, self._plan.device_memory_bytes, self._rank.local_rank)

    def _deepspeed_imported(self, deepspeed: ModuleType) -> None:
        self._deepspeed = deepspeed
        self._state.device = self._accelerator.device_name()
        if self._state.device == "cpu":
            self._prepare_cpu()
        else:
            self._memory = CudaMemory(self._accelerator)
            support_uuid_visible_devices(self._accelerator)
        self._spans["imports"] = [self._started, time.time() - self._started]
        self._time_init_distributed()
        self._wrap_initialize(self._deepspeed)
        self._wrap_engine_class(self._deepspeed.DeepSpeedEngine)
        self._wrap_zero_init(self._deepspeed.zero.Init)
        if self._plan.measures:
            disable_checkpoints(self._deepspeed.DeepSpeedEngine, self._state.saves, is_safe=self._plan.world.protects)
            tolerate_mismatched_checkpoints(
                self._deepspeed.DeepSpeedEngine, is_mismatch=self._is_mismatch, on_load=self._note_checkpoint
            )

    def _time_init_distributed(self) -> None:
        distributed: Any = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_available():
            return

        @patch(distributed, "init_process_group")
        def init_process_group(original: Any, *args: Any, **kwargs: Any) -> Any:
            started = time.time()
            result = original(*args, **kwargs)
            self._spans.setdefault("init_distributed", [started, time.time() - started])
            return result

    def _note_checkpoint(self, folder: Path) -> None:
        self._writer.write(CheckpointLoaded(rank=self._rank.rank, time=time.time(), folder=str(folder)))

    def _is_mismatch(self, error: Exception) -> bool:
        """Return whether a checkpoint mismatch can explain an error: neither memory nor communication failed."""
        limited = self._state.limited
        diagnosis = diagnose(error, phase="initialize", device=self._state.device, limited=limited)
        return diagnosis.outcome in (Outcome.INVALID_CONFIG, Outcome.SCRIPT_ERROR)

    def _prepare_cpu(self) -> None:
        if not self._rank.can_compile:
            # The operator's build would fail and end the rank; without it DeepSpeed communicates through gloo.
            self._deepspeed.ops.__compatible_ops__[SHM_OPERATOR] = False
        limit = self._plan.device_memory_bytes
        if self._plan.measures or limit is not None:
            import_dependencies_of_initialize(self._plan.overlay)
        self._memory = memory = CpuMemory()
        if limit is not None:
            if self._rank.can_compile:
                compile_without_limit()
            limit_process_memory(limit, memory.baseline)
            self._state.limited = True

    def _wrap_initialize(self, deepspeed: Any) -> None:
        signature = inspect.signature(deepspeed.initialize)

        @patch(deepspeed, "initialize")
        def initialize(original: Any, *args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            return self._build(bound, lambda: original(*bound.args, **bound.kwargs))

    def _wrap_engine_class(self, cls: Any) -> None:
        """Apply the overlay and measure also if a script constructs an engine, or a subclass, directly."""
        signature = inspect.signature(cls.__init__)

        @patch(cls, "__init__")
        def init(original: Any, engine: Any, *args: Any, **kwargs: Any) -> None:
            if self._state.phase == "initialize":
                original(engine, *args, **kwargs)
                return
            bound = signature.bind(engine, *args, **kwargs)
            given = bound.arguments
            read = given.get("config_class")
            if read is not None and given.get("config") is None:
                given["config"] = read._param_dict

            def build() -> tuple[Any]:
                if read is not None:
                    more = {name: given[name] for name in ("mpu", "mesh_device") if name in given}  # 0.14 has one only
                    given["config_class"] = type(read)(given["config"], **more)
                original(*bound.args, **bound.kwargs)
                return (engine,)

            self._build(bound, build)

    def _build(self, bound: inspect.BoundArguments, build: Callable[[], Any]) -> Any:
        """Build an engine, the first value that ``build`` returns, with the trial's config and measure it."""
        before, self._state.phase = self._state.phase, "initialize"
        self._unwatch_optimizers()
        source = self._apply_overlay(bound.arguments)
        differences = self._config.differences(source)
        self._change_model(bound.arguments.get("model"))
        started = time.time()
        if differences and self._plan.measures and self._engine is None:
            self._writer.write(ConfigDiffers(rank=self._rank.rank, time=started, differences=differences))
        result = build()
        self._change_engine(result[0])
        self._state.phase = before
        if self._plan.measures:
            span = [started, time.time() - started]
            differences = self._config.differences(source, ranks=data_parallel_size(result[0]._config))
            if self._engine is None:
                self._spans["initialize"] = span
                self._measure_engine(result[0], differences)
            else:
                self._watch_engine(result[0], span, differences)
        return result

    def _change_model(self, model: Any) -> None:
        """Apply the trial's settings of the model to one that is trained.

        A script may build several engines: they must fit the first such model only.

        Raises:
            CheckpointingError: If the first model cannot be changed so.
        """
        settings = self._plan.overlay.get(MODEL) or {}
        if not settings or not any(parameter.requires_grad for parameter in getattr(model, "parameters", list)()):
            return
        off = CheckpointsOff(rank=self._rank.rank, time=time.time())
        write_once = lru_cache(maxsize=1)(partial(self._writer.write, off))
        with suppress(CheckpointingError) if self._changed_model else nullcontext():
            for name in MODEL_KNOBS.keys() & settings.keys():
                MODEL_KNOBS[name](model, settings[name], write_once)
        self._changed_model = True

    def _change_engine(self, engine: Any) -> None:
        """Apply the trial's settings of the engine to one that trains."""
        settings = self._plan.overlay.get(MODEL) or {}
        if getattr(engine, "optimizer", None) is not None:
            for name in ENGINE_KNOBS.keys() & settings.keys():
                ENGINE_KNOBS[name](engine, settings[name])

    def _apply_overlay(self, arguments: dict[str, Any]) -> Any:
        """Replace the config among bound arguments of ``deepspeed.initialize`` without mutating the script's objects.

        The overlay applies to every engine of a script, but only one engine is measured (``measure/engine.py``). A
        script that passes no config gets the user's file; if it passes two, the arguments are left for DeepSpeed to
        reject.

        Returns:
            The script's config; None if there is none, or two.
        """
        given = [name for name in ("config", "config_params") if arguments.get(name) is not None]
        args = arguments.get("args")
        names = ("deepspeed_config", "deepscale_config")
        on_args = [name for name in names if getattr(args, name, None) is not None]
        if given and [getattr(args, name) for name in on_args] == [self._plan.config_path]:
            # The option has the default set by this package (``adapt/config.py``): the script's config counts.
            arguments["args"], on_args = without_values(args, on_args), []
        if given and not on_args:
            # DeepSpeed reads ``config_params`` only without ``config``.
            source = arguments[given[0]]
        elif on_args and not given:
            source = getattr(args, on_args[0])
            arguments["args"] = without_values(args, on_args)
        elif not given and self._plan.user_config_path:
            source = self._plan.config_path  # the script passes no config: use the tuned file
        else:
            return None
        arguments.pop("config_params", None)
        config = self._config.apply_overlay(source, client_optimizer=arguments.get("optimizer"))
        if arguments.get("optimizer") is None and "optimizer" not in config:
            config = without_impossible_zero(config, read_config(source))
        self._config.check_model(arguments.get("model"), config)
        if self._plan.purpose == "profile":
            gather_experts(arguments.get("model"), config)
        arguments["config"] = config
        return source

    def _wrap_zero_init(self, init_class: Any) -> None:
        """Make ``deepspeed.zero.Init(config_dict_or_path=...)`` use the trial's config; patches the class in place."""
        signature = inspect.signature(init_class.__init__)

        @patch(init_class, "__init__")
        def init(original: Any, *args: Any, **kwargs: Any) -> None:
            before, self._state.phase = self._state.phase, "initialize"
            bound = signature.bind(*args, **kwargs)
            # DeepSpeed's precedence.
            name = "config_dict_or_path" if bound.arguments.get("config") is None else "config"
            if isinstance(bound.arguments.get(name), (str, os.PathLike, Mapping)):
                bound.arguments[name] = self._config.apply_overlay(bound.arguments[name])
            original(*bound.args, **bound.kwargs)
            self._state.phase = before

    def trial_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a config with the trial's overlay applied."""
        self._differences = self._config.differences(config)
        return self._config.apply_overlay(config)

    @contextmanager
    def reporting(self, engine: Any, steps_completed: int | None) -> Iterator[None]:
        """Return a context for a micro-batch of a loop that the hook may not observe (``runtime/reporting.py``).

        If no engine exists yet, the context is assumed to contain a whole training that builds an engine, as Trainers
        do, whose steps are observed as usual.

        Raises:
            ValueError: If the engine was built without the trial's config.
            RuntimeError: At the end of the context, if no engine was built.
        """
        if not self._plan.measures:
            yield
            return
        self._state.steps_completed = None if steps_completed is None else index(steps_completed)
        try:
            if self._meter is None and is_engine(engine):
                self._state.phase = "initialize"  # errors in check_engine are configuration errors
                self._config.check_engine(engine)
                self._measure_engine(engine, self._differences)
            is_other = is_engine(engine) and engine is not self._engine
            with nullcontext() if self._meter is None or is_other else self._meter.micro_batch():
                yield
        except Exception as error:
            self._state.note_error(error)  # the script may catch it
            raise
        finally:
            self._state.steps_completed = None
        if self._meter is None:
            raise RuntimeError(
                "optuna-dsat knows no engine to measure: give dsat_reporting_context the DeepSpeed engine, or build it "
                "with deepspeed.initialize."
            )

    def _measure_engine(self, engine: Any, differences: Mapping[str, list[Any]]) -> None:
        if self._memory is None:
            raise RuntimeError("An engine built before DeepSpeed's import has ended cannot be measured.")
        self._engine = engine
        self._engines[engine] = None
        self._memory.engine_ready()
        self._writer.write(self._engine_ready(engine, differences))
        clock = Clock() if self._state.device == "cpu" else DeviceClock(self._accelerator)
        profiler = None
        if self._plan.purpose == "profile":
            profiler = Profiler(
                engine,
                accelerator=self._accelerator,
                plan=self._plan,
                rank=self._rank,
                memory=self._memory,
                write=self._writer.write,
            )
        self._meter = Meter(
            engine,
            rank=self._rank.rank,
            write=self._write_step,
            clock=clock,
            memory=self._memory,
            state=self._state,
            last_step=self._plan.end_profile_step,
            exit_process=self._exit_process,
            profiler=profiler,
            size_of=sample_counter(
                lambda: self._batch_sources.numbers(self._config.micro_batches),
                rows=self._plan.batch_source.get("rows", (1, 1)),
            ),
            sized=self._batch_sources.repeated,
        )
        self._unwatch_optimizers()
        self._meter.attach()

    def take_on(self, plan: LaunchPlan) -> None:
        """Measure another trial in the running engine, whose steps count from 1 again.

        Raises:
            NotLiveError: If the engine or the script's data cannot follow.
        """
        if self._meter is None or self._memory is None:
            raise NotLiveError("no engine is measured")
        self._plan, accumulation = plan, self._config.accumulation
        self._config.take_on(plan)
        change_all(self._engines, plan.changes)
        self._state.restart()
        self._memory.restart()
        self._writer.write(self._engine_ready(self._engine, self._differences))
        self._meter.transition.begin(
            micro_batch=plan.changes.get(MICRO_BATCH),
            accumulated=Fraction(self._config.accumulation, accumulation),
            rescale=self._batch_sources.rescale,
            realigns=sum(trainer.take_on(plan) for trainer in self._trainers) > 0,
        )
        self._meter.take_on(last_step=plan.end_profile_step)

    def _watch_engine(self, engine: Any, span: list[float], differences: Mapping[str, list[Any]]) -> None:
        """Measure a further engine instead of the current engine if ``OtherEngine`` finds that it trains."""
        state = self._state
        self._engines[engine] = None

        def take_over() -> None:
            if self._meter is not None:
                self._meter.detach()
            if not state.updates:
                state.fed, state.fed_size, state.fed_from = 0, 0, ()
            self._spans["initialize"] = span
            self._measure_engine(engine, differences)

        OtherEngine(engine, measured=lambda: state.updates, takes_over=take_over)

    def _write_step(self, event: Event) -> None:
        if self._rank.rank == 0 and self._state.has_measured(self._plan.end_profile_step):
            places = self._state.fed_from if self._plan.purpose == "profile" else ()
            self._writer.write(self._batch_sources.event(rank=0, places=places))  # by now the training loader is known
        self._writer.write(event)
        if self._state.steps + self._state.skipped == 1:  # all ranks have taken part in a collective by now
            unlink_shared_buffers()
            self._batch_sources.skip_read_ahead()

    def _engine_ready(self, engine: Any, differences: Mapping[str, list[Any]]) -> EngineReady:
        torch: Any = sys.modules["torch"]
        ranks = data_parallel_size(engine._config)
        return EngineReady(
            rank=self._rank.rank,
            time=time.time(),
            zero_stage=int(engine.zero_optimization_stage()),
            train_batch_size=int(engine.train_batch_size()),
            train_micro_batch_size_per_gpu=int(engine.train_micro_batch_size_per_gpu()),
            gradient_accumulation_steps=int(engine.gradient_accumulation_steps()),
            data_parallel_size=ranks,
            counted_times=ranks // (engine.dp_world_size or ranks),
            pipeline=is_pipeline(engine),
            device=self._state.device,
            config_differences=differences,
            spans=self._spans,
            precision="fp16" if engine.fp16_enabled() else "bf16" if engine.bfloat16_enabled() else "fp32",
            host_threads=int(torch.get_num_threads()),
            **self._state.script_facts,
        )
