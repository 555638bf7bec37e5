"""Advice of the DeepSpeed configuration guide that applies to a model on a machine.

The first piece of advice names the structure to start with. The guide has a fixed order (ZeRO 0, 1, 2, 2 with offload,
3, 3 with offloads); here the structures that fit are ordered by predicted speed. The guide's figure for
``overlap_comm`` (4.5 times the buckets) refers to DeepSpeed 0.8; the advice uses current allocations
(``optuna_dsat.cost.zero_states``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from optuna_dsat.config import ds_config
from optuna_dsat.config.structures import Structure
from optuna_dsat.plan.rows import CLOSE, Plan, PlannedRow
from optuna_dsat.study.profile.host import host_memory_in_words
from optuna_dsat.words import bytes_in_words, count_in_words, setting_in_words

_MUCH_OF_DEVICE = 0.08
"""Minimum share of the device's memory in buffers for advice on them."""
_MUCH_OF_STEP = 0.1
"""Minimum share of the step time, or relative difference of throughput, for advice."""
_MUCH_OF_PEAK = 0.4
"""Minimum share of activations in the peak for advice on checkpointing if ZeRO 2 fits ..."""
_SOME_OF_PEAK = 0.05
"""... and if ZeRO 2 does not fit."""


def advise(plan: Plan) -> list[str]:
    """Return the pieces of advice that apply, most important first."""
    return list(advise_by_rule(plan).values())


def advise_by_rule(plan: Plan) -> dict[str, str]:
    """Return the pieces of advice that apply: name of the rule -> text, most important first."""
    result = {name: text(plan) for name, (text, applies) in _RULES.items() if applies(plan)}
    return {name: text for name, text in result.items() if text is not None}


def _always(_: Plan) -> bool:
    return True


def _on_gpus(plan: Plan) -> bool:
    return plan.subject.hardware.device != "cpu"


def _on_several(plan: Plan) -> bool:
    return plan.subject.hardware.world_size > 1


def _round_size(elements: float) -> str:
    """Return a size to try, rounded to a single significant digit."""
    return setting_in_words(float(f"{elements:.0e}"))


def _on_several_gpus(plan: Plan) -> bool:
    return _on_gpus(plan) and _on_several(plan)


def _start(plan: Plan) -> str | None:
    """Advise the simplest structure whose predicted speed is close to the fastest, and name the others."""
    best = plan.recommended
    if best is None:
        return _nothing(plan)
    first = plan.fitting[0]
    least = first.samples_per_s / (1 + CLOSE)
    close = [row.name for row in plan.fitting if row is not best and row.samples_per_s >= least]
    rank = "it is predicted to be the fastest"
    if best is not first:
        rank = f"it is the simplest that is predicted within {CLOSE:.0%} of the fastest"
    text = (
        f"Begin with {best.name} (micro-batch {best.micro_batch}): of what fits, {rank}, "
        f"{count_in_words(best.samples_per_s, digits=3)} samples/s."
    )
    if close:
        of = "that" if best is first else "the fastest"
        text += f" Predicted within {CLOSE:.0%} of {of}: {'; '.join(close)}. Measure these, too."
    return text


def _nothing(plan: Plan) -> str:
    least = min(plan.rows, key=lambda row: row.least_bytes)
    limit, hardware = plan.subject.usable_bytes, plan.subject.hardware
    if least.too_small == "host":
        return (
            f"Nothing fits: {least.name} would leave the device enough, but needs {bytes_in_words(least.host_bytes)} "
            f"of host memory, and there are {bytes_in_words(hardware.host_memory_bytes)}. Use more hosts, or hosts "
            "with more memory."
        )
    if not _on_gpus(plan):
        return (
            f"Nothing fits at micro-batch 1: {least.name} needs {bytes_in_words(least.least_bytes)} for each rank, and "
            f"{bytes_in_words(limit)} can be used. Use a machine with more memory, a shorter sequence, or a smaller "
            "model."
        )
    host = ""
    if "host" in least.too_small:
        needed, there = bytes_in_words(least.host_bytes), bytes_in_words(hardware.host_memory_bytes)
        host = f", and {needed} of host memory, of which there are {there}"
    return (
        f"Nothing fits at micro-batch 1: {least.name} needs {bytes_in_words(least.least_bytes)} per device, and "
        f"{bytes_in_words(limit)} can be used{host}. Use more or larger GPUs, a shorter sequence, or a smaller model."
    )


def _host_memory(plan: Plan) -> str | None:
    """Give the host memory to load the model, of steps and to save it, and warn if there is less."""
    row = plan.recommended or min(plan.rows, key=lambda row: row.least_bytes)
    hardware, peaks = plan.subject.hardware, row.host
    return " ".join(filter(None, host_memory_in_words(row.name, peaks, hardware)))


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
    before = " before offloading anything" if _on_gpus(plan) else ""
    return (
        f"Activations take {share:.0%} of the peak of ZeRO 2: turn on activation checkpointing "
        f"(model.gradient_checkpointing_enable()){before}; it costs about a third more computation."
    )


