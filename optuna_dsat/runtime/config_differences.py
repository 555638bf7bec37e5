"""Where the config that a script passes differs from the file that the tuner was given.

The tuner knows the file alone. A script that builds its config in code, or another file, trains with other settings
than the tuner shows and exports, wherever the trial's overlay does not reach.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optuna_dsat.runtime.flattening import flatten

__all__ = ["config_differences"]

_AUTO = "auto"
_TRAIN, _MICRO = "train_batch_size", "train_micro_batch_size_per_gpu"
_ACCUMULATION = "gradient_accumulation_steps"
_IGNORED_KEYS = frozenset(
    {"autotuning", "comet", "csv_monitor", "dump_state", "flops_profiler", "steps_per_print", "tensorboard", "wandb"}
    | {"wall_clock_breakdown"}
)
"""Keys that decide nothing about speed or memory of a trial, or are taken out of it."""


def config_differences(
    script: Mapping[str, Any], *, user: Mapping[str, Any], launch: Mapping[str, Any], world_size: int
) -> dict[str, list[Any]]:
    """Return dotted key -> [the script's value, the file's], None for a key that is missing.

    A script that reads the file gets the launch's own, so a value of either is no difference. ``"auto"`` and lists of
    values to try agree with anything (the latter with their members), and batch sizes count as what they come to.

    Args:
        script: The config that the script passed, before the overlay.
        user: The user's file.
        launch: The launch's own config file: the user's with the overlay.
        world_size: Ranks, where a batch size has to be divided by them.
    """
    ours, theirs = flatten(_batches(script, world_size)), flatten(_batches(user, world_size))
    launched = flatten(_batches(launch, world_size))
    found = {}
    for key in sorted({**ours, **theirs}):
        mine, original, current = ours.get(key), theirs.get(key), launched.get(key)
        if key.partition(".")[0] in _IGNORED_KEYS or _agree(mine, original) or _agree(mine, current):
            continue
        found[key] = [mine, original]
    return found


def _agree(mine: Any, other: Any) -> bool:
    if mine == other or _AUTO in (mine, other):
        return True
    return isinstance(other, list) and mine in other


def _batches(config: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    """Return the config with micro-batch and accumulation in place of whichever batch sizes it gives."""
    rest = {key: value for key, value in config.items() if key not in (_TRAIN, _MICRO, _ACCUMULATION)}
    train, micro, accumulation = config.get(_TRAIN), config.get(_MICRO), config.get(_ACCUMULATION)
    if isinstance(train, int) and accumulation in (None, _AUTO) and isinstance(micro, int):
        accumulation = max(1, train // (micro * world_size))
    elif isinstance(train, int) and micro is None:
        micro = max(1, train // (world_size * (accumulation if isinstance(accumulation, int) else 1)))
    return {**rest, _MICRO: micro, _ACCUMULATION: 1 if accumulation is None else accumulation}
