"""StudySpec: everything a study needs to run or to be resumed, validated on construction."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from optuna_dsat.config.conditions import OFFLOAD_OPTIMIZER, OFFLOAD_PARAM, ZERO_STAGE, ZERO_STAGES
from optuna_dsat.config.ds_config import AUTO, MICRO_BATCH, data_parallel_ranks, effective, zero_section
from optuna_dsat.config.knob_values import NAMES
from optuna_dsat.errors import UsageError
from optuna_dsat.launch.machine.devices import Devices
from optuna_dsat.metrics import METRICS, direction_of
from optuna_dsat.runtime.adapt.trainers import BF16_ENABLED
from optuna_dsat.runtime.failure import rule_in_words
from optuna_dsat.script.arg_mapping import MAPPABLE
from optuna_dsat.script.command.source import Source
from optuna_dsat.study.options.declaration import options_in
from optuna_dsat.study.options.methods import METHODS, AshaSettings, GuidedSettings, RandomSettings, default_stages
from optuna_dsat.study.options.settings import SearchSettings

if TYPE_CHECKING:
    import optuna

_MOST_NAME_BYTES = 240  # a folder's name may have 255
_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_UNITS |= {f"{prefix}iB": 2 ** (10 * power) for power, prefix in enumerate("KMGT", start=1)}
_UNITS |= {f"{prefix}B": 10 ** (3 * power) for power, prefix in enumerate("KMGT", start=1)}
_UNITS = {unit.lower(): size for unit, size in _UNITS.items()}


def parse_bytes(text: str) -> int:
    """Return a size such as ``2GiB``, ``900MiB``, ``1.5GB`` or ``1234567890`` in bytes.

    ``GiB`` is 2**30 bytes, ``GB`` is 10**9; a bare ``G`` is ``GiB``, in any case.

    Raises:
        UsageError: If the text is not a number with a known unit, or means less than 1 MiB, as 2 without a unit does.
    """
    match = re.fullmatch(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([a-z]*)\s*", text.lower())
    size = 0 if match is None else math.floor(float(match.group(1)) * _UNITS.get(match.group(2), 0))
    if size < _UNITS["mib"]:
        raise UsageError(f"{text!r} is not a size of 1MiB or more: write a number and its unit, as in 2GiB or 900MiB.")
    return size


class _Frozen(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        populate_by_name=True,
        validate_default=True,
        arbitrary_types_allowed=True,  # os.PathLike[str], for versions of pydantic that do not know it
    )


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
    data_parallel_size: int | None = Field(default=None, exclude=True)
    """Ranks that consume different samples; None before the profile launch. Not stored: the profile has it."""
    unused_micro_batch: int | None = Field(default=None, exclude=True)
    """Micro-batch in the user's file if the script feeds batches of another size; None otherwise. Not stored, too."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Variables of the environment that the script is given in addition to the tuner's environment."""
    batch_source: dict[str, Any] = Field(default_factory=dict)
    """Source of the batch size, apart from options: see ``optuna_dsat.runtime.adapt.batch_sources``."""

    @property
    def folder(self) -> Path:
        """The first folder of ``sys.path``: the script's, behind its links, or for a module the working directory."""
        return Path(self.cwd) if self.is_module else Path(self.script).resolve().parent

    @field_validator("arg_mappings")
    @classmethod
    def _check_mappings(cls, mappings: dict[str, str]) -> dict[str, str]:
        for key in mappings:
            if key not in (*MAPPABLE, BF16_ENABLED):
                raise ValueError(f"an argument cannot be mapped to {key!r:.60}; {', '.join(MAPPABLE)} can")
        return mappings


class MethodOptions(_Frozen, AshaSettings, RandomSettings, GuidedSettings):
    """Options of the search methods; each method reads its own."""


