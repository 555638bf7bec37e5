"""Applies a launch's overlay to the configs that a script passes to DeepSpeed, and rejects invalid combinations."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from optuna_dsat.runtime.adapt.side_effects import without_monitors
from optuna_dsat.runtime.measure.blocks import is_pipeline_module
from optuna_dsat.runtime.overlay import (
    GRADIENT_ACCUMULATION,
    MICRO_BATCH,
    TRAIN_BATCH,
    LaidConfig,
    effective_config,
    flatten,
    growing_samples,
    merge,
    nest,
    read_config,
    scripts_own,
)
from optuna_dsat.runtime.rank import LaunchPlan
from optuna_dsat.secrecy.shapes import hidden_data

# Differences between the config that a script passes to DeepSpeed and the user's config file.
#
# The tuner only knows the file. A script that builds its config in code, or reads another file, trains with different
# settings than the tuner shows and exports, except for keys in the trial's overlay.

_AUTO = "auto"
_FILLED_IN = frozenset(
    {GRADIENT_ACCUMULATION, MICRO_BATCH, "zero_optimization.stage"}
    | {f"zero_optimization.offload_{part}.device" for part in ("optimizer", "param")}
)
"""Keys that the search chooses; where the file contains ``"auto"``, the user's actual values must be known."""
_IGNORED_KEYS = frozenset(
    {"autotuning", "comet", "csv_monitor", "dump_state", "flops_profiler", "steps_per_print", "tensorboard", "wandb"}
    | {"wall_clock_breakdown"}
)
"""Keys without effect on a trial's speed or memory, or that a trial removes; known from the user's file if any."""

_DEFAULTS = {
    "bf16.enabled": False,
    "fp16.enabled": False,
    "gradient_clipping": 0.0,
    "prescale_gradients": False,
    "steps_per_print": math.inf,
    "zero_optimization.stage": 0,
}
"""DeepSpeed's defaults, and accelerate's of ``steps_per_print``, which libraries write into the config; equivalent to a
missing key."""


def config_differences(
    script: Mapping[str, Any],
    *,
    user: Mapping[str, Any],
    launch: Mapping[str, Any],
    world_size: int,
    scripts: Collection[str] = (),
) -> dict[str, list[Any]]:
    """Return dotted key -> [the script's value, the file's value], with None for a missing key.

    Scripts that read the user's file get the launch's file, so a value that equals either is not a difference, nor is
    DeepSpeed's default for a key missing in the file; a config in code keeps it. ``"auto"`` equals any value, but for
    searched settings the filled in value is reported. A list of values to try equals each member. Batch sizes are
    normalized to micro-batch and accumulation before the comparison. Accumulation steps and global batches that a
    script sets itself are reported, even as in the file.

    ``script`` is the config that the script passed, before the overlay; ``launch`` is the user's with the overlay.
    Values of the keys in ``scripts`` are known to come from the script, also where the user's file contains ``"auto"``.
    """
    scripts_batches = {GRADIENT_ACCUMULATION}
    if _contradicts_launch(script, launch=launch, world_size=world_size):
        script = {key: value for key, value in script.items() if key != MICRO_BATCH}
        scripts_batches.add(MICRO_BATCH)
    flat_script, flat_user, flat_launch = (
        flatten(_normalized_batches(config, world_size)) for config in (script, user, launch)
    )
    differences = {}
    for key in sorted({**flat_script, **flat_user}):
        value, user_value = flat_script.get(key), flat_user.get(key)
        if user and key.partition(".")[0] in _IGNORED_KEYS:
            continue
        launched = flat_launch.get(key)
        is_own = key in scripts and key != GRADIENT_ACCUMULATION  # reported by a launch with other accumulation steps
        if user_value == _AUTO and value is not None and (is_own or key in _FILLED_IN):
            user_value = None  # the filled in value is the user's
            launched = None if launched == _AUTO else launched
        is_default = value is not None and value == _DEFAULTS.get(key)
        if user_value is None and is_default and (user or value == math.inf):
            continue
        if key in scripts_batches and value == user_value != launched:
            differences[key] = [value, value]
        is_open = is_own and value == _AUTO and key not in flat_user  # a trainer computes it
        if is_open or (not _agree(value, user_value) and (is_own or not _agree(value, launched))):
            differences[key] = [value, flat_user.get(key)]
    return differences


