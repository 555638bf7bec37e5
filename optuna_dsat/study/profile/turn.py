"""The profile of a running study: found in the store, or measured by one worker at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from optuna_dsat.config.ds_config import MICRO_BATCH
from optuna_dsat.config.knobs import CHECKPOINT_EVERY, LEAF_MODULE
from optuna_dsat.config.op_builders import operators_at_start
from optuna_dsat.config.user_file import misspelt_in_words
from optuna_dsat.launch.measurement import LaunchRecord
from optuna_dsat.launch.protocol import LaunchReport
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.agent.operators import is_built
from optuna_dsat.runtime.agent.preload import Preload
from optuna_dsat.runtime.events import EngineReady
from optuna_dsat.runtime.overlay import growing_samples
from optuna_dsat.store import Turn, TurnLostError
from optuna_dsat.study.confirm.loss_check import check_loss
from optuna_dsat.study.context import StudyContext
from optuna_dsat.study.profile.host import measured_nvme, saving_in_words
from optuna_dsat.study.profile.profile import measure_profile, own_batch
from optuna_dsat.study.profile.profiled import Profiled
from optuna_dsat.study.profile.script import own_train_batch_size, user_config
from optuna_dsat.study.progress import ProfileFinished, ProfileStarted
from optuna_dsat.study.space import (
    dataset_size,
    is_memory_bound,
    largest_global_batch,
    largest_micro_batches,
    micro_batch_cap,
    objective,
    routes_samples,
    searches_checkpointing,
)
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.study.stored import attributes_of, has_trials
from optuna_dsat.trials import attributes
from optuna_dsat.words import count_in_words, differences_in_words, things_in_words

_COMPARED = "+zero"
"""Suffix of a profile's fingerprint if losses with and without ZeRO were compared: its search space may be larger, so
that studies without this comparison keep another profile."""
_COMPARED_STEPS = 20
"""Steps of this comparison: differences between optimizers accumulate."""
_WAIT_S = 1.0
"""Pause between two looks for a profile that another worker measures, in seconds."""


class ProfileTurn:
    """Finds or measures the profile of a study."""

    def __init__(self, context: StudyContext, *, fingerprint: str, reuse: bool, compare_zero: bool = False) -> None:
        self._context = context
        self._spec = context.spec
        self._store = context.store
        self._reuse = reuse
        self._compare_zero = compare_zero
        self._differences_said = False
        self._samples_said = False
        self.fingerprint = fingerprint
        """Key of the profile in use: from an earlier run if the study continues with its profile."""

    def run(self) -> Profiled:
        """Return the stored profile of the same script, config and hardware, or measure a new profile; announce it."""
        profiled, reused = self._find_or_measure()
        largest = {
            structure.stage: size
            for structure, size in largest_micro_batches(profiled.followed_by(self._spec), profiled).items()
            if not structure.offloads
        }
        self._context.observer(
            ProfileFinished(
                profile=profiled.profile,
                measured_with=profiled.measured_with,
                reused=reused,
                pipeline=profiled.pipeline,
                largest_micro_batches=largest,
            )
        )
        if profiled.only_zero_3:
            self._context.say(
                "The script builds its model within deepspeed.zero.Init, which is for ZeRO 3: only ZeRO 3 is searched. "
                "Enter zero.Init at ZeRO 3 only (enabled=...) to have the other stages searched, too."
            )
        elif profiled.profile.needs_zero and 0 in self._spec.stages:
            self._context.say(
                "The script calls loss.backward() itself, which DeepSpeed refuses at ZeRO 0: ZeRO 0 is not searched. "
                "Call engine.backward(loss) to have it searched, too."
            )
        if (multiple := profiled.micro_batch_multiple) > 1:
            self._context.say(
                f"The script accepts batches of whole groups only: micro-batches that are multiples of {multiple} are "
                f"searched, as by --divisible-by {multiple}."
            )
        if profiled.holds_accumulation:
            self._context.say(
                "The script accumulates gradients, or divides its batch, by its own number instead of the engine's: "
                "every trial keeps your gradient_accumulation_steps."
            )
        if growing := growing_samples(profiled.followed_by(self._spec).ds_config):
            self._context.say(
                f"Samples grow during training: trials start at the last length, by {', '.join(growing)} set to the "
                "maximum."
            )
        self._context.say(self._optimizer_in_words(profiled))
        self._context.say(_checkpointing_in_words(profiled.followed_by(self._spec), profiled))
        if LEAF_MODULE not in self._spec.kept_knobs and routes_samples(self._spec, profiled):
            self._context.say(
                f"{' and '.join(profiled.profile.leaf_classes)} routes samples among its parts: at ZeRO 3 it is "
                f"gathered as a whole ({LEAF_MODULE}), or ranks would gather different parts at the same time."
            )
        self._context.say(saving_in_words(self._spec, profiled))
        self._context.say(_data_in_words(profiled.followed_by(self._spec), profiled))
        if objective(self._spec, profiled) != self._spec.metric:
            self._context.say(
                "FLOPs could not be counted for this model: throughput is optimised instead, "
                "which ranks configurations in the same order."
            )
        return profiled

    def _find_or_measure(self) -> tuple[Profiled, bool]:
        """Return the profile and whether it was stored; if another worker measures it, wait for that."""
        waiting = False
        while True:
            with self._store.profile_turn(self._context.study_uuid) as turn:
                stored = self._stored() if self._reuse or waiting else None
                profiled = None if stored is None else Profiled.if_readable(stored)
                if profiled is not None and not (self._is_to_compare(profiled) or self._is_to_time(profiled)):
                    return profiled, True
                if turn is not None:
                    reused = profiled is not None
                    if stored is not None and not reused:
                        self._context.say("The stored profile cannot be read and is measured again.")
                    try:
                        profiled = profiled or self._measure(turn)
                        if self._is_to_compare(profiled):
                            profiled = self._with_comparison(profiled, turn)
                        if self._is_to_time(profiled):
                            profiled = self._with_nvme_speed(profiled, turn)
                        return profiled, reused
                    except TurnLostError:
                        waiting = True
                        self._context.say("Another worker took the profile over while this one stood still.")
            if not waiting:
                waiting = True
                self._context.say("Another worker measures the profile; waiting for it.")
            time.sleep(_WAIT_S)

    def _stored(self) -> Mapping[str, Any] | None:
        """Return the profile with which the study's trials were planned; without trials, its fingerprint's profile."""
        previous = attributes_of(self._store, self._spec.name).get(attributes.FINGERPRINT)
        compared = self.fingerprint + _COMPARED
        if previous == compared or self._compare_zero:
            stored = self._store.find_profile(compared)
            if stored is not None:
                self.fingerprint = compared
                return stored
        if previous is not None and previous != self.fingerprint and has_trials(self._store, self._spec.name):
            stored = self._store.find_profile(previous)
            if stored is not None:
                self._context.say(
                    "The script, a file beside it or the hardware has changed since this study was profiled: new "
                    "trials may not compare with earlier ones. It keeps its profile; another --study starts afresh."
                )
                self.fingerprint = previous
                return stored
        return self._store.find_profile(self.fingerprint)

    def _measure(self, turn: Turn) -> Profiled:
        spec = self._spec
        needed = operators_at_start(spec.ds_config, device=spec.device, to_nvme=spec.nvme_folder is not None)
        if missing := [name for name in needed if not is_built(name, os.environ)]:
            self._context.launcher.prepare(Preload(), operators=missing)
        profiled = measure_profile(
            self._spec,
            self._context.launcher,
            on_attempt=lambda attempt: self._context.observer(
                ProfileStarted(words=attempt.words, micro_batch=attempt.micro_batch)
            ),
            on_report=self._attempt_ended,
            on_event=lambda event: self._context.show_phase(event, None),
            wait=self._context.wait,
        )
        return self._saved(profiled, turn)

    def _saved(self, profiled: Profiled, turn: Turn) -> Profiled:
        """Store a profile; return it."""
        with turn.held("store the profile"):
            self._store.save_profile(self.fingerprint, profiled.to_json(), study_uuid=self._context.study_uuid)
        return profiled

    def _is_to_compare(self, profiled: Profiled) -> bool:
        """Return whether losses with and without ZeRO are still to be compared; not once a search space is in use."""
        return (
            self._compare_zero
            and profiled.trains_alike_with_zero is None
            and profiled.zero_is_untested(self._spec)
            and any(self._spec.stages)
            and not has_trials(self._store, self._spec.name)
        )

    def _with_comparison(self, profiled: Profiled, turn: Turn) -> Profiled:
        """Compare the first losses with the least ZeRO stage to the user's; store the profile with the result."""
        spec = profiled.followed_by(self._spec)
        stage = min(stage for stage in self._spec.stages if stage)
        self._context.say(
            f"Comparing the first {_COMPARED_STEPS} losses with and without ZeRO {stage}, as DeepSpeed does not list "
            f"{profiled.profile.optimizer} as tested with ZeRO ..."
        )
        check = check_loss(
            spec,
            {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True},
            data_parallel_size=profiled.data_parallel_size,
            launch=self._context.launch,
            name="zero",
            steps=_COMPARED_STEPS,
        )
        result = check.message
        if check.agrees is False:
            allowed = f"{check.precision} explains {check.tolerance:g}"
            result = f"With ZeRO {stage} the first losses differ by {check.difference:.1e}, and {allowed}."
        self.fingerprint += _COMPARED
        compared = replace(profiled, trains_alike_with_zero=check.agrees is True, zero_comparison=result)
        return self._saved(compared, turn)

    def _is_to_time(self, profiled: Profiled) -> bool:
        """Return whether the speed of the study's folder on NVMe is still to be measured, on this machine."""
        folder = self._spec.nvme_folder
        return folder is not None and self._spec.on == "here" and folder not in profiled.nvme_bytes_per_s

    def _with_nvme_speed(self, profiled: Profiled, turn: Turn) -> Profiled:
        """Measure the speed of the study's folder on NVMe; store the profile with it."""
        folder, speed = self._spec.nvme_folder or "", measured_nvme(self._spec)
        reads, writes = (f"{each / 1e9:.2f} GB/s" for each in (speed.read_bytes_per_s, speed.write_bytes_per_s))
        self._context.say(f"{folder} reads {reads} and writes {writes}.")
        speeds = {**profiled.nvme_bytes_per_s, folder: speed.bytes_per_s}
        return self._saved(replace(profiled, nvme_bytes_per_s=speeds), turn)

    def _optimizer_in_words(self, profiled: Profiled) -> str:
        """Return which stages are searched for an optimizer that DeepSpeed does not list as tested; else empty."""
        name = profiled.profile.optimizer
        if profiled.zero_was_compared(self._spec):
            return f"ZeRO is searched with {name}. With and without ZeRO: {profiled.zero_comparison}"
        if profiled.followed_by(self._spec).stages != (0,) or not profiled.zero_is_untested(self._spec):
            return ""
        remedy = (
            profiled.zero_comparison
            or "With --check-loss, the first losses with and without ZeRO are compared, and ZeRO is searched if they "
            "agree."
        )
        return (
            f"The script's optimizer, {name}, is not among those that DeepSpeed tests with ZeRO, which flattens and "
            "splits the parameters: one that reads their shapes trains differently then. Only ZeRO 0 is searched. "
            f'{remedy} If yours reads no shapes, add "zero_allow_untested_optimizer": true to the config to have ZeRO '
            "1 to 3 searched, too."
        )

    def _attempt_ended(self, report: LaunchReport, record: LaunchRecord) -> None:
        self._context.record_launch(report, record, purpose="profile")
        if record.engine is not None and record.engine.config_differences and not report.outcome.infeasible:
            self._say_differences(record.engine.config_differences)
        self._differences_said |= report.outcome is Outcome.MEASURED  # later launches change options of the script
        words = "" if record.engine is None else _samples_in_words(self._spec, record, record.engine)
        if words and not self._samples_said:
            self._samples_said = True
            self._context.say(words)

    def _say_differences(self, differences: Mapping[str, Sequence[Any]]) -> None:
        """Report, at most once, that the script passes a config that differs from the file."""
        if self._differences_said:
            return
        self._differences_said = True
        path = self._spec.script.config_path
        words = "The config that the script passes to deepspeed.initialize is the baseline."
        if path:
            words = differences_in_words(differences, file=Path(path).name)
        self._context.say(words)
        passed = [key for key, (value, _) in differences.items() if value is not None]
        for text in misspelt_in_words(passed):
            self._context.say(text)


