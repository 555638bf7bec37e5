"""Configurations, sizes, durations and metrics as text for users."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from itertools import starmap
from typing import Any

from optuna_dsat.config.differences import knob_differences
from optuna_dsat.config.ds_config import MICRO_BATCH, MICRO_BATCH_CAP
from optuna_dsat.config.structures import Structure
from optuna_dsat.metrics import PER_ELEMENT, PER_JOULE

_LAST_DATE_S = 2**35
"""Unix times from here on (a thousand years ahead) are not plausible dates."""
_SHOWN_DIFFERENCES = 6
KNOBS_APART = "; "
"""Between a configuration in words and its knobs."""
_ROUND_FROM = 100_000
"""Smallest round number that is written with an exponent."""
_LIBRARYS_OWN = frozenset({"zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"})
"""Keys that accelerate sets for any optimizer of the script: not worth reporting."""


def config_in_words(
    config: Mapping[str, Any], *, user: Mapping[str, Any] | None = None, params_count: int | None = None
) -> str:
    """Return stage, offloads and micro-batch of a config, such as ``ZeRO 2 + optimizer offload, micro-batch 8``.

    Args:
        config: The config.
        user: The user's config, which names the knobs that differ: ``ZeRO 2, micro-batch 8; overlap_comm=true``.
        params_count: Parameters of the model, as for ``knob_differences``.
    """
    words = f"{Structure.of(config).words}, micro-batch {config.get(MICRO_BATCH, '?')}"
    if user is None:
        return words
    different = knob_differences(config, user, params_count=params_count)
    return KNOBS_APART.join([words, *filter(None, [", ".join(starmap(knob_in_words, different.items()))])])


def knob_in_words(name: str, value: Any) -> str:
    """Return a knob's value as ``--fix`` takes it, such as ``reduce_bucket_size=5e7``."""
    return f"{name}={setting_in_words(value)}"


def setting_in_words(value: Any) -> str:
    """Return a value of a DeepSpeed config as a person writes it: ``5e9``, ``1.5e6``, ``true``, ``16``."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) < _ROUND_FROM:
        return value if isinstance(value, str) else json.dumps(value)
    sign, all_digits = ("-" if value < 0 else ""), str(abs(value))
    first, others = all_digits[0], all_digits[1:].rstrip("0")
    if len(others) + 1 >= len(all_digits) / 2:
        return str(value)
    return f"{sign}{first}{'.' * bool(others)}{others}e{len(all_digits) - 1}"


def count_in_words(count: float, *, digits: int = 4) -> str:
    """Return a number as a person writes it: thousands set apart (``13,984``), and rounded if it is measured."""
    if isinstance(count, int):
        return f"{count:,}"
    rounded = f"{count:.{digits}g}"
    return rounded if not math.isfinite(count) or abs(float(rounded)) < 1000 else f"{float(rounded):,.0f}"


def largest_in_words(micro_batch: int) -> str:
    """Return the largest micro-batch by the memory model, which tries none beyond ``MICRO_BATCH_CAP``."""
    return f"{micro_batch:,}{' or more' if micro_batch >= MICRO_BATCH_CAP else ''}"


def things_in_words(count: int, thing: str) -> str:
    """Return a number of things, such as ``1 round``, ``2 launches`` or ``1,024 samples``."""
    ending = "" if count == 1 else "es" if thing.endswith(("ch", "s")) else "s"
    return f"{count_in_words(count)} {thing}{ending}"


def faster_in_words(share: float) -> str:
    """Return how much faster something is by a share, such as ``9% faster`` or ``3.5 times as fast``."""
    return f"{share:.0%} faster" if share < 1 else f"{count_in_words(float(1 + share), digits=2)} times as fast"


def times_in_words(ratio: float) -> str:
    """Return how many times as good something is, rounded alike everywhere: ``1.003``, ``1.52``, ``41.5``."""
    if abs(ratio - 1) < 0.1:
        return "1" if ratio == 1 else f"{ratio:.3f}"
    if not 0.01 <= ratio < 999.5:
        return count_in_words(ratio, digits=3)
    return f"{ratio:#.3g}".rstrip(".")


def range_in_words(low: str, high: str) -> str:
    """Return two ends in words as a range, with their unit once where it is the same: ``6,564 to 17,770 samples/s``."""
    number, _, unit = low.partition(" ")
    return f"{number} to {high}" if unit == high.partition(" ")[2] else f"{low} to {high}"


def share_in_words(share: float) -> str:
    """Return a share such as ``83%``; a small share is not rounded to zero."""
    return "less than 1%" if 0 < share < 0.005 else f"{share:.0%}"


def choices_in_words(choices: Sequence[Any], *, as_range: bool = False) -> str:
    """Return the values of a knob, such as ``5e7, 5e8``, or the ends of a range, such as ``1 to 65,536``."""
    if as_range:
        return " to ".join(count_in_words(choice) for choice in choices)
    return ", ".join(map(setting_in_words, choices))


def combinations_in_words(count: int) -> str:
    """Return one sentence on the size of a search space, from its lineages."""
    return f"{things_in_words(count, 'combination')} of these knobs, each at any micro-batch of its range."


def outcome_in_words(outcome: str) -> str:
    """Return an outcome such as ``out of memory``."""
    return outcome.replace("_", " ")


def outcomes_in_words(counts: Mapping[str, int]) -> str:
    """Return how many trials ended how, such as ``12 measured, 2 out of memory``; empty for none."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count} {_outcomes(outcome, count)}" for outcome, count in ordered)


