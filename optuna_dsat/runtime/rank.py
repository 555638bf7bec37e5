"""Environment variables that describe this rank; no other module of the runtime reads them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optuna_dsat.runtime.isolation.world import WorldPlan
from optuna_dsat.runtime.measure.engine import MOST_SKIPPED_STEPS

_MOST_CONTINUED_STEPS = 100_000
"""Bound on the steps of a launch that may measure further trials."""

LAUNCH_ENV = "OPTUNA_DSAT_LAUNCH"
"""Environment variable with the path of ``launch.json``."""
OF_JOB = frozenset({"$MASTER_ADDR", "$MASTER_PORT"})
_SAME_AS = OF_JOB | {
    *("$RANK", "$LOCAL_RANK", "$WORLD_SIZE", "$LOCAL_WORLD_SIZE", "$GROUP_RANK", "$GROUP_WORLD_SIZE"),
}
"""Values of variables, such as ``SLURM_PROCID=$RANK``, that have the value of a variable of torchrun in each rank. A
value in ``OF_JOB`` is for a launch outside of a job, which has its own."""
CORES_ENV = "OPTUNA_DSAT_CORES"
"""Environment variable with the cores of each rank on this machine, a list of lists as JSON."""


def names_rank(value: str) -> bool:
    """Return whether the value of a variable stands for a variable of torchrun."""
    return value in _SAME_AS


def set_rank_variables(environ: MutableMapping[str, str]) -> None:
    """Give variables that stand for a variable of torchrun its value in this rank."""
    for name, value in [*environ.items()]:
        if names_rank(value) and value[1:] in environ:
            environ[name] = environ[value[1:]]


@dataclass(frozen=True)
class LaunchPlan:
    """Description of a launch; the same for all its ranks."""

    launch_id: str
    purpose: str
    """``profile``, ``trial``, ``confirm`` or ``full`` (runs the script to its end without measuring)."""
    events_dir: str
    """Folder of the event files, ``rank{R}.jsonl``."""
    log_dir: str
    """Folder of the ranks' output, ``rank{R}.stdout.log`` and ``rank{R}.stderr.log``."""
    config_path: str
    """The launch's DeepSpeed config file."""
    user_config_path: str
    """The user's config file; ``config_path`` replaces it in the script's arguments."""
    trackers_dir: str = ""
    """Folder for logs of torch's ``SummaryWriter``; empty to keep the script's folder."""
    leavings: str = ""
    """Clean-up journal of files that ranks may leave outside the run directory; empty for no journal."""
    world: WorldPlan = field(default_factory=WorldPlan)
    """The launch's view of the file system."""
    overlay: Mapping[str, Any] = field(default_factory=dict)
    """Merged into the config that the script passes to ``deepspeed.initialize``; None removes a key."""
    batch_source: Mapping[str, Any] = field(default_factory=dict)
    """Source of the script's batch size, unless it is an option: ``follow`` of ``runtime/adapt/batch_sources.py``."""
    end_profile_step: int = 5
    """Last measured global step; every rank exits after it. Steps that the loss scaler skips do not count."""
    device_memory_bytes: int | None = None
    """Memory limit per rank; None for no limit."""
    continues: bool = False
    """Whether ranks wait for an order after the last profile step (``runtime/measure/live.py``)."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Changes of the running engine by a continued launch: dotted key of the config -> value."""

    @property
    def root(self) -> Path:
        """The run directory."""
        return Path(self.events_dir).parent

    @property
    def measures(self) -> bool:
        """Whether steps are measured and the launch ends after ``end_profile_step``."""
        return self.purpose != "full"

    @property
    def most_steps(self) -> int:
        """Maximum number of global steps that the script may run, including steps that the loss scaler skips."""
        if self.continues:
            return _MOST_CONTINUED_STEPS
        return self.end_profile_step + MOST_SKIPPED_STEPS

    @classmethod
    def load(cls, path: str | Path) -> LaunchPlan:
        """Read the plan at ``path``.

        Raises:
            OSError: If the file cannot be read.
            ValueError: If it is not JSON.
        """
        record = json.loads(Path(path).read_text(encoding="utf-8"))
        return cls(**{**record, "world": WorldPlan.from_record(record["world"])})


MANUAL_INIT_ENV = "OPTUNA_DSAT_MANUAL_INIT_DISTRIBUTED"
"""Environment variable of a ``DeepSpeedTrial`` that initializes ``torch.distributed`` itself."""

_MANUAL_INIT = (MANUAL_INIT_ENV, "DET_MANUAL_INIT_DISTRIBUTED")
_OFF = frozenset({"", "0", "false", "no", "off"})


@dataclass(frozen=True)
class GroupRank:
    """Rank and size of a process group started by torchrun (``RANK``, ``LOCAL_RANK``, ...), in a launch or not."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> GroupRank:
        """Read the environment (this process's unless given); without torchrun the size is 1.

        Raises:
            ValueError: If a rank variable is not a number.
        """
        env = os.environ if environ is None else environ
        size = int(env.get("WORLD_SIZE") or 1)
        return GroupRank(
            rank=int(env.get("RANK") or 0),
            local_rank=int(env.get("LOCAL_RANK") or 0),
            world_size=size,
            local_world_size=int(env.get("LOCAL_WORLD_SIZE") or size),
        )


@dataclass(frozen=True)
class Rank(GroupRank):
    """A process of a launch."""

    launch_path: str
    """Path of ``launch.json``."""
    can_compile: bool
    """Whether a C++ compiler and ninja are found, so that DeepSpeed can build its operators."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Rank:
        """Read the environment (this process's unless given).

        Raises:
            ValueError: If the variable of the launch description is missing, or a rank variable is not a number.
        """
        env = os.environ if environ is None else environ
        if not env.get(LAUNCH_ENV):
            raise ValueError(
                f"{LAUNCH_ENV} names no launch description. The runtime is started by optuna-dsat; "
                "to train with a config, run the script itself with torchrun or deepspeed."
            )
        return cls(
            **vars(GroupRank.from_environment(env)),
            launch_path=env[LAUNCH_ENV],
            can_compile=can_compile(env),
        )

    @property
    def local_ranks(self) -> range:
        """Global ranks on this host (torchrun numbers them contiguously)."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_world_size)


def initializes_distributed_manually(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether the user's code initializes ``torch.distributed``; Determined's variable is read too."""
    env = os.environ if environ is None else environ
    return any(env.get(name, "").lower() not in _OFF for name in _MANUAL_INIT)


def current_plan() -> LaunchPlan | None:
    """Return the launch that this process belongs to; None outside of a launch.

    Raises:
        OSError: If its description cannot be read.
        ValueError: If it is not a launch description.
    """
    path = os.environ.get(LAUNCH_ENV, "")
    return LaunchPlan.load(path) if path else None


def can_compile(env: Mapping[str, str]) -> bool:
    """Return whether a C++ compiler and ninja are found."""
    path = env.get("PATH")
    compilers = [env["CXX"]] if env.get("CXX") else ["c++", "g++"]
    result = any(shutil.which(name.split()[0], path=path) for name in compilers)
    return result and shutil.which("ninja", path=path) is not None
