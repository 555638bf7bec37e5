"""Environment variables that describe this rank; no other module of the runtime reads them."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from optuna_dsat.runtime.launch_plan import LAUNCH_ENV, LaunchPlan

__all__ = ["MANUAL_INIT_ENV", "Rank", "World", "current_plan", "initializes_distributed_manually"]

MANUAL_INIT_ENV = "OPTUNA_DSAT_MANUAL_INIT_DISTRIBUTED"
"""Environment variable of a ``DeepSpeedTrial`` that initializes ``torch.distributed`` itself."""

_MANUAL_INIT = (MANUAL_INIT_ENV, "DET_MANUAL_INIT_DISTRIBUTED")
_OFF = frozenset({"", "0", "false", "no", "off"})


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One process of a launch, as torchrun describes it (``RANK``, ``LOCAL_RANK``, ...)."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    host: str
    launch_path: str
    """Path of ``launch.json``."""
    can_compile: bool
    """Whether a C++ compiler and ninja are found, so that DeepSpeed can build its operators."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Rank:
        """Read the environment (this process's unless given).

        Raises:
            ValueError: If no launch description is named, or a rank variable is not a number.
        """
        env = os.environ if environ is None else environ
        launch_path = env.get(LAUNCH_ENV, "")
        if not launch_path:
            raise ValueError(
                f"{LAUNCH_ENV} names no launch description. The runtime is started by optuna-dsat; "
                "to train with a config, run the script itself with torchrun or deepspeed."
            )
        world_size = _number(env, "WORLD_SIZE", 1)
        return cls(
            rank=_number(env, "RANK", 0),
            local_rank=_number(env, "LOCAL_RANK", 0),
            world_size=world_size,
            local_world_size=_number(env, "LOCAL_WORLD_SIZE", world_size),
            host=socket.gethostname(),
            launch_path=launch_path,
            can_compile=_can_compile(env),
        )

    @property
    def local_ranks(self) -> range:
        """Global ranks on this host (torchrun numbers them contiguously)."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_world_size)


@dataclass(frozen=True, kw_only=True)
class World:
    """Rank and size of a process group started by torchrun, in a launch or not."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> World:
        """Read the environment (this process's unless given); without torchrun the size is 1.

        Raises:
            ValueError: If a variable is not a number.
        """
        env = os.environ if environ is None else environ
        size = _number(env, "WORLD_SIZE", 1)
        return cls(
            rank=_number(env, "RANK", 0),
            size=size,
            local_rank=_number(env, "LOCAL_RANK", 0),
            local_size=_number(env, "LOCAL_WORLD_SIZE", size),
        )


def initializes_distributed_manually(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether the user's code initializes ``torch.distributed`` itself; Determined's variable is read too."""
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


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} is a whole number, set by torchrun; got {text!r}.") from None


def _can_compile(env: Mapping[str, str]) -> bool:
    path = env.get("PATH")
    compilers = [env["CXX"]] if env.get("CXX") else ["c++", "g++"]
    found = any(shutil.which(name.split()[0], path=path) for name in compilers)
    return found and shutil.which("ninja", path=path) is not None
