"""Advice of the DeepSpeed configuration guide, each piece only if it applies to this model on this hardware.

The guide's rules: without memory pressure ZeRO 0 is faster than 1, 2, 2 with offload, 3 and 3 with offloads; while
memory is short, go on in that order, activation checkpointing first. Its figure for ``overlap_comm`` (4.5 times the
buckets) refers to DeepSpeed 0.8; the advice uses today's allocations (``optuna_dsat.cost.zero_states``).
"""

from __future__ import annotations

from collections.abc import Callable

from optuna_dsat.config import ds_config
from optuna_dsat.config.structures import GUIDE_ORDER, Structure
from optuna_dsat.plan.rows import Plan, PlannedRow
from optuna_dsat.words import bytes_in_words

__all__ = ["advise"]

_FIRST_STAGE = 2
"""ZeRO stage at which the guide's order of tries begins once activation checkpointing is on."""
_MUCH_OF_DEVICE = 0.08
"""Least share of the device's memory that buffers take for advice on them."""
_MUCH_OF_STEP = 0.1
"""Least share of the step, or relative difference of throughput, for advice."""
_MUCH_OF_PEAK = 0.4
"""Least share of the peak that activations take for advice on checkpointing if ZeRO 2 fits ..."""
_SOME_OF_PEAK = 0.05
"""... and if it does not."""


def advise(plan: Plan) -> list[str]:
    """Return the pieces of advice that apply, most important first."""
    found = [rule(plan) for rule in _RULES]
    return [text for text in found if text is not None]


def _start(plan: Plan) -> str | None:
    """Advise the first structure of the guide's order that fits, and name the fastest by prediction."""
    fitting = plan.fitting
    if not fitting:
        return _nothing(plan)
    rows = {row.structure: row for row in fitting}
    order = [one for one in GUIDE_ORDER if one.stage >= _FIRST_STAGE]
    first = next((rows[one] for one in order if one in rows), fitting[0])
    best = fitting[0]
    text = f"Begin with {first.name}, the first of the guide's order that fits (micro-batch {first.micro_batch})."
    if best is not first and best.samples_per_s > (1 + _MUCH_OF_STEP) * first.samples_per_s:
        text += (
            f" {best.name} is predicted to be {best.samples_per_s / first.samples_per_s:.1f} times as fast with "
            f"micro-batch {best.micro_batch}: measure both."
        )
    return text


def _nothing(plan: Plan) -> str:
    least = min(plan.rows, key=lambda row: row.least_bytes)
    limit = plan.subject.usable_bytes
    if least.too_small == "host" or least.least_bytes <= limit:
        return (
            f"Nothing fits: {least.name} would leave the device enough, but needs {bytes_in_words(least.host_bytes)} "
            f"of host memory, and there are {bytes_in_words(plan.subject.hardware.host_memory_bytes)}. Use more "
            "hosts, or offload to NVMe (--nvme-path)."
        )
    return (
        f"Nothing fits at micro-batch 1: {least.name} needs {bytes_in_words(least.least_bytes)} per device, and "
        f"{bytes_in_words(limit)} can be used. Use more or larger GPUs, a shorter sequence, or a smaller model."
    )


def _checkpointing(plan: Plan) -> str | None:
    """Advise activation checkpointing before any offload or ZeRO 3."""
    if plan.recomputes:
        return None
    needed = next((row for row in plan.rows if row.structure == Structure(stage=2)), None)
    if needed is None or not _short_of_memory(needed):
        return None
    share = needed.parts.get("activations", 0) / max(1, needed.device_bytes)
    if share < (_MUCH_OF_PEAK if needed.largest else _SOME_OF_PEAK):
        return None
    return (
        f"Activations take {share:.0%} of the peak of ZeRO 2: turn on activation checkpointing "
        "(model.gradient_checkpointing_enable()) before offloading anything; it costs about a third more computation."
    )


def _short_of_memory(row: PlannedRow) -> bool:
    """Return whether the row does not fit, or a larger micro-batch would make it clearly faster."""
    return row.predicted is None or row.predicted.shares["memory"] > _MUCH_OF_STEP


def _offload_is_dear(plan: Plan) -> str | None:
    """Advise against an offload that is not needed."""
    fitting = plan.fitting
    own = (ds_config.zero_section(plan.subject.config).get("offload_optimizer") or {}) if fitting else {}
    if not isinstance(own, dict) or own.get("device", "none") == "none" or fitting[0].structure.offloads:
        return None
    return (
        f"Your config offloads the optimizer, but {fitting[0].name} fits without: "
        "offload costs its copies and the host's arithmetic in every step."
    )


