"""Facts of a study shared by its pages and notes: outcomes, memory of each structure, time of a whole training."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from optuna.trial import FrozenTrial

from optuna_dsat.config import ds_config
from optuna_dsat.config.structures import STRUCTURES, Structure
from optuna_dsat.cost import memory
from optuna_dsat.outcome import Outcome
from optuna_dsat.report.view import StudyView
from optuna_dsat.secrecy.references import shell_join, without_secrets
from optuna_dsat.store import StoredLaunch
from optuna_dsat.study.command import BEST_CONFIG
from optuna_dsat.study.end_reason import EndReason
from optuna_dsat.study.result import StudyResult
from optuna_dsat.study.space import epoch_samples, hardware_of
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.trials import attributes
from optuna_dsat.trials.lineage import MICRO_BATCH, Feasibility, feasibility
from optuna_dsat.words import (
    bytes_in_words,
    date_in_words,
    model_in_words,
    outcomes_in_words,
    slot_name,
    things_in_words,
)

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
        "The script ended before the last profile step: its data is too small for steps of this batch.",
        "Nothing, if such batches are not wanted: smaller ones are tried. Else give the script more data.",
    ),
    Outcome.INVALID_CONFIG: (
        "DeepSpeed refused the configuration, or the script did not follow it.",
        "Read the message below. If the script sets a value itself, hold that knob with --no-tune.",
    ),
    Outcome.SCRIPT_ERROR: (
        "The script raised an error, or exited without training.",
        "Read the error below and the log of the rank that it names; run the script alone with this config.",
    ),
    Outcome.COMMUNICATION_ERROR: (
        "The ranks lost contact, and no rank reported a cause.",
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
    Outcome.LOST: ("Its worker died, or the search was stopped.", "Nothing: any worker, or resume, runs a copy."),
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


def slot_seconds(launches: Sequence[StoredLaunch]) -> float:
    """Return the time that launches took, summed over their slots."""
    return sum(row.report.held_s * len(row.report.devices) for row in launches)


def advice_on(result: StudyResult) -> list[str]:
    """Return advice for the use of a result: changed numbers, changes of the script, learning rate."""
    texts = (result.numbers, result.rejected, result.model_change, result.learning_rate_advice, result.advice)
    return list(filter(None, texts))


def outcome_counts(view: StudyView) -> list[tuple[Outcome, int]]:
    """Return (outcome, number of trials), most frequent first."""
    result = Counter(t.user_attrs[attributes.OUTCOME] for t in view.trials if attributes.OUTCOME in t.user_attrs)
    return [(Outcome(name), count) for name, count in result.most_common()]


def fruitless_in_words(view: StudyView) -> str:
    """Describe the outcomes of a search that measured nothing."""
    ended = outcomes_in_words({outcome.value: count for outcome, count in outcome_counts(view)})
    return f"nothing could be measured: {ended}"


def cli_command(view: StudyView, name: str, *arguments: object) -> str:
    """Return a command line of optuna-dsat for the study; ``name`` is the command, such as ``resume``."""
    return shlex.join(["optuna-dsat", name, view.spec.name, "--storage", view.storage_url, *map(str, arguments)])


def tuned(view: StudyView) -> Iterator[tuple[str, str]]:
    """Yield name and value of the settings and the environment of a study."""
    spec, metric = view.spec, view.metric
    if metric != spec.metric:
        metric += f" (FLOPs could not be counted, so not {spec.metric}; both rank alike)"
    yield "Script", script_command_line(view)
    yield "Method", spec.method
    yield "Metric", f"{metric}, {'larger' if view.maximize else 'smaller'} is better"
    yield "One launch", f"{ranks_of_a_launch(view)}; steps {spec.start_profile_step} to {spec.end_profile_step} count"
    if view.profiled is not None:
        profile = view.profiled.profile
        yield "Model", model_in_words(profile.params, pipeline=view.profiled.pipeline)
        yield "Device", f"{profile.device_name or view.profiled.device}, {bytes_in_words(profile.device_memory_bytes)}"
    yield "Started", date_in_words(view.record.created_at)
    yield "Versions", ", ".join(f"{name} {version}" for name, version in sorted(view.record.versions.items()))


def next_steps(view: StudyView) -> Iterator[tuple[str, str]]:
    """Yield purpose and command of each step that may follow."""
    reason = view.end_reason
    if reason == EndReason.EXHAUSTED and view.spec.method == "guided" and view.spec.options.min_gain > 0:
        yield "Continue the search, for any gain", cli_command(view, "resume", "--min-gain", 0)
    elif reason in (EndReason.EXHAUSTED, EndReason.EARLY_STOPPING):
        pass  # it would end at once
    elif view.is_fruitless or (view.result is not None and reason is not None):
        more = ("--max-trials", 2 * view.spec.max_trials)
        yield "Continue the search, with more trials", cli_command(view, "resume", *more)
    else:
        yield "Continue the search", cli_command(view, "resume")
    if view.result is not None:
        yield "Write the best config to a file", cli_command(view, "best", "-o", BEST_CONFIG)
    yield "All trials as a table", cli_command(view, "export", "--format", "csv")
    yield "Make this report again", cli_command(view, "report")


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """Predicted and observed memory of a structure with the user's other settings."""

    words: str
    """Description of the structure."""
    device_bytes: int
    """Peak of a rank at micro-batch 1, by the formulas, without correction by launches."""
    host_bytes: int
    """Memory of a host at micro-batch 1, likewise."""
    ran: int | None
    """Largest micro-batch that ran, or None."""
    too_large: int | None
    """Smallest micro-batch that ran out of memory, or None."""