def _samples_in_words(spec: StudySpec, record: LaunchRecord, engine: EngineReady) -> str:
    """Return a note if the global batch is not what a step trains on; else empty."""
    if engine.counted_times > 1:
        return (
            f"The {things_in_words(engine.counted_times, 'rank')} of a tensor-parallel group train on the same samples "
            f"and DeepSpeed's global batch counts these {engine.counted_times} times: so do samples/s here."
        )
    passes, configured = record.passes_per_micro_batch, engine.gradient_accumulation_steps
    if passes == 1 or passes * configured == own_batch(spec, record).gradient_accumulation_steps:
        return ""
    return (
        f"The script makes {passes * configured} forward passes for each step of the optimizer, and "
        f"gradient_accumulation_steps is {configured}: samples/s count them all, global batches do not. If it "
        "accumulates by itself, let it call engine.step() after every backward and set gradient_accumulation_steps to "
        f"{passes * configured}."
    )


def _checkpointing_in_words(spec: StudySpec, profiled: Profiled) -> str:
    """Return whether activation checkpointing is searched; empty where memory is not short and nobody asks."""
    is_short = is_memory_bound(spec, profiled)
    is_searched = searches_checkpointing(spec, profiled)
    if is_searched and profiled.checkpoints:
        return (
            "Your script checkpoints activations. Trials without checkpointing are searched, too: they save the second "
            f"forward pass and need more memory. --no-tune {CHECKPOINT_EVERY} leaves the model as it is."
        )
    if is_searched:
        return (
            f"Activation checkpointing of the model's {things_in_words(profiled.profile.blocks, 'repeated block')} is "
            f"searched{', as memory is short' * is_short}. --no-tune {CHECKPOINT_EVERY} leaves the model as it is."
        )
    if CHECKPOINT_EVERY in spec.kept_knobs or not is_short:
        return ""
    reason = profiled.profile.no_checkpointing
    return f"Memory is short, and activation checkpointing is not searched: {reason}." if reason else ""