def _contradicts_launch(script: Mapping[str, Any], *, launch: Mapping[str, Any], world_size: int) -> bool:
    """Return whether a script sets its global batch in the launch's config, whose micro-batch makes another.

    The launch's own may be that of more ranks: a profile launch knows no pipeline.
    """
    sizes = [script.get(key) for key in (TRAIN_BATCH, MICRO_BATCH, GRADIENT_ACCUMULATION)]
    train, micro, accumulation = (size if isinstance(size, int) else 0 for size in sizes)
    product = micro * accumulation * world_size
    return micro == launch.get(MICRO_BATCH) and train * product > 0 and train not in (product, launch.get(TRAIN_BATCH))


def settings_told(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted key -> value of the settings that ``config_differences`` may report: not ignored, not defaults."""
    return {
        key: value
        for key, value in flatten(config).items()
        if key.partition(".")[0] not in _IGNORED_KEYS and (key not in _DEFAULTS or value != _DEFAULTS[key])
    }


def _agree(value: Any, file_value: Any) -> bool:
    if value == file_value or _AUTO in (value, file_value):
        return True
    return isinstance(file_value, list) and value in file_value


def _normalized_batches(config: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    rest = {key: value for key, value in config.items() if key not in (TRAIN_BATCH, MICRO_BATCH, GRADIENT_ACCUMULATION)}
    train, micro, accumulation = config.get(TRAIN_BATCH), config.get(MICRO_BATCH), config.get(GRADIENT_ACCUMULATION)
    if isinstance(train, int) and accumulation in (None, _AUTO) and isinstance(micro, int):
        accumulation = max(1, train // max(1, micro * world_size))
    elif isinstance(train, int) and micro is None:
        micro = max(1, train // max(1, world_size * (accumulation if isinstance(accumulation, int) else 1)))
    return {**rest, MICRO_BATCH: micro, GRADIENT_ACCUMULATION: 1 if accumulation is None else accumulation}


class PartitionedModelError(ValueError):
    """The script builds its model within ``deepspeed.zero.Init`` at a ZeRO stage below 3; only ZeRO 3 supports it."""


class TrialConfig:
    """Applies a launch's overlay to configs. Construct it before reads of the user's file are redirected."""

    def __init__(self, plan: LaunchPlan, *, world_size: int) -> None:
        self._plan = plan
        self._world_size = world_size
        self._user = _read(plan.user_config_path) if plan.measures else None  # outside a search it may be gone
        self._launch = _launched(plan)
        self._sizes = self._micro_batch_of(self._launch)
        self._of_user = self._micro_batch_of(self._user) if plan.purpose == "profile" else frozenset()
        """The parts of ``micro_batches``. The user's micro-batch is no batch size of a trial."""

    def take_on(self, plan: LaunchPlan) -> None:
        """Continue with another trial's launch, in the running engine."""
        self._plan, self._launch, self._of_user = plan, _launched(plan), frozenset()
        self._sizes |= self._micro_batch_of(self._launch)

    def apply_overlay(self, config: Any, *, client_optimizer: object | None = None) -> dict[str, Any]:
        """Return a config with the overlay applied; in measured launches monitors are off and samples do not grow.

        Raises:
            ValueError: If the config cannot be read.
        """
        given = read_config(config)
        self._sizes |= self._micro_batch_of(given)
        laid = effective_config(given, self._plan.overlay, client_optimizer=client_optimizer)
        return merge(without_monitors(laid), nest(growing_samples(laid))) if self._plan.measures else laid

    def differences(self, config: Any, *, ranks: int | None = None) -> dict[str, list[Any]]:
        """Return the differences between the script's config and the user's file (see ``config_differences``).

        Empty if any of them could not be read. Values that look like secrets are left out. ``ranks`` are those that get
        different data, if known: only an engine has them (pipeline stages share theirs). The global batch of a config
        that the script builds is then one of them: it may contradict the script's other batch sizes.
        """
        if config is None or self._user is None or self._launch is None:
            return {}
        launch = self._launch
        if not self._plan.user_config_path:  # the script reads no file: only its command-line options follow the launch
            launch = {key: value for key, value in launch.items() if not isinstance(value, Mapping)}
        script = read_config(scripts_own(config) if isinstance(config, Mapping) else config)
        noted = config.noted if isinstance(config, LaidConfig) else ()
        result = config_differences(
            script, user=self._user, launch=launch, world_size=ranks or self._world_size, scripts=noted
        )
        if ranks and not (self._user or isinstance(config, LaidConfig)) and isinstance(script.get(TRAIN_BATCH), int):
            result[TRAIN_BATCH] = [script[TRAIN_BATCH], None]
        return {key: values for key, values in result.items() if hidden_data(values, key) == values}

    @property
    def micro_batch(self) -> int | None:
        """Samples per rank and forward pass in the launch's config; None if unspecified."""
        size = None if self._launch is None else self._launch.get(MICRO_BATCH)
        return size if isinstance(size, int) else None

    @property
    def accumulation(self) -> int:
        """Gradient accumulation steps in the launch's config."""
        steps = (self._launch or {}).get(GRADIENT_ACCUMULATION, 1)
        return steps if isinstance(steps, int) else 1

    @property
    def micro_batches(self) -> frozenset[int]:
        """Samples per rank and forward pass in the launch's config and the script's; in profile launches, the user's.

        Also in earlier trials of the engine: a batch that did not follow still has one of these sizes.
        """
        return self._sizes | self._of_user

    def _micro_batch_of(self, config: Mapping[str, Any] | None) -> frozenset[int]:
        """Return the micro-batch of a config, which may be that of its global batch; empty if unspecified."""
        size = _normalized_batches(config or {}, self._world_size)[MICRO_BATCH]
        return frozenset({size} if isinstance(size, int) else ())

    def check_model(self, model: Any, config: Mapping[str, Any]) -> None:
        """Reject models that DeepSpeed would reject with an unclear error.

        Raises:
            ValueError: If a pipeline module is configured with ZeRO 2 or 3.
            PartitionedModelError: If a model built within ``deepspeed.zero.Init`` is configured with a stage below 3.
        """
        stage = _stage_of(config)
        if stage > 1 and is_pipeline_module(model):
            raise ValueError(
                f"The script trains a PipelineModule, which DeepSpeed runs with ZeRO 0 or 1 only; the config says "
                f"ZeRO {stage}. Set zero_optimization.stage to 0 or 1 in {Path(self._plan.user_config_path).name}."
            )
        if stage < 3 and any(hasattr(parameter, "ds_id") for parameter in getattr(model, "parameters", list)()):
            raise PartitionedModelError(
                f"The script builds its model within deepspeed.zero.Init, which is for ZeRO 3; this configuration is "
                f"ZeRO {stage}. Tune with --zero-stages 3, or enter zero.Init at ZeRO 3 only (enabled=...)."
            )

    def check_engine(self, engine: Any) -> None:
        """Check that an engine built by the script uses the launch's config.

        Raises:
            ValueError: If its ZeRO stage or batch sizes differ.
        """
        if self._launch is None:
            return
        wanted = {**self._launch, "zero_optimization.stage": _stage_of(self._launch)}
        actual = {
            "zero_optimization.stage": int(engine.zero_optimization_stage()),
            MICRO_BATCH: int(engine.train_micro_batch_size_per_gpu()),
            GRADIENT_ACCUMULATION: int(engine.gradient_accumulation_steps()),
        }
        other = [
            f"{key} is {has}, not {wanted[key]}"
            for key, has in actual.items()
            if isinstance(wanted.get(key), int) and wanted[key] != has
        ]
        if other:
            raise ValueError(
                f"The engine was built without this trial's config: {', '.join(other)}. Take the config from "
                "optuna_dsat.get_ds_config_from_hparams, or build the engine with deepspeed.initialize."
            )


def _launched(plan: LaunchPlan) -> dict[str, Any] | None:
    """Return a launch's config; the script's file may have ``"auto"`` for the batch sizes that the overlay sets."""
    config, sizes = _read(plan.config_path), (MICRO_BATCH, GRADIENT_ACCUMULATION)
    return config and {**config, **{key: plan.overlay[key] for key in sizes if key in plan.overlay}}


def _read(path: str) -> dict[str, Any] | None:
    if not path:  # only the script has a config
        return {}
    try:
        return read_config(path)
    except ValueError as error:
        print(f"optuna-dsat: {error}", file=sys.stderr)
        return None


def _stage_of(config: Mapping[str, Any]) -> int:
    zero = config.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else 0
    return stage if isinstance(stage, int) else 0


def without_values(args: Any, names: Sequence[str]) -> Any:
    """Return a copy of an object whose attributes ``names`` are None, be they read-only properties."""
    args = copy.copy(args)
    for name in names:
        try:
            setattr(args, name, None)
        except AttributeError:
            members = {"__slots__": (), name: property(lambda _: None)}
            object.__setattr__(args, "__class__", type(type(args).__name__, (type(args),), members))
    return args
