"""Prints results and planned searches on stdout; progress is shown by ``display``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from optuna_dsat.escape.terminal import cell, say
from optuna_dsat.study.result import TuneResult
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.study.verdict_words import verdict_in_words

if TYPE_CHECKING:
    from optuna_dsat.tuning.gpu_counts import AtGpus

__all__ = ["show_by_gpus", "show_preview", "show_result"]


def show_result(result: TuneResult, *, as_json: bool) -> None:
    """Print a result as text or as one JSON object."""
    if as_json:
        print(json.dumps(asdict(result), indent=2))
        return
    ended = ", ".join(f"{count} {outcome}" for outcome, count in sorted(result.launches.items()))
    say(f"The search ended: {result.reason}. Launches: {ended}; {result.slot_minutes:.1f} GPU (or rank) minutes.")
    for line in verdict_in_words(result.verdict, metric=result.metric):
        say(line)
    if result.measurement:
        say(result.measurement)
    if result.learning_rate_advice is not None:
        say(result.learning_rate_advice)
    if result.loss_check is not None:
        say(result.loss_check["message"])
    print(json.dumps(dict(result.config), indent=2))
    say(f"Written to {result.config_path}")
    say(f"Metrics in {result.metrics_path}")
    if result.command_names_config:
        say("Train with it:")
    else:
        say(f"Train with it, once your script reads {result.config_path}:")
    say(f"  {result.command}")
    if result.advice:
        say(result.advice)


def show_by_gpus(found: Sequence[AtGpus], *, best: TuneResult) -> None:
    """Print a table of what the searches at several numbers of GPUs found, and the command of the best."""
    table = Table(title="By number of GPUs")
    for heading in ("GPUs", "samples/s in all", "samples/s per GPU", "times your own config", "study"):
        table.add_column(heading, justify="left" if heading == "study" else "right")
    for one in found:
        speed_up = None if one.result is None else one.result.speed_up
        numbers = (one.samples_per_s, one.samples_per_s_per_gpu, speed_up)
        row = (one.gpus, *("-" if number is None else f"{number:.4g}" for number in numbers), one.study)
        table.add_row(*map(cell, row))
    Console(highlight=False).print(table)
    say(f"Most samples/s in all: {best.study}. Train with it:\n  {best.command}")


def show_preview(spec: StudySpec) -> None:
    """Print the space, the profile launch and sample configurations of a study that is not started."""
    from optuna_dsat.tuning.preview import preview
    from optuna_dsat.words import config_in_words

    found = preview(spec)
    console = Console(highlight=False)
    table = Table(title="Search space (bucket sizes are capped by the model's size after the profile launch)")
    for heading in ("knob", "", "where it applies", "choices"):
        table.add_column(heading, overflow="fold")
    for row in found.space.describe():
        choices = ", ".join(str(choice) for choice in row.choices)
        table.add_row(*map(cell, (row.knob, row.role, row.where, choices)))
    console.print(table)
    say(f"{found.space.classes()} classes of configurations beside the micro-batch.")
    first, *rest = found.profile_attempts
    say(
        f"Profile launch: {spec.slots_per_trial} {'GPUs' if spec.device == 'cuda' else 'CPU ranks'}, "
        f"micro-batch {found.profile_micro_batch}, "
        f"{first}; while memory is short: {', then '.join(rest) or 'nothing else'}."
    )
    say(f"Your own config: {config_in_words(found.user_config)}")
    say("Configurations such as these follow, their micro-batch bounded by memory:")
    for sample in found.samples:
        console.print_json(json.dumps(sample["zero_optimization"]))