def _outcomes(outcome: str, count: int) -> str:
    words = outcome_in_words(outcome)
    return f"{words}s" if count > 1 and words.endswith(("error", "config", "timeout")) else words


def slot_name(device: str) -> str:
    """Return the device of a rank: ``GPU``, or ``CPU rank`` without a GPU."""
    return "GPU" if device == "cuda" else "CPU rank"


def slot_time_in_words(seconds: float, device: str) -> str:
    """Return the time of all slots together, such as ``2.5 GPU hours`` or ``1 CPU rank minute``."""
    size = abs(seconds)
    factor, unit = (3600, "hour") if size >= 3600 else (60, "minute") if size >= 60 else (1, "second")
    amount = count_in_words(float(seconds / factor), digits=3)
    return f"{amount} {slot_name(device)} {unit}{'s' * (amount != '1')}"


def differences_in_words(differences: Mapping[str, Sequence[Any]], *, file: str) -> str:
    """Return one line on a script that passes a DeepSpeed config that differs from the tuned file.

    Empty if the only different keys are set by a library.

    Args:
        differences: ``EngineReady.config_differences``: dotted key -> (the script's value, the file's).
        file: Name of the file.
    """
    words = {key: values for key, values in differences.items() if key not in _LIBRARYS_OWN and values[0] != values[1]}
    if not words:
        return ""
    parts = [
        f"{key} is {_setting_or_none(mine)} ({_setting_or_none(theirs)} in the file)"
        for key, (mine, theirs) in list(words.items())[:_SHOWN_DIFFERENCES]
    ]
    if len(words) > _SHOWN_DIFFERENCES:
        parts.append(f"and {len(words) - _SHOWN_DIFFERENCES} more")
    return (
        f"The script passes a DeepSpeed config of its own, which differs from {file}: {', '.join(parts)}. "
        "The script's values are the baseline, and every trial has them where the search sets no others."
    )


def _setting_or_none(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value)
    return "not set" if value is None else setting_in_words(value)


def bytes_in_words(count: float) -> str:
    """Return a size such as ``1.00 TiB``, ``1.25 GiB``, ``700 MiB``, ``12 KiB`` or ``320 bytes``."""
    if abs(count) >= 2**40:
        return f"{count / 2**40:.2f} TiB"
    if abs(count) >= 2**30:
        return f"{count / 2**30:.2f} GiB"
    if abs(count) >= 2**20:
        return f"{count / 2**20:.4g} MiB"
    if abs(count) >= 2**10:
        return f"{count / 2**10:.4g} KiB"
    return f"{round(count)} {'byte' if round(count) == 1 else 'bytes'}"


def params_in_words(count: int) -> str:
    """Return a number of parameters such as ``1.2 T``, ``8.03 B``, ``124 M`` or ``1,633``."""
    return _scaled(count, ((1e12, "T"), (1e9, "B"), (1e6, "M")), digits=3) or count_in_words(count)


def model_in_words(params: int, *, pipeline: bool) -> str:
    """Return the size of a model: ``124 M parameters``; of a pipeline, that of the profiled stage."""
    return f"{params_in_words(params)} parameters{' in one pipeline stage' if pipeline else ''}"


def flops_in_words(count: float) -> str:
    """Return a number of floating-point operations such as ``1.153 GFLOP``."""
    prefixes = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
    scaled = _scaled(count, prefixes, digits=4) or f"{count_in_words(float(count))} "
    return f"{scaled}FLOP"


