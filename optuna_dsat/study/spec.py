"""StudySpec: everything a study needs to run or to be resumed, validated on construction."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from optuna_dsat.config.knobs import ZERO_STAGES
from optuna_dsat.errors import UsageError
from optuna_dsat.launch.machine.devices import Devices
from optuna_dsat.metrics import METRICS, direction_of
from optuna_dsat.script.arg_mapping import MAPPABLE
from optuna_dsat.words import rule_in_words

__all__ = [
    "METHODS",
    "MethodOptions",
    "ScriptSpec",
    "StudyRequest",
    "StudySpec",
    "default_stages",
    "make_spec",
    "parse_bytes",
]

METHODS = ("random", "binary", "asha", "guided")
MOST_RUNGS = 64
"""Most rungs, and most by which they start higher: the top one of 64 would take ``2**63`` launches."""

_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_UNITS |= {f"{prefix}iB": 2 ** (10 * power) for power, prefix in enumerate("KMGT", start=1)}
_UNITS |= {f"{prefix}B": 10 ** (3 * power) for power, prefix in enumerate("KMGT", start=1)}
_UNITS = {unit.lower(): size for unit, size in _UNITS.items()}


def parse_bytes(text: str) -> int:
    """Return a size such as ``2GiB``, ``900MiB``, ``1.5GB`` or ``123456`` in bytes.

    ``GiB`` is 2**30 bytes, ``GB`` is 10**9; a bare ``G`` is read as ``GiB``. Case does not matter.

    Raises:
        UsageError: If the text is not a positive number with a known unit.
    """
    match = re.fullmatch(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([a-z]*)\s*", text.lower())
    if match is None or match.group(2) not in _UNITS or float(match.group(1)) <= 0:
        raise UsageError(f"{text!r} is not a size: write a positive number with a unit, such as 2GiB or 900MiB.")
    return math.floor(float(match.group(1)) * _UNITS[match.group(2)])


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def default_stages(method: str) -> tuple[int, ...]:
    """Return the ZeRO stages that a method searches where none are asked for.

    The three methods of Determined's DeepSpeed Autotune keep its default; small models are fastest without ZeRO.
    """
    return ZERO_STAGES if method == "guided" else (1, 2, 3)


class ScriptSpec(_Frozen):
    """The user's training script and how it is started."""

    script: str
    """Absolute path of a Python file, or a module's name when ``is_module``."""
    args: tuple[str, ...] = ()
    is_module: bool = False
    cwd: str
    """Absolute path of the working directory the script is run in."""
    config_path: str
    """Absolute path of the user's DeepSpeed config, empty if the script alone has one."""
    arg_mappings: dict[str, str] = Field(default_factory=dict)
    """Key of the DeepSpeed config -> option of the script that follows it."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Variables of the environment that the script is given beside those of the tuner's own."""
    batch_source: dict[str, Any] = Field(default_factory=dict)
    """What the batch size follows by, apart from options: see ``optuna_dsat.runtime.adapt.batch_sources``."""

    @field_validator("arg_mappings")
    @classmethod
    def _check_mappings(cls, mappings: dict[str, str]) -> dict[str, str]:
        for key in mappings:
            if key not in MAPPABLE:
                raise ValueError(f"an argument cannot be mapped to {key!r:.60}; {', '.join(MAPPABLE)} can")
        return mappings


