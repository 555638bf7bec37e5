"""The profile launch: measures model and hardware at the smallest allowed micro-batch.

The micro-batch is 1 unless the user fixes, lists or bounds it. If the user's config does not fit, structures with
decreasing device memory are tried, in the order of the DeepSpeed configuration guide. An error of the script is
reported with a fix if it supports one.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count
from typing import Any

from optuna_dsat.config import ds_config
from optuna_dsat.config.knobs import CHECKPOINT_EVERY, MODEL, ZENFLOW
from optuna_dsat.config.structures import GUIDE_ORDER, Structure
from optuna_dsat.cost.memory import ModelProfile
from optuna_dsat.errors import DsatError, NothingRunnableError, ScriptFailedError
from optuna_dsat.launch.follow import SlotWait, follow
from optuna_dsat.launch.measurement import LaunchRecord
from optuna_dsat.launch.protocol import Launcher, LaunchReport, LaunchRequest
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.agent.preload import Preload
from optuna_dsat.runtime.events import Event
from optuna_dsat.script.arg_mapping import STAGE
from optuna_dsat.script.batch_rule import BatchRule, global_batch_option, loads_all, samples_per_rank
from optuna_dsat.script.command.interception import OF_LAUNCHERS
from optuna_dsat.script.trainer import ScriptTrainer
from optuna_dsat.study.profile.batch_search import (
    Launch,
    find_accumulation_option,
    find_batch_rule,
    find_stage_option,
    find_trainer,
)
from optuna_dsat.study.profile.failure_hint import OF_SCALARS, failure_hint, missing_variables
from optuna_dsat.study.profile.profiled import Profiled
from optuna_dsat.study.profile.script import check_sizes, follow_script, user_config
from optuna_dsat.study.requests import launch_request
from optuna_dsat.study.space import space_of
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.words import outcome_in_words, things_in_words

_SMALL_BUCKET = 5_000_000
"""Elements. DeepSpeed's default of 5e8 takes gigabytes for any model."""
_NEVER_OF_BATCHES = frozenset(
    {"FileNotFoundError", "ImportError", "ModuleNotFoundError", "NameError", "NotImplementedError", "SyntaxError"}
)
"""Errors that a different batch size cannot fix."""
_DIVISIBLE = re.compile(r"divisible by\D*(\d+)")
"""Error of a script whose global batch consists of groups, such as trl's GRPO, with the size of a group."""
_PROFILE_END_STEP = 2
"""Last step of a profile launch: the first is profiled, the second shows that the optimizer's state fits."""


@dataclass(frozen=True, kw_only=True)
class ProfileAttempt:
    """An attempt of the profile launch: a structure, with buckets that fit any device's memory."""

    structure: Structure | None
    """None for the user's ZeRO settings."""
    micro_batch: int = 1
    accumulation: int = 1
    """Accumulation steps; more than 1 for a script that requires its own number of steps."""
    nvme_path: str | None = None
    checkpoints: bool = False
    """Whether the script's own activation checkpointing, if any, stays on."""

    @property
    def words(self) -> str:
        """The ZeRO settings, and accumulation steps beyond 1, in words."""
        zero = "your own ZeRO settings" if self.structure is None else self.structure.words
        return zero if self.accumulation == 1 else f"{zero} and {self.accumulation} accumulation steps"

    def with_least(self, micro_batch: int, accumulation: int) -> ProfileAttempt:
        """Return the attempt with batch sizes of at least these values."""
        return replace(
            self,
            micro_batch=max(self.micro_batch, micro_batch),
            accumulation=max(self.accumulation, accumulation),
        )

    def overlay(self) -> dict[str, Any]:
        """Return the DeepSpeed settings of this attempt at its micro-batch."""
        batch = ds_config.batch_overlay(self.micro_batch, self.accumulation)
        if not self.checkpoints:
            batch[MODEL] = {CHECKPOINT_EVERY: 0}
        if self.structure is None:
            return batch
        zero = {
            **self.structure.zero_section(nvme_path=self.nvme_path),
            "reduce_bucket_size": _SMALL_BUCKET,
            "stage3_prefetch_bucket_size": _SMALL_BUCKET if self.structure.stage == 3 else None,
        }
        return {**batch, "zero_optimization": zero}


