"""Facts of a study shared by its notes and its HTML report."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping

from optuna_dsat.outcome import Outcome
from optuna_dsat.report.view import StudyView
from optuna_dsat.secrecy.references import shell_join, without_secrets
from optuna_dsat.study.result import StudyResult
from optuna_dsat.trials import attributes
from optuna_dsat.words import bytes_in_words, outcomes_in_words, slot_name, things_in_words

MEANING: Mapping[Outcome, tuple[str, str]] = {
    Outcome.MEASURED: ("All profile steps ran; the metric is the trial's value.", ""),
    Outcome.OUT_OF_MEMORY: (
        "The device had too little memory.",
        "Nothing: the search now knows that this micro-batch is too large for these settings.",
    ),
    Outcome.HOST_OUT_OF_MEMORY: (
        "The host had too little memory.",
        "Nothing, if offload is not wanted. Else free host memory, or run fewer launches at once with --max-slots.",
    ),
    Outcome.OUT_OF_DATA: (
        "The script ended by itself before the last profile step: its data is too small for steps of this batch.",
        "Nothing, if such batches are not wanted: smaller ones are tried. Else give the script more data.",
    ),
    Outcome.INVALID_CONFIG: (
        "DeepSpeed refused the configuration, or the script did not follow it.",
        "Read the message below. If the script sets a value itself, hold that knob with --no-tune.",
    ),
    Outcome.SCRIPT_ERROR: (
        "The script raised an error of its own, or left without training.",
        "Read the error below and the log of the rank that it names; run the script alone with this config.",
    ),
    Outcome.COMMUNICATION_ERROR: (
        "The ranks lost each other, and no rank had a cause of its own.",
        "Look at the network and the driver if it comes back; NCCL_DEBUG=INFO makes the logs say more.",
    ),
    Outcome.STALLED: (
        "No rank was heard from for longer than --stall-timeout allows, or all stood still for many steps.",
        "Look at logs/rank*.stacks.log for what every rank waits for; a rank that waits alone points to a deadlock.",
    ),
    Outcome.TIMEOUT: (
        "The launch took longer than --trial-timeout allows.",
        "Allow more time if slow configurations are of interest; else nothing.",
    ),
    Outcome.KILLED: (
        "A process of the launch was ended by a signal that neither the search nor the kernel's OOM killer had sent.",
        "Nothing: it was launched again. If it comes back, look for what ends processes here, such as a batch system.",
    ),
    Outcome.PRUNED: ("The launch was stopped: it could not be among the best.", ""),
    Outcome.LOST: ("Its worker died, or the search was stopped.", "Nothing: a copy is run by whoever continues."),
}
"""Outcome -> explanation, and advice if available."""


def script_command_line(view: StudyView) -> str:
    """Return the script with its arguments, without secrets."""
    script = view.spec.script
    target = ("-m", script.script) if script.is_module else (script.script,)
    return shell_join(without_secrets((*target, *script.args)))


def ranks_of_a_launch(view: StudyView) -> str:
    """Return the slots of a launch, such as ``8 GPUs``, ``1 GPU`` or ``2 CPU ranks, 1.00 GiB each``."""
    spec = view.spec
    slots, each = spec.slots_per_trial, " each" * (spec.slots_per_trial > 1)
    limit = f", {bytes_in_words(spec.device_memory_bytes)}{each}" if spec.device_memory_bytes else ""
    return f"{things_in_words(slots, slot_name(spec.device))}{limit}"


def advice_on(result: StudyResult) -> list[str]:
    """Return advice for the use of a result: changed numbers, changes of the script, learning rate."""
    texts = (result.numbers, result.rejected, result.model_change, result.learning_rate_advice, result.advice)
    return list(filter(None, texts))


def versions(view: StudyView) -> str:
    """Return the library versions with which the study was created."""
    return ", ".join(f"{name} {version}" for name, version in sorted(view.record.versions.items()))


def outcome_counts(view: StudyView) -> list[tuple[Outcome, int]]:
    """Return (outcome, number of trials), most frequent first."""
    result = Counter(t.user_attrs[attributes.OUTCOME] for t in view.trials if attributes.OUTCOME in t.user_attrs)
    return [(Outcome(name), count) for name, count in result.most_common()]


def fruitless_in_words(view: StudyView) -> str:
    """Describe the outcomes of a search that measured nothing."""
    ended = outcomes_in_words({outcome.value: count for outcome, count in outcome_counts(view)})
    return f"nothing could be measured: {ended}"


def cli_command(view: StudyView, name: str, *arguments: object) -> str:
    """Return a command line of optuna-dsat for the study.

    ``name`` is the command, such as ``resume``.
    """
    return shlex.join(["optuna-dsat", name, view.spec.name, "--storage", view.storage_url, *map(str, arguments)])
