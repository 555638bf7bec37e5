"""Result of a profile launch, about a script and its model, as stored."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from optuna_dsat.config import ds_config
from optuna_dsat.config.conditions import ZERO_STAGE
from optuna_dsat.config.op_builders import operators_of
from optuna_dsat.config.record import Record
from optuna_dsat.config.search_space import SearchSpace
from optuna_dsat.cost.memory import ModelProfile
from optuna_dsat.runtime.agent.preload import Preload
from optuna_dsat.runtime.events import EngineReady
from optuna_dsat.runtime.overlay import CHECKPOINT_EVERY, MODEL, is_bf16
from optuna_dsat.script.arg_mapping import STAGE
from optuna_dsat.script.batch_rule import BatchRule
from optuna_dsat.script.command.interception import OF_LAUNCHERS
from optuna_dsat.script.trainer import ScriptTrainer
from optuna_dsat.study.profile.script import follow_script
from optuna_dsat.study.spec import StudySpec

_NAME_THE_BACKEND = (
    "Name a backend, as accelerate selects none without a GPU and each rank trains alone: by a Trainer's use_cpu=True, "
    'else by Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")]).'
)


_CHOSEN = (ds_config.ZERO, *ds_config.BATCH_KEYS)
"""Keys of a DeepSpeed config that every search chooses."""

_LEARNED_VARIABLES = "ACCELERATE_"
"""Beginning of the variables that a profile launch learns (``runtime/adapt/accelerate.py``)."""


@dataclass(frozen=True, kw_only=True)
class TimedStep:
    """The measured step of a config."""

    config: Mapping[str, Any]
    """The complete DeepSpeed config."""
    metrics: Mapping[str, float]
    """Seconds of the phases and of the whole step (``latency``), among others."""


@dataclass(frozen=True, kw_only=True)
class Profiled(Record):
    """Result of a profile launch."""

    profile: ModelProfile
    measured_with: str
    """The ZeRO settings that fitted, in words."""
    pipeline: bool
    """Whether the script trains a pipeline module (ZeRO at most 1)."""
    device: str
    only_zero_3: bool = False
    """Whether the script builds its model within ``deepspeed.zero.Init`` at any stage, which ZeRO 3 alone takes."""
    start_s: float | None = None
    """Seconds of the profile launch outside training steps; None if unknown."""
    least_micro_batch: int = 1
    """Smallest micro-batch that the script trains with, as far as known: larger than 1 where it failed at less."""
    micro_batch_multiple: int = 1
    """Divisor of the micro-batches that the script accepts, from the message of its error."""
    holds_accumulation: bool = False
    """True if the script accumulates by a number in its own code: every trial then has the user's steps."""
    data_parallel_size: int
    """Ranks that consume different samples."""
    takes_local_rank: str = ""
    """The script's option ``--local_rank``, which the ``deepspeed`` launcher passes, or ``--local-rank``, which
    ``torch.distributed.launch`` does; empty for none."""
    starts_ranks: bool = False
    """Whether the script starts its ranks by ``torch.multiprocessing``, and so trains without a launcher."""
    joins_ranks: bool = False
    """Whether launches give accelerate the backend without which each rank trains alone, as on the CPU."""
    precision: str = ""
    """Precision of the script's engine without a search: ``fp16``, ``bf16`` or ``fp32``; empty if unknown."""
    bf16_argument: str = ""
    """Argument in the code of a script without a trainer that must agree with a config in bf16; empty without any."""
    checkpoints: bool = False
    """Whether the script checkpoints activations itself, which was off in the profile launch."""
    trainer: ScriptTrainer | None = None
    """The script's trainer; None if it uses none that sets batch sizes."""
    batch: BatchRule | None = None
    """Rule that sets the script's batch size; None if it follows the DeepSpeed config."""
    samples_per_rank: int | None = None
    """Samples of a rank in an epoch of the data loader that feeds the engine; None if unknown."""
    loads_all: bool = False
    """Whether these samples are all of the script's data set, which each rank loads as a whole."""
    config_differences: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Dotted key of the DeepSpeed config -> (the script's value, the file's) where the script sets it."""
    option_defaults: Mapping[str, int] = field(default_factory=dict)
    """Option of the script that the user mapped to a batch size -> its default."""
    stage_option: str = ""
    """The script's option that sets its ZeRO stage; empty if none does."""
    accumulation_option: str = ""
    """The script's option that sets its accumulation steps; empty if none does."""
    global_batch_option: str = ""
    """The script's option for its global batch, where another sets its micro-batch; empty for none."""
    global_batch_counts: str = ds_config.TRAIN_BATCH
    """Key with the same meaning: it may be a rank's part of the global batch."""
    stage_choices: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Option that may mean a ZeRO stage -> the stages that the script accepts, where its parser lists them."""
    config_option: str = ""
    """The script's option for its DeepSpeed config, if its arguments do not name a config; empty without any."""
    checkpoint: str = ""
    """Folder of the checkpoint that the script loads; empty without any."""
    config_in_code: bool = False
    """Whether the script's config is in its code, or named by its code or a settings file, and not by an argument."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the environment that the script needs to train with DeepSpeed, besides its own."""
    nvme_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    """Folder on NVMe -> its measured speed, the mean of reading and writing the same bytes."""
    timed: Sequence[TimedStep] | None = None
    """Steps of a user's config that ``plan`` timed; None before it tried."""
    preload: Preload = field(default_factory=Preload)
    """Modules that the script imports, for forked launches."""
    trains_alike_with_zero: bool | None = None
    """Whether the first losses with and without ZeRO agree; None if they were not compared."""
    zero_comparison: str = ""
    """This comparison in a sentence; empty if there was none."""

    def followed_by(self, spec: StudySpec) -> StudySpec:
        """Return a spec as the script means it: its trainer's and its own batch sizes filled in and followed."""
        stages = (3,) if self.only_zero_3 else (0,) if self.zero_is_untested(spec) else spec.stages
        if self.profile.needs_zero:
            stages = tuple(stage for stage in stages if stage) or stages
        accepted = self.stage_choices.get(spec.script.arg_mappings.get(STAGE, self.stage_option)) or stages
        stages = tuple(stage for stage in stages if stage in accepted) or stages
        multiple = math.lcm(spec.divisible_by, self.micro_batch_multiple)
        checkpointing = {f"{MODEL}.{CHECKPOINT_EVERY}": (1, None)} if self.checkpoints else {}
        return follow_script(
            spec.model_copy(update={"zero_stages": stages, "divisible_by": multiple}),
            differences={**self.config_differences, **checkpointing},
            trainer=self.trainer,
            defaults=self.option_defaults,
            batch=self.batch,
            ranks=self.data_parallel_size,
            options={
                STAGE: self.stage_option,
                ds_config.GRADIENT_ACCUMULATION: self.accumulation_option,
                self.global_batch_counts: self.global_batch_option,
            },
            environment=self.environment,
        )

    def zero_is_untested(self, spec: StudySpec) -> bool:
        """Return whether only ZeRO 0 is known to train as the user's config does.

        DeepSpeed refuses ZeRO with optimizers that it does not list as tested: an optimizer that reads the shapes of
        parameters trains differently with flattened ones. The user accepts that by ``zero_allow_untested_optimizer``
        (where accelerate or a trainer sets it for any optimizer, in the file) or by training with ZeRO already, else a
        comparison of losses shows it.
        """
        return self._needs_permission(spec) and not self.trains_alike_with_zero

    def zero_was_compared(self, spec: StudySpec) -> bool:
        """Return whether ZeRO is searched because its losses agree, so that configurations with ZeRO allow it."""
        return self._needs_permission(spec) and bool(self.trains_alike_with_zero)

    def _needs_permission(self, spec: StudySpec) -> bool:
        """Return whether DeepSpeed refuses ZeRO with the script's optimizer unless a config allows it."""
        script_values = {key: values[0] for key, values in self.config_differences.items()}
        config = ds_config.with_values(spec.ds_config, script_values)
        accepted = (spec.ds_config if self._has_library else config).get("zero_allow_untested_optimizer") is True
        uses_zero = ds_config.zero_section(ds_config.effective(config)).get("stage", 0) not in (0, ds_config.AUTO)
        return not (self.profile.optimizer_tested or accepted or uses_zero)

    @property
    def _has_library(self) -> bool:
        return self.trainer is not None or self._has_accelerate

    @property
    def _has_accelerate(self) -> bool:
        return any(name.partition(".")[0] == "accelerate" for name in self.preload.modules)

    def precision_of(self, config: Mapping[str, Any]) -> str:
        """Return the precision of a config; that of the script's engine if the config has ``"auto"``."""
        is_open = self.precision and ds_config.leaves_precision(config)
        return self.precision if is_open else ds_config.precision_of(config)

    def operators(self, spec: StudySpec, space: SearchSpace) -> tuple[str, ...]:
        """Return the builders of operators that launches of a search may need; accelerate allows any optimizer."""
        config = self.followed_by(spec).ds_config
        return operators_of(
            config,
            space,
            measured_with=self.profile.optimizer,
            replaced_on_host=self._has_accelerate and config.get("zero_allow_untested_optimizer") is True,
        )

    def advice(self, config: Mapping[str, Any], *, settings_written: bool = False) -> str:
        """Return suggested changes to the script; empty without any.

        ``settings_written``: as in ``trains_by_command``.
        """
        edits = self._edits(config, settings_written=settings_written)
        names = [f"Without `optuna-dsat train`, give the script this config. {edits}"] if edits else []
        if self.trains_alike_with_zero and config.get("zero_allow_untested_optimizer") is True:
            names.append(
                f"The config allows ZeRO with {self.profile.optimizer}, which DeepSpeed does not list as tested with "
                f"ZeRO. With and without ZeRO: {self.zero_comparison}"
            )
        return " ".join(names)

    def checkpoint_advice(self, spec: StudySpec, configs: Iterable[Mapping[str, Any]]) -> str:
        """Return a warning if one of the configs cannot continue from the checkpoint that the script loads."""
        user, *others = (
            ds_config.zero_section(ds_config.effective(each)).get("stage", 0)
            for each in (self.followed_by(spec).ds_config, *configs)
        )
        unlike = {str(stage) for stage in others if stage not in (user, ds_config.AUTO) and {user, stage} != {1, 2}}
        if not self.checkpoint or not unlike or user == ds_config.AUTO:
            return ""
        stages = " or ".join(sorted(unlike))
        return (
            f"The script loads the checkpoint {self.checkpoint}. DeepSpeed does not load a checkpoint of ZeRO {user} "
            f"with ZeRO {stages}: train from the beginning, or tune with --fix {ZERO_STAGE}={user}."
        )

    def trains_by_command(self, spec: StudySpec, config: Mapping[str, Any], *, settings_written: bool) -> bool:
        """Whether the script's own command, with a config's file, trains with all of that config.

        It does not if the batch size is set in code and not in a settings file with a copy (``settings_written``), if
        code overwrites settings that it has read from the file, or if accelerate treats each rank as a separate job.
        Libraries overwrite ``"auto"`` alone; a script may set what is ``"auto"`` whatever the file says.
        """
        followed = {*spec.script.arg_mappings, *([ds_config.MICRO_BATCH] if self.batch or self.trainer else [])}
        followed |= {key for key in self.config_differences if key.startswith("autotuning.")}  # never in the best
        settings, filled_in = ds_config.flatten(config), (ds_config.AUTO,) if self._has_library else ()
        overwritten = [
            key
            for key, (value, in_file) in self.config_differences.items()
            if key not in followed and in_file not in filled_in and settings.get(key) != value
        ]
        is_unused = spec.script.unused_micro_batch is not None
        return not (is_unused or overwritten or self._edits(config, settings_written=settings_written))

    def values_at_batch(self, engine: EngineReady | None) -> dict[str, Any]:
        """Return dotted key -> value of settings that the script computes from a launch's batch, as a learning rate.

        These differ from the profile launch's. The search does not choose them.
        """
        return {
            key: value
            for key, (value, _) in ({} if engine is None else engine.config_differences).items()
            if isinstance(value, int | float) and key.partition(".")[0] not in _CHOSEN
            if key in self.config_differences and self.config_differences[key][0] != value
        }

    def as_in_file(self, spec: StudySpec, config: dict[str, Any], complete: Mapping[str, Any]) -> dict[str, Any]:
        """Return a config with the values of the user's file for settings that the script changes again in code.

        It may change them for one of several engines, such as the learning-rate schedule of a range test. The search
        does not choose these settings. If the script's command does not train with the ``complete`` config, its file
        shows all values.
        """
        if not spec.script.config_path or self.config_in_code:
            return config
        if not self.trains_by_command(spec, complete, settings_written=True):
            return config
        settings = ds_config.flatten(config)
        values = {
            key: in_file
            for key, (value, in_file) in self.config_differences.items()
            if settings.get(key) == value and key.partition(".")[0] not in _CHOSEN
        }
        return ds_config.with_values(config, values)

    def _edits(self, config: Mapping[str, Any], *, settings_written: bool) -> str:
        """Return what to change in the script so that its own command trains with a config; empty for nothing."""
        trainer = ""
        if self.trainer is not None:
            trainer = self.trainer.advice(config, settings_written=settings_written, precision=self.precision)
        elif self.bf16_argument and is_bf16(config) and self.precision in ("fp16", "fp32"):
            trainer = f"Set {self.bf16_argument}: it has to agree with the config."
        batch = "" if self.batch is None or settings_written else self.batch.advice(config)
        return " ".join(filter(None, (trainer, batch, _NAME_THE_BACKEND if self.joins_ranks else "")))

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Profiled:
        """Build from the output of ``to_json``.

        Raises:
            ValueError: If a field is missing, or names what no profile launch learns: a shared database is not trusted.
        """
        result = super().from_json(record)
        strange = [
            name
            for name in (*result.preload.modules, *result.preload.left_out)
            if not name.isprintable() or "/" in name or name.startswith(".")
        ]
        strange += [
            name
            for name, value in result.environment.items()
            if not name.startswith(_LEARNED_VARIABLES) and OF_LAUNCHERS.get(name) != value
        ]
        if strange:
            raise ValueError(f"no launch learns {repr(strange[0])[:60]}")
        return result

    @classmethod
    def if_readable(cls, record: Mapping[str, Any]) -> Profiled | None:
        """Build from a stored profile; None if this version cannot read it, e.g. from a newer version."""
        try:
            return cls.from_json(record)
        except ValueError:
            return None