def _overlap(plan: Plan) -> str | None:
    """Advise overlap_comm against communication time, or smaller buckets against its memory."""
    low = [row for row in plan.fitting if row.structure.stage in (1, 2)]
    best = low[0] if low and plan.subject.hardware.world_size > 1 else None
    if best is None or best.predicted is None:
        return None
    zero = best.config.get("zero_optimization", {})
    bucket = int(zero.get("reduce_bucket_size") or 5e8)
    extra = bucket * plan.subject.profile.param_bytes
    share = extra / plan.subject.hardware.device_memory_bytes
    if zero.get("overlap_comm"):
        if share < _MUCH_OF_DEVICE:
            return None
        return (
            f"overlap_comm holds a second reduce bucket: {bytes_in_words(extra)} with reduce_bucket_size {bucket:.0e}. "
            f"Lower reduce_bucket_size to {bucket / 5:.0e} where memory is short."
        )
    if best.predicted.shares["link"] < _MUCH_OF_STEP:
        return None
    return (
        f"{best.predicted.shares['link']:.0%} of a step of {best.name} is predicted to go into communication: turn on "
        f"overlap_comm, which hides part of it for a second reduce bucket ({bytes_in_words(extra)})."
    )


def _buckets(plan: Plan) -> str | None:
    """Advise smaller reduce buckets on a small device."""
    rows = [row for row in plan.rows if row.parts.get("reduce_buckets")]
    if not rows:
        return None
    row = max(rows, key=lambda one: one.parts["reduce_buckets"])
    taken, device = row.parts["reduce_buckets"], plan.subject.hardware.device_memory_bytes
    if taken / device < _MUCH_OF_DEVICE:
        return None
    bucket = int(row.config.get("zero_optimization", {}).get("reduce_bucket_size") or 5e8)
    smaller = max(1, min(bucket // 2, int(0.02 * device / plan.subject.profile.param_bytes)))
    return (
        f"The reduce buckets take {bytes_in_words(taken)}, {taken / device:.0%} of the device's memory "
        f"({row.name}, reduce_bucket_size {bucket:.0e}): about {smaller:.0e} leaves room for samples."
    )


def _persistence(plan: Plan) -> str | None:
    """Advise keeping parameters whole at ZeRO 3, as ZeRO 2 does, if they fit."""
    fitting = plan.fitting
    best = fitting[0] if fitting else None
    if best is None or best.predicted is None or best.structure.stage != 3:
        return None
    if best.structure.offload_param != "none" or best.predicted.shares["link"] < _MUCH_OF_STEP:
        return None
    profile = plan.subject.profile
    whole = profile.params * profile.param_bytes
    room = plan.subject.usable_bytes - best.least_bytes
    if whole > room:
        return None
    return (
        f"{best.predicted.shares['link']:.0%} of a step goes into gathering parameters. There is room to keep them "
        f"whole ({bytes_in_words(whole)}): stage3_param_persistence_threshold above the largest parameter "
        f"({profile.largest_layer_params:.1e} elements) makes ZeRO 3 behave like ZeRO 2."
    )


def _round_robin(plan: Plan) -> str | None:
    """Advise round_robin_gradients for ZeRO 1 and 2 with offload, which copy gradients rank by rank."""
    fitting = plan.fitting
    if not fitting or fitting[0].structure.stage not in (1, 2) or not fitting[0].structure.offloads:
        return None
    zero = fitting[0].config.get("zero_optimization", {})
    steps = int(fitting[0].config.get(ds_config.GRADIENT_ACCUMULATION) or 1)
    if zero.get("round_robin_gradients") or plan.subject.hardware.world_size == 1 or steps == 1:
        return None
    return (
        "round_robin_gradients: true copies gradients to the host in parallel over ranks, in each of the "
        f"{steps} accumulation steps."
    )


def _sub_group(plan: Plan) -> str | None:
    """Advise a smaller sub_group_size if ZeRO 3 does not fit because of the optimizer step."""
    short = [row for row in plan.rows if row.structure.stage == 3 and not row.largest and row.too_small == "device"]
    if not short or "fp32_gradients" not in short[0].parts:
        return None
    return (
        f"{short[0].name} peaks in the optimizer step, with {bytes_in_words(short[0].parts['fp32_gradients'])} of fp32 "
        "gradients: a smaller sub_group_size updates fewer parameters at a time."
    )


def _precision(plan: Plan) -> str | None:
    """Advise half precision, bf16 if the hardware has it."""
    config = ds_config.effective(plan.subject.config)
    half = [key for key in ("bf16", "fp16") if (config.get(key) or {}).get("enabled") is True]
    if not half and plan.subject.profile.param_bytes == 4 and plan.subject.hardware.device != "cpu":
        wanted = "fp16" if plan.bf16_hardware is False else "bf16"
        return f"The model is trained in fp32: {wanted} halves what parameters and activations take, and is faster."
    if half == ["bf16"] and plan.bf16_hardware is False:
        return "This GPU has no bf16 tensor cores (they came with Ampere): use fp16."
    return None


def _divisible(plan: Plan) -> str | None:
    if plan.hidden is None or plan.hidden % 16 == 0:
        return None
    return f"The hidden size {plan.hidden} is no multiple of 16: tensor cores are slower on such matrices."


_RULES: tuple[Callable[[Plan], str | None], ...] = (
    _start,
    _checkpointing,
    _offload_is_dear,
    _overlap,
    _buckets,
    _persistence,
    _round_robin,
    _sub_group,
    _precision,
    _divisible,
)