def profile_attempts(spec: StudySpec) -> Iterator[ProfileAttempt]:
    """Yield the attempts of a study in order of decreasing device memory, the user's settings first.

    Structures follow the guide's order at the searched stages; ZeRO 1 only if neither 2 nor 3 is searched. The last
    attempt has the optimizer on NVMe, but no parameters, whose buffers get their size when the model is known.
    """
    smallest = space_of(spec, None).micro_batches[0]
    yield ProfileAttempt(structure=None, micro_batch=smallest)
    least = 2 if any(stage >= 2 for stage in spec.stages) else 1
    zenflow = ds_config.zero_section(spec.ds_config).get(ZENFLOW) is not None
    for structure in GUIDE_ORDER:
        refused = zenflow and (structure.stage == 3 or not structure.offloads)
        if structure.stage in spec.stages and structure.stage >= least and not refused:
            yield ProfileAttempt(structure=structure, micro_batch=smallest)
    if spec.nvme_folder is not None and not zenflow:
        structure = Structure(stage=3, offload_param="cpu", offload_optimizer="nvme")
        yield ProfileAttempt(structure=structure, micro_batch=smallest, nvme_path=spec.nvme_folder)


def measure_profile(
    spec: StudySpec,
    launcher: Launcher,
    *,
    on_attempt: Callable[[ProfileAttempt], None],
    on_report: Callable[[LaunchReport, LaunchRecord], None],
    on_event: Callable[[Event], None] = lambda _: None,
    wait: SlotWait | None = None,
) -> Profiled:
    """Launch the script at the smallest micro-batch; while out of memory, try structures with less device memory.

    A flag of the model by which the script checkpoints its activations is off, so that the search may choose. It stays
    on where the model does not fit without, or has no repeated blocks by which memory can be predicted.

    If training fails for another reason that batch sizes may explain, the user's batch sizes are tried: some scripts
    require their accumulation steps, others cannot train on a single sample. If these fail as well, the script itself
    is at fault. If they work, further launches show whether its micro-batch suffices, which is then the minimum, or its
    accumulation steps. Where its error names a divisor of the batch, multiples of it are searched.

    A script whose batch size is a mapped option may compute its accumulation steps from a global batch. The steps are
    read from a launch at the script's micro-batch.

    Raises:
        DeviceError: If other processes occupy the slots for too long.
        ScriptFailedError: If the script fails for a reason that is not memory.
        NothingRunnableError: If no attempt fits (reports the attempts and the missing memory), or if the dataset is
            smaller than the smallest micro-batch.
    """

    def launch(
        request: LaunchRequest, see: Callable[[Event], None] = lambda _: None
    ) -> tuple[LaunchRecord, LaunchReport]:
        record, report = follow(launcher, request, see, wait=wait)
        on_report(report, record)
        return record, report

    return _Attempts(spec, partial(launch, see=on_event), prove=launch, on_attempt=on_attempt).run()


@dataclass(frozen=True, kw_only=True)
class _Launched:
    """An attempt whose launch ended."""

    attempt: ProfileAttempt
    request: LaunchRequest
    record: LaunchRecord
    report: LaunchReport

    @property
    def is_measured(self) -> bool:
        """Whether it trained, and shows profile and engine."""
        shows = self.record.profile is not None and self.record.engine is not None
        return self.report.outcome is Outcome.MEASURED and shows