class StudySpec(_Frozen, SearchSettings):
    """Everything a study needs to run or to be resumed. Stored with the study; holds no secret and no storage URL."""

    name: str
    method: str
    options: MethodOptions = MethodOptions()
    script: ScriptSpec
    ds_config: dict[str, Any]
    """The user's DeepSpeed config as read."""
    device: Literal["cuda", "cpu"]
    slots_per_trial: int = Field(ge=1)
    """Ranks of one launch, on all its nodes: GPUs, or CPU processes."""
    device_memory_bytes: int | None = Field(default=None, gt=0)
    """Memory that one rank may allocate, in bytes; None for all of the device's."""
    free_memory: bool = False
    """Whether that is a share of the memory available when the search was started, which differs between starts."""

    @model_validator(mode="before")
    @classmethod
    def _stages_of_method(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("zero_stages") is None:
            return {**values, "zero_stages": default_stages(str(values.get("method")))}
        return values

    @model_validator(mode="after")
    def _check(self) -> StudySpec:
        name = self.name
        readable = name.strip() and name.isprintable() and len(name.encode()) <= _MOST_NAME_BYTES
        if not readable or name in (".", "..") or "/" in name or name.startswith("-"):
            rule = f"no slash, no hyphen first, no control characters, not blank, at most {_MOST_NAME_BYTES} bytes"
            raise ValueError(f"--study is {name!r}; it names a folder and is an argument of commands: {rule}")
        try:
            json.dumps(self.model_dump(), ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError as error:
            result = repr(error.object[max(0, error.start - 20) : error.end])
            raise ValueError(f"{result} is not UTF-8, as studies are stored: write it otherwise") from None
        if self.method not in METHODS:
            raise ValueError(f"the method is {self.method!r}; it must be one of {', '.join(METHODS)}")
        if self.metric not in METRICS:
            raise ValueError(f"--metric is {self.metric!r}; it must be one of {', '.join(METRICS)}")
        if not self.stages or not set(self.stages) <= set(ZERO_STAGES):
            raise ValueError(f"--zero-stages is {list(self.stages)}; stages are 0, 1, 2 and 3")
        if self.end_profile_step < self.start_profile_step:
            raise ValueError(
                f"--end-profile-step is {self.end_profile_step}, before --start-profile-step {self.start_profile_step}"
            )
        ranks = self.data_parallel_ranks
        if self.train_batch_size is not None and self.train_batch_size % ranks:
            raise ValueError(
                f"--train-batch-size is {self.train_batch_size}, no multiple of the number of a launch's ranks with "
                f"different samples, {ranks}"
            )
        if self.batch == "keep" and self.train_batch_size is not None:
            raise ValueError(
                f"--batch keep keeps your config's global batch, --train-batch-size {self.train_batch_size} another; "
                "give one of them"
            )
        most = self.max_train_batch_size
        if most is not None and most < ranks:
            raise ValueError(f"--max-train-batch-size is {most}, less than one sample for each of {ranks} ranks")
        if most is not None and self.train_batch_size is not None and self.train_batch_size > most:
            raise ValueError(f"--train-batch-size {self.train_batch_size} is above --max-train-batch-size {most}")
        if self.slots_per_trial % self.nodes_per_trial:
            raise ValueError(
                f"--nodes-per-trial is {self.nodes_per_trial}, over which {self.slots_per_trial} ranks cannot be "
                "spread evenly"
            )
        if self.on == "here" and (self.nodes_per_trial > 1 or self.gpus_per_node):
            raise ValueError("--nodes-per-trial and --gpus-per-node are for a cluster: say which by --on slurm or ray")
        if self.max_slots is not None and self.max_slots < self.slots_per_trial:
            raise ValueError(f"--max-slots is {self.max_slots}, but one launch takes {self.slots_per_trial}")
        self._check_only()
        return self

    def _check_only(self) -> None:
        """Raise for options that contradict ``--only``."""
        for name in self.only or ():
            if name in (self.no_tune or ()):
                raise ValueError(f"{name} is given to both --only and --no-tune; use one of them")
            if name in (self.fix or {}):
                raise ValueError(f"{name} is given to both --only and --fix, which leaves it a single value; use one")
        if not self.only:
            return
        if MICRO_BATCH not in self.only and self.divisible_by > 1:
            raise ValueError(
                "--divisible-by is about the micro-batch, which --only leaves as your config has it; add --only "
                "batch, or drop one of them"
            )
        if self.nvme_path is not None and not {OFFLOAD_OPTIMIZER, OFFLOAD_PARAM} & set(self.only):
            raise ValueError(
                "--nvme-path is for offloads, which --only leaves as your config has them; add --only "
                "offload_optimizer, or drop one of them"
            )

    @property
    def kept_knobs(self) -> tuple[str, ...]:
        """Knobs that stay as the user's config has them: ``no_tune``, or all but ``only``."""
        if not self.only:
            return tuple(self.no_tune or ())
        return tuple(name for name in NAMES if name not in (*self.only, *(self.fix or ())))

    @property
    def stages(self) -> tuple[int, ...]:
        """ZeRO stages to search; by default the method's stages, and that of the config where it stays."""
        if self.only and ZERO_STAGE in self.kept_knobs:
            stage = zero_section(effective(self.ds_config)).get("stage", 0)
            return (0 if stage == AUTO else stage,)
        if self.only and ZERO_STAGE in (self.fix or {}):
            return ZERO_STAGES
        stages = self.zero_stages
        return (stages,) if isinstance(stages, int) else tuple(stages or ())

    @property
    def nvme_folder(self) -> str | None:
        """Directory for NVMe offload; None for no such offload."""
        return None if self.nvme_path is None else os.fspath(self.nvme_path)

    @property
    def data_parallel_ranks(self) -> int:
        """Ranks of a launch that train different samples, by the config until the profile launch shows them."""
        return self.script.data_parallel_size or data_parallel_ranks(effective(self.ds_config), self.slots_per_trial)

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

    @property
    def source(self) -> Source:
        """Source of the script."""
        script = self.script
        return Source(script=script.script, is_module=script.is_module, cwd=Path(script.cwd), python=self.python)

    def with_script(self, **changes: Any) -> StudySpec:
        """Return the spec with other values of fields of its script."""
        return self.model_copy(update={"script": self.script.model_copy(update=changes)})

    def identity(self) -> dict[str, Any]:
        """Return what makes results comparable, without budgets, time-outs and output directory, which may change."""
        budget = {"name", "free_memory"} | {name for name, item in options_in(SearchSettings).items() if item.budget}
        ends = {name for name, option in options_in(MethodOptions).items() if option.budget}
        memory = {"device_memory_bytes": "free"} if self.free_memory else {}
        identity = self.stored(exclude={**dict.fromkeys(budget, True), "options": ends}) | memory
        if not self.script.is_module:
            identity["script"]["script"] = os.path.realpath(self.script.script)  # a link to it is the same script
        return identity

    def stored(self, **kwargs: Any) -> dict[str, Any]:
        """Return the spec as it is stored, for JSON; takes the arguments of ``model_dump``."""
        return self.model_dump(mode="json", by_alias=True, **kwargs)


_OPTIONS = {"name": "study", "slots_per_trial": "gpus-per-trial"}
"""Field -> option, where that has another name."""


def make_spec(**values: Any) -> StudySpec:
    """Build a spec; an invalid value raises ``UsageError``, which names option, value and rule in one line."""
    try:
        return StudySpec(**values)
    except ValidationError as error:
        first = error.errors()[0]
        field = next((str(name) for name in first["loc"] if name != "options"), "")
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
    is_retry: bool = False
    """Whether the same search began at another number of ranks, and has shown how it launches."""
    callbacks: Sequence[Callable[[optuna.Study, optuna.trial.FrozenTrial], None]] = ()
    """Called after each launched trial, as the callbacks of ``optuna.Study.optimize``."""
