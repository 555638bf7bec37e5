"""Facts of a study shared by its notes and its HTML report."""

from __future__ import annotations

import shlex
from collections import Counter

from optuna_dsat.outcome import Outcome
from optuna_dsat.report.view import StudyView
from optuna_dsat.secrecy.command import without_secrets
from optuna_dsat.secrecy.references import shell_join
from optuna_dsat.study.result import StudyResult
from optuna_dsat.trials import attributes
from optuna_dsat.words import bytes_in_words, outcomes_in_words, slot_name, things_in_words

__all__ = [
    "advice_on",
    "cli_command",
    "fruitless_in_words",
    "outcome_counts",
    "ranks_of_a_launch",
    "script_command_line",
    "training_command_line",
    "versions",
]


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


def training_command_line(result: StudyResult) -> str:
    """Return the command that trains with a result, without secrets."""
    return shell_join(without_secrets(shlex.split(result.command)))


def advice_on(result: StudyResult) -> list[str]:
    """Return advice for the use of a result: learning rate, changes of the script."""
    return list(filter(None, (result.learning_rate_advice, result.advice)))


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
