"""Settings that can change in a running engine, so that one launch measures several configurations.

No engine keeps anything of the size of a batch, and DeepSpeed reads most communication knobs at each step.
``optuna_dsat.runtime.measure.live`` has the places in DeepSpeed's source, and changes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optuna_dsat.config import ds_config
from optuna_dsat.config.ds_config import GRADIENT_ACCUMULATION, MICRO_BATCH, TRAIN_BATCH, ZERO

__all__ = ["LIVE_KNOBS", "is_live", "live_changes"]

LIVE_KNOBS: Mapping[str, tuple[int, ...]] = {
    "contiguous_gradients": (2, 3),
    "overlap_comm": (1, 2),
    "reduce_bucket_size": (1, 2, 3),
    "reduce_scatter": (1, 2, 3),
    "stage3_max_live_parameters": (3,),
    "stage3_max_reuse_distance": (3,),
    "stage3_param_persistence_threshold": (3,),
    "stage3_prefetch_bucket_size": (3,),
}
"""Knob -> ZeRO stages at which a running engine follows it.

ZeRO 1 makes its hooks by ``contiguous_gradients`` and ``overlap_comm`` when it is built, ZeRO 3 its streams by
``overlap_comm``.
"""


def is_live(knob: str, *, stage: int, contiguous: bool, offloads_params: bool) -> bool:
    """Return whether a running engine follows a knob of ``zero_optimization``.

    Args:
        knob: The key.
        stage: ZeRO stage of the engine.
        contiguous: Whether it has contiguous gradients.
        offloads_params: Whether its parameters are offloaded.
    """
    if stage not in LIVE_KNOBS.get(knob, ()):
        return False
    if knob == "overlap_comm" and stage == 1:
        return contiguous  # else the engine may have no hooks
    # Persistent parameters of an offload lie on the device from the start.
    return knob != "stage3_param_persistence_threshold" or not offloads_params


def live_changes(running: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the changes that turn a running engine into one of another config; None if it must be built anew.

    Args:
        running: DeepSpeed config of the engine.
        wanted: The other config.

    Returns:
        Dotted key -> new value, DeepSpeed's default where the config has none; empty for the same config.
    """
    before, after = (_settings(config) for config in (running, wanted))
    stage = before.get(f"{ZERO}.stage", 0)
    changes = {key: after.get(key) for key in {**before, **after} if before.get(key) != after.get(key)}
    for key, value in changes.items():
        if key in (MICRO_BATCH, GRADIENT_ACCUMULATION):
            live = isinstance(value, int) and isinstance(before.get(key), int)
        else:
            live = value is not None and is_live(
                key.removeprefix(f"{ZERO}."),
                stage=stage,
                contiguous=bool(before[f"{ZERO}.contiguous_gradients"]),
                offloads_params=before.get(f"{ZERO}.offload_param.device", "none") != "none",
            )
        if not live:
            return None
    return changes


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with DeepSpeed's defaults of tuned keys and without the global batch size, which follows."""
    flat = ds_config.flatten(ds_config.effective(config))
    flat.setdefault(GRADIENT_ACCUMULATION, 1)
    flat.pop(TRAIN_BATCH, None)
    stage = flat.setdefault(f"{ZERO}.stage", 0)
    for knob in LIVE_KNOBS:
        flat.setdefault(f"{ZERO}.{knob}", ds_config.zero_default(knob, stage=stage))
    return {key: value for key, value in flat.items() if value is not None}
