"""The launch description: one JSON file that the launcher writes and the runtime of every rank reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from optuna_dsat.runtime.loss_scaling import MOST_SKIPPED_STEPS
from optuna_dsat.runtime.world import WorldPlan

__all__ = ["LAUNCH_ENV", "LaunchPlan"]

LAUNCH_ENV = "OPTUNA_DSAT_LAUNCH"
"""Environment variable that holds the path of ``launch.json``."""

_PURPOSES = ("profile", "trial", "confirm", "full")


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """Description of one launch; the same for all its ranks."""

    launch_id: str
    purpose: str
    """``profile``, ``trial``, ``confirm`` or ``full`` (runs the script to its end without measuring)."""
    events_dir: str
    """Folder of the event files, ``rank{R}.jsonl``."""
    log_dir: str
    """Folder of the ranks' output, ``rank{R}.stdout.log`` and ``rank{R}.stderr.log``."""
    config_path: str
    """The launch's own DeepSpeed config file."""
    user_config_path: str
    """The user's config file; ``config_path`` replaces it in the script's arguments."""
    trackers_dir: str = ""
    """Folder for logs of torch's ``SummaryWriter``; empty to keep the script's own folder."""
    leavings: str = ""
    """File in which ranks note what they may leave outside the run directory; empty to note nothing."""
    world: WorldPlan = field(default_factory=WorldPlan)
    """What the launch sees and changes of the file system."""
    overlay: Mapping[str, Any] = field(default_factory=dict)
    """Merged into the config that the script passes to ``deepspeed.initialize``; None removes a key."""
    batch_source: Mapping[str, Any] = field(default_factory=dict)
    """What the script's batch size follows by, apart from its options: see ``optuna_dsat.runtime.batch_sources``."""
    start_profile_step: int = 3
    """First measured global step, counted from 1."""
    end_profile_step: int = 5
    """Last measured global step; every rank exits after it. Steps that the loss scaler skips do not count."""
    device_memory_bytes: int | None = None
    """Memory limit of one rank; None for no limit."""

    def __post_init__(self) -> None:
        if self.purpose not in _PURPOSES:
            raise ValueError(
                f"purpose is one of {', '.join(_PURPOSES)}; launch {self.launch_id!r} has {self.purpose!r}."
            )
        if not 1 <= self.start_profile_step <= self.end_profile_step:
            raise ValueError(
                "Profile steps count from 1 and start no later than they end; "
                f"got start {self.start_profile_step}, end {self.end_profile_step}."
            )
        if self.device_memory_bytes is not None and self.device_memory_bytes < 1:
            raise ValueError(
                f"device_memory_bytes is positive or None; got {self.device_memory_bytes}. Give None for all there is."
            )

    @property
    def measures(self) -> bool:
        """Whether steps are measured and the launch ends after ``end_profile_step``."""
        return self.purpose != "full"

    @property
    def most_steps(self) -> int:
        """Most global steps that the script may have to run, those that the loss scaler skips included."""
        return self.end_profile_step + MOST_SKIPPED_STEPS

    @classmethod
    def load(cls, path: str | Path) -> LaunchPlan:
        """Read the plan at ``path``; unknown keys (from a newer launcher) are ignored.

        Raises:
            OSError: If the file cannot be read.
            ValueError: If it is not a launch description.
        """
        record = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(record, dict):
            raise ValueError(f"{path} holds no launch description: a JSON object is expected.")
        known = {f.name for f in fields(cls)}
        try:
            world = WorldPlan.from_record(record.get("world", {}))
            return cls(**{**{key: value for key, value in record.items() if key in known}, "world": world})
        except TypeError as error:
            raise ValueError(f"{path} holds no launch description: {error}.") from error
