"""Advice of the DeepSpeed configuration guide that applies to a model on a machine.

The first piece of advice names the structure to start with. The guide has a fixed order (ZeRO 0, 1, 2, 2 with offload,
3, 3 with offloads); here the structures that fit are ordered by predicted speed. Settings that a search measures,
such as ``overlap_comm`` and the buckets, get no advice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from optuna_dsat.config import ds_config
from optuna_dsat.config.structures import Structure
from optuna_dsat.plan.rows import CLOSE, Plan, PlannedRow
from optuna_dsat.study.profile.host import host_memory_in_words
from optuna_dsat.words import bytes_in_words, count_in_words

_MUCH_OF_STEP = 0.1
"""Minimum gain of a larger micro-batch, as a share of the step time, for advice on memory."""
_MUCH_OF_PEAK = 0.4
"""Minimum share of activations in the peak for advice on checkpointing if ZeRO 2 fits ..."""
_SOME_OF_PEAK = 0.05
"""... and if ZeRO 2 does not fit."""


def advise(plan: Plan) -> dict[str, str]:
    """Return the pieces of advice that apply: name of the rule -> text, most important first."""
    result = {name: text(plan) for name, (text, of_gpus) in _RULES.items() if _on_gpus(plan) or not of_gpus}
    return {name: text for name, text in result.items() if text is not None}


def _on_gpus(plan: Plan) -> bool:
    return plan.subject.hardware.device != "cpu"


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


def _precision(plan: Plan) -> str | None:
    """Advise half precision, bf16 if the hardware has it."""
    precision = ds_config.precision_of(ds_config.effective(plan.subject.config))
    if precision == "fp32" and plan.subject.profile.param_bytes == 4:
        wanted = "fp16" if plan.bf16_hardware is False else "bf16"
        return f"The model is trained in fp32: {wanted} halves what parameters and activations take, and is faster."
    if precision == "bf16" and plan.bf16_hardware is False:
        return "This GPU has no bf16 tensor cores (they came with Ampere): use fp16."
    return None


_RULES: Mapping[str, tuple[Callable[[Plan], str | None], bool]] = {
    "start": (_start, False),
    "host_memory": (_host_memory, True),
    "checkpointing": (_checkpointing, False),
    "offload": (_offload_is_dear, True),
    "precision": (_precision, True),
}
"""Advice -> its text (None if it does not apply to the model), and whether it applies to GPUs only."""