def _short_of_memory(row: PlannedRow) -> bool:
    """Return whether the row does not fit, or a larger micro-batch would make it clearly faster."""
    return row.predicted is None or row.predicted.shares["memory"] > _MUCH_OF_STEP


def _offload_is_dear(plan: Plan) -> str | None:
    """Advise against an unnecessary offload."""
    best, user = plan.recommended, Structure.of(ds_config.effective(plan.subject.config))
    if best is None or not user.offloads or best.structure.offloads:
        return None
    return (
        f"Your config is {user.words}, but {best.name} fits without offload, whose copies and arithmetic on the host "
        "take time in every step."
    )


def _overlap(plan: Plan) -> str | None:
    """Advise overlap_comm to hide communication time, or smaller buckets to reduce its memory."""
    best = next((row for row in plan.fitting if row.structure.stage in (1, 2)), None)
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
            f"overlap_comm holds a second reduce bucket: {bytes_in_words(extra)} with reduce_bucket_size "
            f"{setting_in_words(bucket)}. Lower reduce_bucket_size to {_round_size(bucket // 5)} where memory is short."
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
    row = max(rows, key=lambda row: row.parts["reduce_buckets"])
    taken, device = row.parts["reduce_buckets"], plan.subject.hardware.device_memory_bytes
    if taken / device < _MUCH_OF_DEVICE:
        return None
    bucket = int(row.config.get("zero_optimization", {}).get("reduce_bucket_size") or 5e8)
    smaller = max(1, min(bucket // 2, int(0.02 * device / plan.subject.profile.param_bytes)))
    whose = "device's" if _on_gpus(plan) else "rank's"
    return (
        f"The reduce buckets take {bytes_in_words(taken)}, {taken / device:.0%} of the {whose} memory "
        f"({row.name}, reduce_bucket_size {setting_in_words(bucket)}): about {_round_size(smaller)} leaves "
        "room for samples."
    )


def _persistence(plan: Plan) -> str | None:
    """Advise keeping parameters unpartitioned at ZeRO 3, as ZeRO 2 does, if they fit."""
    best = plan.recommended
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
        f"({setting_in_words(profile.largest_layer_params)} elements) makes ZeRO 3 behave like ZeRO 2."
    )


def _round_robin(plan: Plan) -> str | None:
    """Advise round_robin_gradients for ZeRO 1 and 2 with offload, which copy gradients rank by rank."""
    best = plan.recommended
    if best is None or best.structure.stage not in (1, 2) or not best.structure.offloads:
        return None
    zero = best.config.get("zero_optimization", {})
    steps = int(best.config.get(ds_config.GRADIENT_ACCUMULATION) or 1)
    if zero.get("round_robin_gradients") or steps == 1:
        return None
    return (
        "round_robin_gradients: true copies gradients to the host in parallel over ranks, in each of the "
        f"{steps} accumulation steps."
    )


def _sub_group(plan: Plan) -> str | None:
    """Advise a smaller sub_group_size if ZeRO 3 does not fit because of the optimizer step."""
    short = [
        row for row in plan.rows if row.structure.stage == 3 and not row.largest and row.too_small.startswith("device")
    ]
    if not short or "fp32_gradients" not in short[0].parts:
        return None
    return (
        f"{short[0].name} peaks in the optimizer step, with {bytes_in_words(short[0].parts['fp32_gradients'])} of fp32 "
        "gradients: a smaller sub_group_size updates fewer parameters at a time."
    )


def _precision(plan: Plan) -> str | None:
    """Advise half precision, bf16 if the hardware has it."""
    precision = ds_config.precision_of(ds_config.effective(plan.subject.config))
    if precision == "fp32" and plan.subject.profile.param_bytes == 4:
        wanted = "fp16" if plan.bf16_hardware is False else "bf16"
        return f"The model is trained in fp32: {wanted} halves what parameters and activations take, and is faster."
    if precision == "bf16" and plan.bf16_hardware is False:
        return "This GPU has no bf16 tensor cores (they came with Ampere): use fp16."
    return None


def _divisible(plan: Plan) -> str | None:
    if plan.hidden is None or plan.hidden % 16 == 0:
        return None
    return f"The hidden size {plan.hidden} is no multiple of 16: tensor cores are slower on such matrices."


_RULES: Mapping[str, tuple[Callable[[Plan], str | None], Callable[[Plan], bool]]] = {
    "start": (_start, _always),
    "host_memory": (_host_memory, _on_gpus),
    "checkpointing": (_checkpointing, _always),
    "offload": (_offload_is_dear, _on_gpus),
    "overlap_comm": (_overlap, _on_several_gpus),  # CPUs have no second stream to overlap on
    "buckets": (_buckets, _always),
    "persistence": (_persistence, _on_several),
    "round_robin": (_round_robin, _on_several_gpus),
    "sub_group": (_sub_group, _always),
    "precision": (_precision, _on_gpus),
    "divisible": (_divisible, _on_gpus),
}
"""Advice -> its text (None if it does not apply to the model), and whether it applies to the machine."""