def _data_in_words(spec: StudySpec, profiled: Profiled) -> str:
    """Return how the amount of training data bounds the search; empty if it does not."""
    ranks = profiled.data_parallel_size
    cap, samples = micro_batch_cap(spec, profiled), profiled.samples_per_rank
    own_batch = own_train_batch_size(spec, ranks=ranks)
    bound = largest_global_batch(spec, profiled, user_batch=own_batch) if spec.train_batch_size is None else None
    if bound is not None and bound < own_batch:
        return f"Your config's global batch of {own_batch} is above --max-train-batch-size {bound}: your config is " + (
            "measured to compare with, and is the result if nothing is faster. No other config has this batch."
        )
    if bound is not None and spec.max_train_batch_size is None and bound < cap * ranks:
        which = "that of your config" if bound == own_batch else "a tenth of them"
        have = f"The training data have {things_in_words(dataset_size(spec, profiled) or 0, 'sample')}"
        beyond = f"no global batch beyond {count_in_words(bound)}, {which}, is tried"
        if spec.dataset_size is None and profiled.loads_all and ranks > 1:
            have += ", all of which each rank loads (if it loads a part, --dataset-size gives their number)"
        return f"{have}: {beyond}. --max-train-batch-size sets another bound."
    if samples is None or cap != samples:
        return ""
    user = user_config(spec, data_parallel_size=profiled.data_parallel_size)[0][MICRO_BATCH]
    have = things_in_words(samples, "sample")
    return f"The training data give a rank {have} in an epoch: no larger micro-batch is tried." + (
        f" Your own, {user}, is not reached and cannot be compared with." if user > samples else ""
    )