class _Attempts:
    """The attempts of a profile, and what their launches have shown of the script so far.

    ``on_attempt`` is called before each attempt, ``launch`` launches it, and ``prove`` a proof of what sets a size.
    """

    def __init__(
        self, spec: StudySpec, launch: Launch, *, prove: Launch, on_attempt: Callable[[ProfileAttempt], None]
    ) -> None:
        self._spec = spec
        self._follow = launch
        self._prove = prove
        self._on_attempt = on_attempt
        self._numbers = count()
        self._checkpoints = CHECKPOINT_EVERY in spec.kept_knobs
        """Whether the script's own activation checkpointing stays on."""
        self._least = self._accumulation = self._multiple = 1
        """Micro-batch and accumulation steps that the script needs, and a divisor of its micro-batches."""
        self._pipeline = self._only_zero_3 = False
        self._differences: Mapping[str, list[Any]] = {}
        """What the script sets beside its config, by launches that failed."""

    def run(self) -> Profiled:
        """Launch attempts until one is measured."""
        tried: list[str] = []
        waiting = deque(profile_attempts(self._spec))
        while waiting:
            planned = replace(waiting.popleft(), checkpoints=self._checkpoints)
            attempt = planned.with_least(self._least, self._accumulation)
            if self._is_refused(attempt.structure):
                continue
            launched = self._launch(attempt)
            record, report = launched.record, launched.report
            no_blocks = record.profile is not None and not record.profile.blocks
            if record.checkpoints and (report.outcome.infeasible or no_blocks):
                self._checkpoints = True
                waiting.appendleft(planned)
                continue
            if launched.is_measured:
                launched = self._with_one_size(launched, planned)
                _check_data(launched.record, smallest=launched.attempt.micro_batch)
                return self._profiled(self._with_computed_steps(self._with_clear_samples(launched)))
            # A later launch may set a value that the script has as well: only an earlier one then shows the difference.
            self._differences = {**record.config_differences, **self._differences}
            self._only_zero_3 |= record.needs_zero_3 and 3 in self._spec.stages
            if report.outcome.infeasible or (record.needs_zero_3 and self._only_zero_3):
                self._pipeline = record.engine is not None and record.engine.pipeline
                missing = "" if report.missing_bytes is None else f", short of {report.missing_bytes / 2**20:.0f} MiB"
                tried.append(f"{attempt.words} ({outcome_in_words(report.outcome)}{missing})")
            else:
                if not self._give_variables(report):
                    self._take_users_sizes(launched)
                waiting.appendleft(planned)
        more = "" if 3 in self._spec.stages else "allow ZeRO 3 with --zero-stages, "
        raise NothingRunnableError(
            f"The model does not fit at micro-batch {attempt.micro_batch}. Tried: " + "; ".join(tried) + ". "
            f"Free device memory, {more}use more GPUs, or make the model smaller."
        )

    def _launch(self, attempt: ProfileAttempt) -> _Launched:
        self._on_attempt(attempt)
        request = _request(self._spec, attempt, number=next(self._numbers))
        record, report = self._follow(request)
        return _Launched(attempt=attempt, request=request, record=record, report=report)

    def _is_refused(self, structure: Structure | None) -> bool:
        """Whether DeepSpeed is known to refuse a structure."""
        if structure is None:
            return False
        return (self._pipeline and structure.stage > 1) or (self._only_zero_3 and structure.stage < 3)

    def _give_variables(self, report: LaunchReport) -> bool:
        """Give the next attempts variables of another launcher that a script needs; not to one of torchrun's own."""
        missing = {} if self._spec.train_launcher is not None else missing_variables(self._spec, report)
        if not missing:
            return False
        self._spec = self._spec.with_script(environment={**missing, **self._spec.script.environment})
        return True

    def _take_users_sizes(self, launched: _Launched) -> None:
        """Have the next attempts at the user's batch sizes; raise if these cannot explain why a launch failed."""
        attempt, record, report = launched.attempt, launched.record, launched.report
        error = report.cause.partition(":")[0]
        user = own_batch(self._spec, record, compares=error == "AssertionError")
        at_own = attempt.with_least(user.micro_batch, user.gradient_accumulation_steps)
        waited = report.outcome in (Outcome.STALLED, Outcome.TIMEOUT)  # it would wait as long again
        if at_own == attempt or waited or error in _NEVER_OF_BATCHES:
            raise _failure(self._spec, report, record)
        self._least, self._accumulation = at_own.micro_batch, at_own.accumulation
        if match := _DIVISIBLE.search(report.message):
            self._multiple = int(match[1]) // math.gcd(int(match[1]), self._spec.data_parallel_ranks)

    def _with_one_size(self, launched: _Launched, planned: ProfileAttempt) -> _Launched:
        """Return a launch at the user's micro-batch or accumulation steps alone if the script trains so."""
        if self._least > planned.micro_batch and self._accumulation > 1:
            for micro_batch, steps in ((self._least, 1), (1, self._accumulation)):
                alone = self._launch(planned.with_least(micro_batch, steps))
                if alone.is_measured:
                    self._least = micro_batch
                    return alone
        return launched

    def _with_clear_samples(self, launched: _Launched) -> _Launched:
        """Return a launch at twice the micro-batch if two dimensions of the inputs may be that of samples."""
        attempt = launched.attempt
        if attempt.micro_batch == 1 or not launched.record.is_ambiguous:
            return launched
        second = self._launch(replace(attempt, micro_batch=2 * attempt.micro_batch))
        return second if second.is_measured else launched

    def _with_computed_steps(self, launched: _Launched) -> _Launched:
        """Return a launch with the accumulation steps that the script has at its own micro-batch."""
        record, engine = launched.record, launched.record.engine
        assert engine is not None
        at_own = launched.attempt.with_least(own_batch(self._spec, record).micro_batch, 1)
        if _steps_may_follow(self._spec, record) and at_own != launched.attempt:
            second = self._launch(at_own)
            if second.report.outcome is Outcome.MEASURED and second.record.engine is not None:
                engine = replace(engine, config_differences=second.record.engine.config_differences)
        record.engine = replace(engine, config_differences={**self._differences, **engine.config_differences})
        return launched

    def _profiled(self, launched: _Launched) -> Profiled:
        """Return what a measured launch shows, after proofs of what sets the script's batch sizes and ZeRO stage."""
        spec, attempt, record, overlay = self._spec, launched.attempt, launched.record, launched.request.overlay
        user = own_batch(spec, record)
        if record.trainer is None:
            check_sizes(_following(spec, record))
        sizes = {"present": user.micro_batch, "steps": user.gradient_accumulation_steps}
        batch = find_batch_rule(spec, self._prove, record, overlay=overlay, **sizes)
        trainer = find_trainer(spec, self._prove, record, overlay=overlay)
        profiled = _profiled(attempt, record, batch=batch, trainer=trainer)
        stage_option, accumulation_option = (
            find(spec, self._prove, record, overlay=overlay, differences=profiled.config_differences)
            for find in (find_stage_option, find_accumulation_option)
        )
        mapped = {**spec.script.arg_mappings, **({} if batch is None else batch.arg_mappings)}
        if record.batch_sources is not None and ds_config.MICRO_BATCH in mapped:
            micro_batch = user.micro_batch if batch is None else batch.own
            option, counts = global_batch_option(record.batch_sources, user, micro_batch=micro_batch)
            profiled = replace(profiled, global_batch_option=option, global_batch_counts=counts)
        divides = batch is not None and batch.holds_steps(
            accumulation_option=accumulation_option, ranks=profiled.data_parallel_size
        )
        passes = attempt.accumulation * record.passes_per_micro_batch
        needs_steps = passes == user.gradient_accumulation_steps > 1
        return replace(
            profiled,
            environment={**record.environment, **dict(spec.script.environment.items() & OF_LAUNCHERS.items())},
            option_defaults=_mapped_defaults(spec, record),
            stage_choices={} if record.batch_sources is None else record.batch_sources.choices,
            start_s=record.outside_steps_s(launched.report.held_s),
            stage_option=stage_option,
            accumulation_option=accumulation_option,
            only_zero_3=self._only_zero_3,
            least_micro_batch=self._least if self._multiple == 1 else self._multiple,
            micro_batch_multiple=self._multiple,
            holds_accumulation=divides or (trainer is None and not accumulation_option and needs_steps),
        )


