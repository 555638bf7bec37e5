"""The profile launch: what one launch at micro-batch 1 teaches about model and hardware.

If the user's own config does not fit at micro-batch 1, the launch climbs a ladder of ever less device memory (the order
of the DeepSpeed configuration guide) before giving up.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optuna_dsat.config import ds_config
from optuna_dsat.cost.memory import ModelProfile
from optuna_dsat.errors import DsatError, NothingRunnableError, ScriptFailedError
from optuna_dsat.launch.follow import follow
from optuna_dsat.launch.measurement import LaunchRecord
from optuna_dsat.launch.preload import Preload
from optuna_dsat.launch.protocol import Launcher, LaunchReport
from optuna_dsat.launch.waiting import SlotWait
from optuna_dsat.outcome import Outcome
from optuna_dsat.script.module_file import module_file
from optuna_dsat.script.trainer import ScriptTrainer
from optuna_dsat.script.trial_class import RUNNER, find_trial_class, hparams_of
from optuna_dsat.study.launch_requests import launch_request
from optuna_dsat.study.spec import ScriptSpec, StudySpec

__all__ = ["LADDER", "Profiled", "Rung", "fingerprint", "measure_profile", "rungs"]

_KNOB_SECTIONS = {
    "zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
    "autotuning",
}  # fmt: skip
_MAX_FILES = 200
_SMALL_BUCKET = 5_000_000
"""Elements. DeepSpeed's default of 5e8 takes gigabytes on its own, whatever the model."""
_PROFILE_END_STEP = 2
"""Steps of a profile launch: one is profiled, one more shows that the optimizer's state fits, too."""


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One step of the ladder: a ZeRO stage with its offloads, and buckets that any model's memory has room for."""

    words: str
    stage: int | None
    """None for the user's own setting."""
    offload_optimizer: bool = False
    offload_param: bool = False

    def overlay(self) -> dict[str, Any]:
        """Return the DeepSpeed settings of this rung at micro-batch 1."""
        batch = ds_config.batch_overlay(1)
        if self.stage is None:
            return batch
        cpu = {"device": "cpu"}
        zero = {
            "stage": self.stage,
            "offload_optimizer": cpu if self.offload_optimizer else None,
            "offload_param": cpu if self.offload_param else None,
            "reduce_bucket_size": _SMALL_BUCKET,
            "stage3_prefetch_bucket_size": _SMALL_BUCKET if self.stage == 3 else None,
        }
        return {**batch, "zero_optimization": zero}


LADDER = (
    Rung(words="your own ZeRO settings", stage=None),
    Rung(words="ZeRO 1", stage=1),
    Rung(words="ZeRO 1 + optimizer offload", stage=1, offload_optimizer=True),
    Rung(words="ZeRO 2", stage=2),
    Rung(words="ZeRO 2 + optimizer offload", stage=2, offload_optimizer=True),
    Rung(words="ZeRO 3", stage=3),
    Rung(words="ZeRO 3 + parameter offload", stage=3, offload_param=True),
    Rung(words="ZeRO 3 + parameter and optimizer offload", stage=3, offload_param=True, offload_optimizer=True),
)
"""In the order of the guide: each rung needs less device memory than the one before it. ZeRO 1 is climbed only where
neither 2 nor 3 is searched.
"""


