"""Differences between the config that a script passes to DeepSpeed and the user's config file.

The tuner only knows the file. A script that builds its config in code, or reads another file, trains with settings
other than those that the tuner shows and exports, except for keys in the trial's overlay.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from optuna_dsat.runtime.flattening import flatten

__all__ = ["config_differences", "settings_told"]

_AUTO = "auto"
_TRAIN, _MICRO = "train_batch_size", "train_micro_batch_size_per_gpu"
_ACCUMULATION = "gradient_accumulation_steps"
_FILLED_IN = frozenset(
    {_ACCUMULATION, "zero_optimization.stage"}
    | {f"zero_optimization.offload_{part}.device" for part in ("optimizer", "param")}
)
"""Keys that the search chooses, so that the user's own values must be known where the file says ``"auto"``."""
_IGNORED_KEYS = frozenset(
    {"autotuning", "comet", "csv_monitor", "dump_state", "flops_profiler", "steps_per_print", "tensorboard", "wandb"}
    | {"wall_clock_breakdown"}
)
"""Keys that do not affect a trial's speed or memory, or that a trial removes."""

_DEFAULTS = {
    "bf16.enabled": False,
    "fp16.enabled": False,
    "gradient_clipping": 0.0,
    "prescale_gradients": False,
    "zero_optimization.stage": 0,
}
"""DeepSpeed's defaults, which libraries such as accelerate write into the config: no difference to a missing key."""


def config_differences(
    script: Mapping[str, Any],
    *,
    user: Mapping[str, Any],
    launch: Mapping[str, Any],
    world_size: int,
    own: Collection[str] = (),
) -> dict[str, list[Any]]:
    """Return dotted key -> [the script's value, the file's value]; None stands for a missing key.

    A script that reads the file gets the launch's, so a value that equals either is no difference, nor is DeepSpeed's
    default for a key that the file lacks. ``"auto"`` equals any value, but what fills it in for a setting that is
    searched is told. A list of values to try equals each member, and batch sizes are compared after normalization to
    micro-batch and accumulation.

    Args:
        script: The config that the script passed, before the overlay.
        user: The user's file.
        launch: The launch's config file: the user's with the overlay.
        world_size: Number of ranks, which divide the global batch size.
        own: Dotted keys whose values are known to be none of the launch's: the script's own, also where the file says
            ``"auto"``.
    """
    flat_script, flat_user, flat_launch = (
        flatten(_normalized_batches(config, world_size)) for config in (script, user, launch)
    )
    differences = {}
    for key in sorted({**flat_script, **flat_user}):
        value, user_value = flat_script.get(key), flat_user.get(key)
        if key.partition(".")[0] in _IGNORED_KEYS:
            continue
        launched = flat_launch.get(key)
        is_own = key in own and key != _ACCUMULATION  # a launch of other steps has told these
        if user_value == _AUTO and value is not None and (is_own or key in _FILLED_IN):
            user_value = None  # what fills it in is the user's own
            launched = None if launched == _AUTO else launched
        if user_value is None and value is not None and value == _DEFAULTS.get(key):
            continue
        if not _agree(value, user_value) and (is_own or not _agree(value, launched)):
            differences[key] = [value, flat_user.get(key)]
    return differences


def settings_told(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted key -> value of what ``config_differences`` tells of a config: nothing ignored, no default."""
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
    """Return the config with its batch sizes expressed as micro-batch and accumulation steps."""
    rest = {key: value for key, value in config.items() if key not in (_TRAIN, _MICRO, _ACCUMULATION)}
    train, micro, accumulation = config.get(_TRAIN), config.get(_MICRO), config.get(_ACCUMULATION)
    if isinstance(train, int) and accumulation in (None, _AUTO) and isinstance(micro, int):
        accumulation = max(1, train // (micro * world_size))
    elif isinstance(train, int) and micro is None:
        micro = max(1, train // (world_size * (accumulation if isinstance(accumulation, int) else 1)))
    return {**rest, _MICRO: micro, _ACCUMULATION: 1 if accumulation is None else accumulation}