class MethodOptions(_Frozen):
    """Options of the search methods, under the names of the dsat guide; each method reads its own."""

    trials_per_random_config: int = Field(default=5, ge=1)
    """``random``: launches given to one lineage at most."""
    early_stopping: int | None = Field(default=None, ge=1)
    """Launches without a new best after which the search ends; None means never."""
    search_range_factor: float = Field(default=1.0, gt=0)
    """``binary``, ``asha``: factor on the memory model's largest micro-batch."""
    max_rungs: int = Field(default=5, ge=1, le=MOST_RUNGS)
    """``asha``: number of rungs."""
    min_binary_search_trials: int = Field(default=3, ge=1)
    """``asha``: launches a lineage needs to complete the lowest rung (before ``asha_early_stopping``)."""
    divisor: int = Field(default=2, ge=2)
    """``asha``: eta of arXiv:1810.05934."""
    asha_early_stopping: int = Field(default=0, ge=0, le=MOST_RUNGS)
    """``asha``: s of arXiv:1810.05934."""
    free_batch: bool = False
    """Whether micro-batches may be larger than the history suggests."""
    memory_margin: float = Field(default=0.0, ge=0, lt=1)
    """``guided``: share of the device's memory that a launch is expected to leave free."""
    min_gain: float = Field(default=0.001, ge=0)
    """``guided``: the search ends when no launch is expected to improve the metric by this share of it, and all that
    could follow by less than 20 times as much, with 90% probability."""
    warm_start: str | None = None
    """``guided``: study to take prior knowledge from; None for those of the same script, config and hardware."""
    no_warm_start: bool = False
    """``guided``: whether to search without prior knowledge."""