@dataclass(frozen=True, kw_only=True)
class Profiled:
    """A profile and how it was come by."""

    profile: ModelProfile
    rung: str
    """Words of the rung that fitted."""
    pipeline: bool
    """Whether the script trains a pipeline module (ZeRO at most 1)."""
    device: str
    data_parallel_size: int | None = None
    """Ranks that consume different samples; None where an older profile does not tell: all of them."""
    takes_local_rank: bool = False
    """Whether the script has an option ``--local_rank``, as scripts for the ``deepspeed`` launcher do."""
    trainer: ScriptTrainer | None = None
    """The trainer with batch sizes of its own that the script uses, None where there is none."""
    preload: Preload = field(default_factory=Preload)
    """What the script imports, for launches that are forked."""

    @property
    def deepspeed_launcher(self) -> bool:
        """Whether training needs the ``deepspeed`` launcher, not torchrun; trainers know their rank by themselves."""
        return self.takes_local_rank and self.trainer is None

    def to_json(self) -> dict[str, Any]:
        """Return what ``from_json`` reads back."""
        return {
            "profile": self.profile.to_json(),
            "rung": self.rung,
            "pipeline": self.pipeline,
            "device": self.device,
            "data_parallel_size": self.data_parallel_size,
            "takes_local_rank": self.takes_local_rank,
            "trainer": None if self.trainer is None else self.trainer.to_json(),
            "preload": self.preload.to_json(),
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Profiled:
        """Build from what ``to_json`` returned, by this version or one before it."""
        trainer = record.get("trainer")
        return cls(
            profile=ModelProfile.from_json(record["profile"]),
            rung=record["rung"],
            pipeline=record["pipeline"],
            device=record["device"],
            data_parallel_size=record.get("data_parallel_size"),
            takes_local_rank=record.get("takes_local_rank", False),
            trainer=None if trainer is None else ScriptTrainer.from_json(trainer),
            preload=Preload.from_json(record["preload"]) if "preload" in record else Preload(),
        )


def rungs(spec: StudySpec) -> Iterator[Rung]:
    """Yield the rungs of the ladder that a study climbs."""
    higher = any(stage >= 2 for stage in spec.zero_stages)
    for rung in LADDER:
        if rung.stage is None or (rung.stage in spec.zero_stages and (rung.stage >= 2 or not higher)):
            yield rung


def measure_profile(
    spec: StudySpec,
    launcher: Launcher,
    *,
    on_rung: Callable[[Rung], None],
    on_report: Callable[[LaunchReport, LaunchRecord], None],
    wait: SlotWait | None = None,
) -> Profiled:
    """Launch the script at micro-batch 1, climbing the ladder while memory is short.

    Args:
        spec: The study.
        launcher: Where to launch.
        on_rung: Called before each launch.
        on_report: Called after each launch.
        wait: As for ``follow``.

    Raises:
        DeviceError: If others hold the slots for too long.
        ScriptFailedError: If the script fails for a reason that is not memory.
        NothingRunnableError: If no rung fits; says what was tried and how much memory was missing.
    """
    tried: list[str] = []
    pipeline = False
    for index, rung in enumerate(rungs(spec)):
        if pipeline and (rung.stage or 0) > 1:
            continue  # DeepSpeed refuses it
        on_rung(rung)
        request = launch_request(
            spec,
            launch_id="profile" if index == 0 else f"profile-{index}",
            purpose="profile",
            overlay=rung.overlay(),
            start_profile_step=1,
            end_profile_step=_PROFILE_END_STEP,
        )
        record, report = follow(launcher, request, wait=wait)
        on_report(report, record)
        if report.outcome is Outcome.MEASURED and record.profile is not None and record.engine is not None:
            return Profiled(
                profile=ModelProfile.from_event(record.profile),
                rung=rung.words,
                pipeline=record.engine.pipeline,
                device=record.engine.device,
                data_parallel_size=record.engine.data_parallel_size,
                takes_local_rank=record.engine.takes_local_rank,
                trainer=None if record.trainer is None else ScriptTrainer.from_event(record.trainer),
                preload=Preload() if record.imported is None else Preload.learned(record.imported),
            )
        if not report.outcome.infeasible:
            raise _failure(spec, report)
        pipeline = record.engine is not None and record.engine.pipeline
        missing = "" if report.missing_bytes is None else f", short of {report.missing_bytes / 2**20:.0f} MiB"
        tried.append(f"{rung.words} ({report.outcome.value}{missing})")
    raise NothingRunnableError(
        "The model does not fit at micro-batch 1. Tried: " + "; ".join(tried) + ". "
        "Free device memory, allow more ZeRO stages with --zero-stages, use more GPUs, or make the model smaller."
    )


def _hint(spec: StudySpec, report: LaunchReport) -> str:
    """Return what else may explain a failed profile launch."""
    if report.outcome is Outcome.OUT_OF_DATA:
        return (
            ". If it did train, its loop is one that cannot be followed: "
            "put `with optuna_dsat.dsat_reporting_context(...)` around forward, backward and step"
        )
    autos = [key for key, value in ds_config.flat(spec.ds_config).items() if value == ds_config.AUTO]
    if report.outcome is Outcome.INVALID_CONFIG or "auto" in report.error_excerpt:
        return f'. Only Hugging Face fills in "auto", which the config says for {", ".join(autos)}' if autos else ""
    return ""


def _failure(spec: StudySpec, report: LaunchReport) -> DsatError:
    return ScriptFailedError(
        f"The profile launch ended with {report.outcome.value}: {report.message}" + _hint(spec, report),
        traceback_tail=report.error_excerpt,
        log_path=report.log_path,
    )


def fingerprint(spec: StudySpec, *, device_names: tuple[str, ...]) -> str:
    """Return a hash of all that a profile depends on.

    The script and the Python files beside it (their content), its arguments, the config outside the knobs and batch
    sizes, hardware and versions. A model that is imported from elsewhere, or read from data, is not seen: give
    ``--no-profile-reuse`` after changing it.
    """
    outside = {key: value for key, value in spec.ds_config.items() if key not in _KNOB_SECTIONS}
    parts = {
        "code": _code_hashes(_code_folders(spec)),
        **_hparams_hash(spec.script),
        "script": spec.script.script if spec.script.is_module else Path(spec.script.script).name,
        "args": spec.script.args,
        "arg_mappings": spec.script.arg_mappings,
        "config": outside,
        "device": spec.device,
        "devices": device_names,
        "slots": spec.slots_per_trial,
        "device_memory_bytes": spec.device_memory_bytes,
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "deepspeed")},
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _hparams_hash(script: ScriptSpec) -> dict[str, str]:
    """Return the hash of a ``DeepSpeedTrial``'s hyperparameters, which decide its model; nothing for a script."""
    named = hparams_of(script.args) if script.script == RUNNER else None
    path = Path(script.cwd, named or "")
    return {"hparams": hashlib.sha256(path.read_bytes()).hexdigest()} if named and path.is_file() else {}


def _code_folders(spec: StudySpec) -> list[Path]:
    """Return the folders whose code a launch is likely to run: the script's, for a module the working directory too."""
    script, cwd = spec.script, Path(spec.script.cwd)
    if not script.is_module:
        return [Path(script.script).parent]
    if script.script == RUNNER:
        found = find_trial_class(script.args[0], cwd)
        return sorted({cwd, found.file.parent})
    file = module_file(script.script, cwd)
    return [cwd] if file is None else sorted({cwd, file.parent})


def _code_hashes(folders: Iterable[Path]) -> list[str]:
    """Return the hashes of the Python files in these folders and one level below, at most ``_MAX_FILES`` of each."""
    files: dict[Path, None] = {}
    for folder in folders:
        files |= dict.fromkeys(
            itertools.islice(sorted(folder.glob("*.py")) + sorted(folder.glob("*/*.py")), _MAX_FILES)
        )
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.is_file()]
