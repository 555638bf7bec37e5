"""Settings that can change in a running engine, so that one launch measures several configurations.

No engine keeps anything of the size of a batch, and DeepSpeed reads most communication knobs at each step.
``optuna_dsat.config.knobs`` has the stages at which an engine follows a knob, ``optuna_dsat.runtime.measure.live``
changes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optuna_dsat.config import ds_config
from optuna_dsat.config.ds_config import GRADIENT_ACCUMULATION, MICRO_BATCH, TRAIN_BATCH, ZERO
from optuna_dsat.config.knobs import KNOBS, OFFLOAD_PARAM, ZERO_STAGE

_BY_KEY = {knob.path[1]: knob for knob in KNOBS if knob.live}


def live_changes(running: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the changes that turn a running engine into one of another config; None if it must be built anew.

    Args:
        running: DeepSpeed config of the engine.
        wanted: The other config.

    Returns:
        Dotted key -> new value, DeepSpeed's default where the config has none; empty for the same config.
    """
    before, after = (_settings(config) for config in (running, wanted))
    params = {
        ZERO_STAGE: before.get(f"{ZERO}.stage", 0),
        "contiguous_gradients": before[f"{ZERO}.contiguous_gradients"],
        OFFLOAD_PARAM: before.get(f"{ZERO}.{OFFLOAD_PARAM}.device", "none"),
    }
    changes = {key: after.get(key) for key in {**before, **after} if before.get(key) != after.get(key)}
    for key, value in changes.items():
        if key in (MICRO_BATCH, GRADIENT_ACCUMULATION):
            live = isinstance(value, int) and isinstance(before.get(key), int)
        else:
            knob = _BY_KEY.get(key.removeprefix(f"{ZERO}."))
            live = value is not None and knob is not None and knob.is_live(params)
        if not live:
            return None
    return changes


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with DeepSpeed's defaults of tuned keys and without the global batch size, which follows."""
    flat = ds_config.flatten(ds_config.effective(config))
    flat.setdefault(GRADIENT_ACCUMULATION, 1)
    flat.pop(TRAIN_BATCH, None)
    stage = flat.setdefault(f"{ZERO}.stage", 0)
    for key in _BY_KEY:
        flat.setdefault(f"{ZERO}.{key}", ds_config.zero_default(key, stage=stage))
    return {key: value for key, value in flat.items() if value is not None}
