"""Configurations, sizes, durations and metrics as text for users."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from optuna_dsat.config.ds_config import MICRO_BATCH
from optuna_dsat.config.structures import Structure
from optuna_dsat.metrics import PER_ELEMENT

__all__ = [
    "bytes_in_words",
    "config_in_words",
    "date_in_words",
    "differences_in_words",
    "duration_in_words",
    "metric_in_words",
    "steps_in_words",
]

_LAST_DATE_S = 2**35
"""Unix times from here on, in a thousand years, are no dates that anything was made at."""
_SHOWN_DIFFERENCES = 6
_LIBRARYS_OWN = frozenset({"zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"})
"""Keys that accelerate sets for whatever optimizer the script has: not worth a word."""


def config_in_words(config: Mapping[str, Any]) -> str:
    """Return stage, offloads and micro-batch of a config, such as ``ZeRO 2 + optimizer offload, micro-batch 8``."""
    return f"{Structure.of(config).words}, micro-batch {config.get(MICRO_BATCH, '?')}"


def differences_in_words(differences: Mapping[str, Sequence[Any]], *, file: str) -> str:
    """Return one line on a script that passes a DeepSpeed config that differs from the tuned file.

    Empty if only keys differ that a library sets by itself.

    Args:
        differences: ``EngineReady.config_differences``: dotted key -> (the script's value, the file's).
        file: Name of the file.
    """
    told = {key: values for key, values in differences.items() if key not in _LIBRARYS_OWN}
    if not told:
        return ""
    parts = [
        f"{key} is {_value_in_words(mine)} ({_value_in_words(theirs)} in the file)"
        for key, (mine, theirs) in list(told.items())[:_SHOWN_DIFFERENCES]
    ]
    if len(told) > _SHOWN_DIFFERENCES:
        parts.append(f"and {len(told) - _SHOWN_DIFFERENCES} more")
    return (
        f"The script passes a DeepSpeed config of its own, which differs from {file}: {', '.join(parts)}. "
        "The script's values are the baseline, and the best config has them where the search sets no others."
    )


def _value_in_words(value: Any) -> str:
    return "not set" if value is None else json.dumps(value)


def bytes_in_words(count: float) -> str:
    """Return a size such as ``1.25 GiB``, ``700 MiB`` or ``12 KiB``."""
    if abs(count) >= 2**30:
        return f"{count / 2**30:.2f} GiB"
    if abs(count) >= 2**20:
        return f"{count / 2**20:.4g} MiB"
    return f"{count / 2**10:.3g} KiB"


def steps_in_words(*, skipped: int, variation: float, metrics: Mapping[str, float]) -> str:
    """Return what is to be known of the steps of a launch; empty if every step counts and all are alike.

    Args:
        skipped: Steps that the loss scaler skipped.
        variation: By how much inputs vary in size: largest minus smallest per sample, relative to their mean.
        metrics: Metrics of the steps that count.
    """
    remarks = []
    if skipped:
        remarks.append(f"{skipped} {'step' if skipped == 1 else 'steps'} skipped by the loss scaler, not counted")
    if variation:
        speeds = [metric_in_words(name, metrics[name]) for name in PER_ELEMENT if name in metrics]
        remarks.append(": ".join([f"inputs vary in size by {variation:.0%} from step to step", *speeds[:1]]))
    return "; ".join(remarks)


def date_in_words(unix_s: float) -> str:
    """Return a Unix time as local date and time, such as ``2026-03-01 14:05``; empty if it is none."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_s)) if 0 < unix_s < _LAST_DATE_S else ""


def duration_in_words(seconds: float) -> str:
    """Return a duration such as ``45 s``, ``3 min 20 s`` or ``2 h 5 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def metric_in_words(metric: str, value: float) -> str:
    """Return a metric's value with its unit, such as ``141.2 samples/s``."""
    if metric == "throughput":
        return f"{value:.4g} samples/s"
    if metric in PER_ELEMENT:
        return f"{value:.4g} {'tokens' if metric == 'tokens_per_s' else 'elements'}/s"
    if metric == "FLOPS_per_gpu":
        for power, prefix in ((15, "P"), (12, "T"), (9, "G"), (6, "M")):
            if value >= 10**power:
                return f"{value / 10**power:.4g} {prefix}FLOP/s per GPU"
        return f"{value:.4g} FLOP/s per GPU"
    return f"{value * 1000:.4g} ms"