def _steps_may_follow(spec: StudySpec, record: LaunchRecord) -> bool:
    """Detect accumulation steps that the script may have computed from the launch's micro-batch and a global batch."""
    mapped = ds_config.MICRO_BATCH in spec.script.arg_mappings or ds_config.TRAIN_BATCH in spec.script.arg_mappings
    known = {} if record.engine is None else record.engine.config_differences
    steps, in_file = known.get(ds_config.GRADIENT_ACCUMULATION, (None, None))
    return mapped and steps != in_file


def _request(spec: StudySpec, attempt: ProfileAttempt, *, number: int) -> LaunchRequest:
    if attempt.structure is None:  # the script's stage is the baseline, regardless of the file
        mappings = {key: option for key, option in spec.script.arg_mappings.items() if key != STAGE}
        spec = spec.with_script(arg_mappings=mappings)
    return launch_request(
        spec,
        launch_id=f"profile-{number}" if number else "profile",
        purpose="profile",
        overlay=attempt.overlay(),
        start_profile_step=1,
        end_profile_step=_PROFILE_END_STEP,
    )


def own_batch(spec: StudySpec, record: LaunchRecord, *, compares: bool = False) -> ds_config.BatchTriangle:
    """Return the user's batch sizes if a launch had an engine or a trainer's arguments, else batch sizes of 1.

    A script that ``compares`` its config file with its own settings may do so before it has an engine.

    Some models do not train on a single sample (batch normalisation of a single value per channel, contrastive losses).
    Some scripts compare the engine's accumulation steps with their own, or inspect gradients between updates.
    """
    engine = record.engine
    if engine is None and record.trainer is None and not compares:
        return ds_config.BatchTriangle(train_batch_size=1, micro_batch=1, gradient_accumulation_steps=1)
    meant = _following(spec, record)
    ranks = meant.data_parallel_ranks
    config, _ = user_config(meant, data_parallel_size=ranks)
    return ds_config.batch_triangle(config, world_size=ranks)