def _scaled(count: float, scales: Sequence[tuple[float, str]], *, digits: int) -> str:
    """Return a number with the suffix of its scale, the largest first; empty if below all scales.

    A number that rounds to 1000 of a scale becomes 1 of the next. Beyond the largest scale, thousands are separated: no
    number gets an exponent.
    """
    for factor, suffix in scales:
        if float(f"{count / factor:.{digits}g}") >= 1:
            return f"{count_in_words(float(count / factor), digits=digits)} {suffix}"
    return ""


def steps_in_words(
    *,
    skipped: int,
    variation: float,
    metrics: Mapping[str, float],
    left_out: float = 0.0,
    user_left_out: float = 0.0,
    user_metrics: Mapping[str, float] | None = None,
) -> str:
    """Return caveats on the steps of a launch; empty if every step counts and all are alike.

    Args:
        skipped: Steps that the loss scaler skipped.
        variation: Of the size of inputs per sample: largest minus smallest, relative to their mean.
        metrics: Metrics of the steps that count.
        left_out: Share of their time that is not counted as it passes in occasional evaluation.
        user_left_out: The same with the user's config.
        user_metrics: Metrics of the user's config, with which they are compared; None for no comparison.
    """
    remarks = []
    rates = [item.get("throughput", 0.0) for item in (metrics, user_metrics or {})]
    if skipped:
        remarks.append(f"{skipped} {'step' if skipped == 1 else 'steps'} skipped by the loss scaler, not counted")
    if left_out >= 0.005:
        remarks.append(f"{left_out:.0%} of the steps' time is left out: evaluation or generation between some of them")
        if rates[1] and rates[0] != rates[1]:
            ratio = rates[0] * (1 - left_out) / (rates[1] * (1 - user_left_out))
            remarks[-1] += f"; including it, training is about {times_in_words(ratio)}x as fast as with your config"
    if variation:
        speeds = [metric_in_words(name, metrics[name]) for name in PER_ELEMENT if name in metrics]
        remarks.append(": ".join([f"inputs of a sample vary by {variation:.0%} from step to step", *speeds[:1]]))
    return "; ".join(filter(None, [*remarks, _sizes_in_words(metrics, user_metrics or {})]))


def _sizes_in_words(metrics: Mapping[str, float], user_metrics: Mapping[str, float]) -> str:
    """Return how samples differ in size from the user config's, with the ratio without that; else empty."""
    for name in PER_ELEMENT:
        if all(each.get(name) and each.get("throughput") for each in (metrics, user_metrics)):
            size, own_size = (each[name] / each["throughput"] for each in (metrics, user_metrics))
            if not 0.95 < size / own_size < 1.05:
                unit = name.removesuffix("_per_s")
                return (
                    f"a sample has {count_in_words(size, digits=3)} {unit} with its padding, and "
                    f"{count_in_words(own_size, digits=3)} with your config: by {unit}/s it is "
                    f"{times_in_words(metrics[name] / user_metrics[name])}x as fast"
                )
    return ""


def date_in_words(unix_s: float) -> str:
    """Return a Unix time as local date and time, such as ``2026-03-01 14:05``; empty if it is not a date."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_s)) if 0 < unix_s < _LAST_DATE_S else ""


def duration_in_words(seconds: float) -> str:
    """Return a duration such as ``0.4 s``, ``45 s``, ``3 min 20 s`` or ``2 h 5 min``."""
    if 0.05 <= seconds < 0.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def step_time_in_words(seconds: float, *, digits: int = 4) -> str:
    """Return the duration of a step or of a part of it, such as ``1.2 s``, ``29.6 ms`` or ``5.23 µs``."""
    scales = ((1.0, 1.0, "s"), (1e-4, 1e3, "ms"), (0.0, 1e6, "\u00b5s"))
    fitting = ((factor, unit) for least, factor, unit in scales if abs(seconds) >= least)
    factor, unit = next(fitting, (1e3, "ms"))
    return f"{count_in_words(seconds * factor, digits=digits)} {unit}" if seconds else "0 ms"


def metric_in_words(metric: str, value: float, *, device: str = "cuda") -> str:
    """Return a metric's value with its unit, such as ``141.2 samples/s``."""
    if metric == "throughput":
        return f"{count_in_words(value)} samples/s"
    if metric in PER_ELEMENT:
        return f"{count_in_words(value)} {'tokens' if metric == 'tokens_per_s' else 'elements'}/s"
    if metric == PER_JOULE:
        return f"{count_in_words(value)} samples/J"
    if metric == "FLOPS_per_gpu":
        return f"{flops_in_words(value)}/s per {slot_name(device)}"
    return step_time_in_words(value)