def memory_table(view: StudyView) -> tuple[MemoryRow, ...]:
    """Return a row for each structure at the study's ZeRO stages; empty before the end of the profile launch."""
    if view.profiled is None:
        return ()
    tried, base = _tried(view.trials), ds_config.effective(view.spec.ds_config)
    profile, hardware = view.profiled.profile, hardware_of(view.spec, view.profiled)
    swap_settings = memory.swap_settings(profile, base, hardware)
    rows = []
    for structure in _structures(view.spec):
        fits, too_large = tried.get(structure, ([], []))
        zero = structure.zero_section(nvme_path=view.spec.nvme_folder, swap_settings=swap_settings)
        config = ds_config.merge(base, {ds_config.ZERO: zero})
        predicted = memory.estimate(profile, config, micro_batch=1, hardware=hardware)
        rows.append(
            MemoryRow(
                words=structure.words,
                device_bytes=predicted.device_bytes,
                host_bytes=predicted.host_bytes,
                ran=max(fits, default=None),
                too_large=min(too_large, default=None),
            )
        )
    return tuple(rows)


def _structures(spec: StudySpec) -> Iterator[Structure]:
    """Yield the structures of the study's stages; at ZeRO 3, as DeepSpeed has it, NVMe offload follows."""
    for stage in sorted(set(spec.stages)):
        of_stage = [structure for structure in STRUCTURES if structure.stage == stage]
        yield from of_stage
        if stage == 3 and spec.nvme_path is not None:
            yield from (structure.on_nvme() for structure in of_stage if structure.offloads)


def _tried(trials: Sequence[FrozenTrial]) -> Mapping[Structure, tuple[list[int], list[int]]]:
    """Return structure -> (micro-batches that fitted, micro-batches that ran out of memory)."""
    result: dict[Structure, tuple[list[int], list[int]]] = {}
    for trial in trials:
        config = trial.user_attrs.get(attributes.CONFIG)
        if config is None:
            continue
        fits, too_large = result.setdefault(Structure.of(config), ([], []))
        shown = feasibility(trial)
        if shown is Feasibility.FITS:
            fits.append(int(config[MICRO_BATCH]))
        elif shown is Feasibility.TOO_LARGE:
            too_large.append(int(config[MICRO_BATCH]))
    return result


@dataclass(frozen=True, kw_only=True)
class Training:
    """A whole training as described by the user."""

    epochs: float = 1.0
    price_per_gpu_hour: float | None = None
    """In any currency; None if not given."""
    dataset_size: int | None = None
    """Samples of the training data; None for the study's number."""


@dataclass(frozen=True, kw_only=True)
class TrainingTime:
    """Time of a whole training with the user's own config and with the result."""

    samples: int
    """Samples of the training data."""
    epochs: float
    slots: int
    """Devices of the training."""
    own_s: float | None
    """None if the user's config was not measured."""
    best_s: float
    price_per_gpu_hour: float | None

    @property
    def saved_slot_hours(self) -> float:
        """Device hours saved by the result, over all devices; 0 without a measurement of the user's own config."""
        return 0.0 if self.own_s is None else (self.own_s - self.best_s) * self.slots / 3600

    @property
    def price(self) -> float | None:
        """Cost of the training with the result; None without a price."""
        hours = self.best_s * self.slots / 3600
        return None if self.price_per_gpu_hour is None else hours * self.price_per_gpu_hour

    @property
    def saved_price(self) -> float | None:
        """Price of the saved device hours; None without a price per hour."""
        return None if self.price_per_gpu_hour is None else self.saved_slot_hours * self.price_per_gpu_hour


def training_times(view: StudyView, training: Training) -> TrainingTime | None:
    """Return the time of a training on as many samples with both configs; None if these or the speed are unknown."""
    samples = training.dataset_size or epoch_samples(view.spec, view.profiled)
    user, best = (None if item is None else item.samples_per_s for item in (view.baseline, view.best))
    if samples is None or not best:
        return None
    total = samples * training.epochs
    return TrainingTime(
        samples=samples,
        epochs=training.epochs,
        slots=view.spec.slots_per_trial,
        own_s=total / user if user else None,
        best_s=total / best,
        price_per_gpu_hour=training.price_per_gpu_hour,
    )