def _following(spec: StudySpec, record: LaunchRecord) -> StudySpec:
    """Return the spec completed with the settings that a launch shows."""
    engine = record.engine
    return follow_script(
        spec,
        differences={} if engine is None else engine.config_differences,
        trainer=None if record.trainer is None else ScriptTrainer.from_event(record.trainer),
        defaults=_mapped_defaults(spec, record),
        batch=None,
        ranks=spec.data_parallel_ranks if engine is None else engine.data_parallel_size,
    )


def _check_data(record: LaunchRecord, *, smallest: int) -> None:
    """Raise ``NothingRunnableError`` if a rank has fewer samples than the smallest micro-batch, and used no more."""
    samples = (
        None
        if record.batch_sources is None
        else samples_per_rank(record.batch_sources, fed=record.observed_micro_batch)
    )
    fed = record.observed_micro_batch
    if samples is not None and samples < smallest and fed is not None and fed < smallest:
        raise NothingRunnableError(
            f"The training data give a rank {things_in_words(samples, 'sample')}, fewer than the smallest micro-batch "
            f"that --fix, --no-tune, the config's list or its autotuning section allow, {smallest}. "
            f"Allow {samples} or fewer."
        )


def _profiled(
    attempt: ProfileAttempt, record: LaunchRecord, *, batch: BatchRule | None, trainer: ScriptTrainer | None
) -> Profiled:
    profile, engine = record.profile, record.engine
    assert profile is not None
    assert engine is not None
    counted, rows = batch, record.observed_micro_batch
    if batch is not None and batch.kind == "config" and rows is not None:
        counted = replace(batch, rows=(rows, attempt.micro_batch))
    return Profiled(
        profile=_per_sample(ModelProfile.from_json(asdict(profile)), counted),
        measured_with=attempt.words,
        pipeline=engine.pipeline,
        device=engine.device,
        data_parallel_size=engine.data_parallel_size,
        takes_local_rank=engine.takes_local_rank,
        starts_ranks=engine.starts_ranks,
        joins_ranks=engine.joins_ranks,
        precision=engine.precision,
        bf16_argument=engine.bf16_argument,
        checkpoints=record.checkpoints,
        trainer=trainer,
        batch=batch,
        samples_per_rank=None if record.batch_sources is None else samples_per_rank(record.batch_sources),
        loads_all=record.batch_sources is not None and loads_all(record.batch_sources),
        config_differences=engine.config_differences,
        config_option=engine.config_option,
        config_in_code=engine.config_in_code,
        checkpoint=record.checkpoint,
        preload=Preload() if record.imported is None else Preload.learned(record.imported),
    )


def _per_sample(profile: ModelProfile, batch: BatchRule | None) -> ModelProfile:
    """Convert a profile per row, as counted by the profile launch, to a profile per sample of the script."""
    if batch is None:
        return profile
    return replace(
        profile,
        activation_bytes_per_sample=batch.scaled(profile.activation_bytes_per_sample),
        block_bytes_per_sample=batch.scaled(profile.block_bytes_per_sample),
        block_input_bytes_per_sample=batch.scaled(profile.block_input_bytes_per_sample),
        flops_per_sample=batch.scaled(profile.flops_per_sample),
    )


def _mapped_defaults(spec: StudySpec, record: LaunchRecord) -> dict[str, int]:
    """Return the defaults of the script's options that the user mapped to batch sizes."""
    known = {} if record.batch_sources is None else record.batch_sources.defaults
    return {option: known[option] for option in spec.script.arg_mappings.values() if option in known}


def _failure(spec: StudySpec, report: LaunchReport, record: LaunchRecord) -> DsatError:
    message = report.message + failure_hint(spec, report, record)
    keys = {*ds_config.flatten(spec.ds_config), *record.config_differences, "DeepSpeedConfigError", OF_SCALARS}
    explained = report.outcome is Outcome.INVALID_CONFIG and any(key in message for key in keys)
    error = ScriptFailedError(
        f"The profile launch ended with {outcome_in_words(report.outcome)}: {message}",
        traceback_tail="" if explained else report.error_excerpt,
        log_path=report.log_path,
    )
    if match := _OTHER_RANKS.search(report.message):
        error.ranks = int(match[1])
    return error


_OTHER_RANKS = re.compile(r"this launch has \d+ ranks?: tune with --gpus-per-trial (\d+) ")
"""Matches ``runtime.adapt.ranks.wrong_number``."""
