"""Base class of the hooks that adapt trainers of libraries, which read the config before ``deepspeed.initialize``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from optuna_dsat.runtime.events import Event, TrainerFound
from optuna_dsat.runtime.overlay import LaidConfig, effective_config
from optuna_dsat.runtime.rank import LaunchPlan, Rank

__all__ = ["TrainerHook"]


class TrainerHook:
    """Patches a library once the script has imported it."""

    framework: str
    """``TrainerFound.framework``."""

    def __init__(self, *, plan: LaunchPlan, rank: Rank, write: Callable[[Event], None]) -> None:
        self._plan = plan
        self._rank = rank
        self._write = write
        self._reported = False

    def callbacks(self) -> dict[str, Callable[[Any], None]]:
        """Return module name -> function to call with the module once it is imported."""
        raise NotImplementedError

    def _laid(self, config: Mapping[str, Any], *, without: str = "") -> LaidConfig:
        """Return a library's copy of the config with the overlay applied, without a key that the library rejects."""
        laid = effective_config(config, self._plan.overlay)
        laid.pop(without, None)
        return LaidConfig(config, laid)

    def _report(self, *, micro_batch: int | None, accumulation: int, options: Mapping[str, str]) -> bool:
        """Record the trainer with the script's values, once; return whether this was the first call."""
        is_first, self._reported = not self._reported, True
        if is_first:
            self._write(
                TrainerFound(
                    rank=self._rank.rank,
                    time=time.time(),
                    framework=self.framework,
                    micro_batch=micro_batch,
                    gradient_accumulation_steps=accumulation,
                    options=options,
                )
            )
        return is_first