class StudySpec(_Frozen):
    """Everything a study needs to run or to be resumed. Stored with the study; holds no secret and no storage URL."""

    name: str = Field(min_length=1, max_length=128)
    method: str
    options: MethodOptions = MethodOptions()
    script: ScriptSpec
    ds_config: dict[str, Any]
    """The user's DeepSpeed config as read."""
    metric: str = "FLOPS_per_gpu"

    zero_stages: tuple[int, ...] = (1, 2, 3)
    """Stages to search; by default those of ``default_stages``."""
    fix: dict[str, Any] = Field(default_factory=dict)
    """Knobs held at one value."""
    no_tune: tuple[str, ...] = ()
    """Knobs left as the user's config has them."""
    nvme_path: str | None = None
    train_batch_size: int | None = Field(default=None, ge=1)
    """Global batch of every trial, in samples; None if it follows the micro-batch."""

    device: Literal["cuda", "cpu"]
    slots_per_trial: int = Field(ge=1)
    """Ranks of one launch, on all its nodes: GPUs, or CPU processes."""
    nodes_per_trial: int = Field(default=1, ge=1)
    """Nodes over which the ranks of one launch are spread, as many on each."""
    on: Literal["here", "slurm", "ray"] = "here"
    """Where launches run: on the tuner's machine, or on nodes of a cluster."""
    gpus_per_node: int = Field(default=0, ge=0)
    """GPUs that a cluster is asked for on each node; 0 for none."""
    slurm_arg: tuple[str, ...] = ()
    """Options for srun."""
    ray_address: str | None = None
    """Address of the Ray cluster; None for the one that the tuner's machine belongs to."""
    ray_node: tuple[str, ...] = ()
    """Nodes of the Ray cluster that may be used; all for none."""
    queue_timeout_s: float | None = Field(default=None, gt=0)
    """Longest wait for a cluster to grant nodes; None for no limit."""
    idle_release_s: float = Field(default=300.0, ge=0)
    """Seconds without a launch after which nodes are given back."""
    device_memory_bytes: int | None = Field(default=None, gt=0)
    """Memory that one rank may allocate, in bytes; None for all of the device's."""
    free_memory: bool = False
    """Whether that is a share of what was available when the search was started, which differs from start to start."""

    max_trials: int = Field(default=64, ge=1)
    """Budget of trial launches; the profile launch and confirmations are not counted."""
    max_concurrent_trials: int = Field(default=16, ge=1)
    max_slots: int | None = Field(default=None, ge=1)
    start_profile_step: int = Field(default=3, ge=1)
    end_profile_step: int = Field(default=5, ge=1)
    adaptive_steps: int | None = Field(default=None, ge=1)
    """Limit on a finalist's counted steps while its step time is uncertain; None for ``confirmation_steps``."""
    trial_timeout_s: float | None = Field(default=None, gt=0)
    stall_timeout_s: float = Field(default=600.0, gt=0)
    """Longest time without an event or activity of a launch, in seconds."""
    timeout_s: float | None = Field(default=None, gt=0)
    wait_for_gpus_s: float = Field(default=600.0, ge=0)
    """Longest wait for slots that others hold, in seconds since the holders last changed; 0 for no wait."""
    max_retries: int = Field(default=1, ge=0)
    """Most retries of a trial after a communication error or a time-out."""
    follow_batch: bool = True
    """Whether to find out what sets the script's batch size and ZeRO stage besides its DeepSpeed config."""
    random_seed: int = Field(default=42, ge=0, le=2**32 - 1)
    enqueue_user_config: bool = True
    launcher: Literal["warm", "torchrun"] = "warm"
    """How trials are launched: forked from a process with the heavy modules imported, or by plain torchrun."""
    preload: tuple[str, ...] = ()
    """Modules imported before a warm launch, in addition to those that the profile launch imported."""
    no_preload: tuple[str, ...] = ()
    """Packages that every warm launch imports itself."""
    isolation: Literal["auto", "python", "off"] = "auto"
    """How the user's files are protected from trials: overlays where they can be mounted, else Python's writers
    redirected; the latter alone; or not at all."""
    writable: tuple[str, ...] = ()
    """Absolute paths that trials may change."""
    confirm: int = Field(default=3, ge=0)
    """Most finalists measured again in rounds with the user's config; 0 for none."""
    confirm_time_s: float | None = Field(default=None, ge=0)
    """Device time of the rounds, in seconds; None for three rounds, and more while they take a small share of the
    search's."""
    tie: float = Field(default=0.01, ge=0, lt=1)
    """Share of the best metric within which configurations count as equal."""
    dataset_size: int | None = Field(default=None, ge=1)
    """Samples of the training data; None for what the script's data loader tells."""
    batch: Literal["free", "keep"] = "free"
    """Whether every trial keeps the global batch of the user's own config."""
    max_train_batch_size: int | None = Field(default=None, ge=1)
    """Largest global batch, in samples; None for a tenth of the training data where that is known."""
    divisible_by: int = Field(default=1, ge=1)
    """Number that every searched micro-batch is a multiple of."""
    output_dir: str
    """Absolute path of the directory that receives the study's files."""

    @model_validator(mode="before")
    @classmethod
    def _stages_of_method(cls, values: Any) -> Any:
        if isinstance(values, dict) and "zero_stages" not in values:
            return {**values, "zero_stages": default_stages(str(values.get("method")))}
        return values

    @model_validator(mode="after")
    def _check(self) -> StudySpec:
        if not self.name.strip() or self.name in (".", "..") or "/" in self.name or not self.name.isprintable():
            rule = "no slash, no control characters, not blank"
            raise ValueError(f"--study is {self.name!r}; a name is also that of a folder: {rule}")
        try:
            json.dumps(self.model_dump(), ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError as error:
            found = repr(error.object[max(0, error.start - 20) : error.end])
            raise ValueError(f"{found} is no text in UTF-8, which a study is stored as: write it otherwise") from None
        if self.method not in METHODS:
            raise ValueError(f"the method is {self.method!r}; it must be one of {', '.join(METHODS)}")
        if self.metric not in METRICS:
            raise ValueError(f"--metric is {self.metric!r}; it must be one of {', '.join(METRICS)}")
        unknown = [stage for stage in self.zero_stages if stage not in ZERO_STAGES]
        if unknown or not self.zero_stages:
            raise ValueError(f"--zero-stages is {list(self.zero_stages)}; stages are 0, 1, 2 and 3")
        if self.end_profile_step < self.start_profile_step:
            raise ValueError(
                f"--end-profile-step is {self.end_profile_step}, before --start-profile-step {self.start_profile_step}"
            )
        if self.train_batch_size is not None and self.train_batch_size % self.slots_per_trial:
            raise ValueError(
                f"--train-batch-size is {self.train_batch_size}, no multiple of the {self.slots_per_trial} ranks "
                "of a launch"
            )
        if self.batch == "keep" and self.train_batch_size is not None:
            raise ValueError(
                f"--batch keep keeps your config's global batch, --train-batch-size {self.train_batch_size} another; "
                "give one of them"
            )
        most = self.max_train_batch_size
        if most is not None and most < self.slots_per_trial:
            raise ValueError(
                f"--max-train-batch-size is {most}, less than one sample for each of {self.slots_per_trial} ranks"
            )
        if self.slots_per_trial % self.nodes_per_trial:
            raise ValueError(
                f"--nodes-per-trial is {self.nodes_per_trial}, over which {self.slots_per_trial} ranks cannot be "
                "spread evenly"
            )
        if self.on == "here" and (self.nodes_per_trial > 1 or self.gpus_per_node):
            raise ValueError("--nodes-per-trial and --gpus-per-node are for a cluster: say which by --on slurm or ray")
        if self.max_slots is not None and self.max_slots < self.slots_per_trial:
            raise ValueError(f"--max-slots is {self.max_slots}, but one launch takes {self.slots_per_trial}")
        return self

    @property
    def slots_per_node(self) -> int:
        """Ranks of one launch on each of its nodes."""
        return self.slots_per_trial // self.nodes_per_trial

    @property
    def direction(self) -> Literal["maximize", "minimize"]:
        """Direction in which the metric improves."""
        return direction_of(self.metric)

    @property
    def maximize(self) -> bool:
        """Whether a larger metric is better."""
        return self.direction == "maximize"

    @property
    def study_dir(self) -> Path:
        """Directory that receives this study's files."""
        return Path(self.output_dir) / self.name

    def identity(self) -> dict[str, Any]:
        """Return what makes results comparable: studies that differ here are different studies.

        Budgets, time-outs and the output directory are left out; they may change when a study is resumed.
        """
        budget = {
            "name", "max_trials", "max_concurrent_trials", "max_slots", "trial_timeout_s", "timeout_s", "max_retries",
            "confirm", "output_dir", "enqueue_user_config", "launcher", "preload", "no_preload",
            "isolation", "writable",
            "adaptive_steps", "wait_for_gpus_s", "stall_timeout_s", "confirm_time_s", "tie",
            "slurm_arg", "ray_address", "ray_node", "queue_timeout_s", "idle_release_s",
        }  # fmt: skip
        ends = {"early_stopping", "min_gain"}
        if self.free_memory:
            budget.add("device_memory_bytes")
        return self.model_dump(mode="json", exclude={**dict.fromkeys(budget, True), "options": ends})


_OPTIONS = {"name": "study", "slots_per_trial": "gpus-per-trial"}
"""Field -> option, where that has another name."""


def make_spec(**values: Any) -> StudySpec:
    """Build a spec; an invalid value is reported in one line.

    Raises:
        UsageError: If a value breaks a rule; names the option, the value and the rule.
    """
    try:
        return StudySpec(**values)
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][-1]) if first["loc"] else ""
        where = "--" + _OPTIONS.get(field, field.removesuffix("_s").replace("_", "-")) if field else ""
        if first["type"] == "value_error":
            raise UsageError(f"{first['msg'].removeprefix('Value error, ')}.") from None
        raise UsageError(f"{where} is {first['input']!r}; {rule_in_words(first['msg'])}.") from None


@dataclass(frozen=True, kw_only=True)
class StudyRequest:
    """One run of a study: what to tune, where, and how far to take it."""

    spec: StudySpec
    devices: Devices
    storage: str
    """URL of the study's database, its password included; an SQLite file that does not exist is created."""
    reuse_profile: bool = True
    """Whether a stored profile of the same script, config and hardware replaces the profile launch."""
    check_loss: bool = False
    """Whether to compare the first losses under the winner with those under the user's config."""
    conclude: bool = True
    """Whether to confirm and export the winner; a worker that joins leaves that to the study's owner."""
    relocated: bool = False
    """Whether ``spec`` is the stored one with this machine's paths: it is neither compared nor stored."""

    @property
    def device_names(self) -> tuple[str, ...]:
        """Name of each device, for the profile's fingerprint."""
        return tuple(device.name for device in self.devices.devices)
