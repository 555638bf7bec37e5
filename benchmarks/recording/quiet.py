"""What counts as a quiet machine: looked at before each launch, while its steps are measured, and over all of it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil

from optuna_dsat.launch.beside import busy_seconds
from optuna_dsat.launch.conditions import Conditions

__all__ = ["LOOK_S", "QuietRule", "Surroundings", "Watch", "stolen_seconds", "tree_seconds"]

LOOK_S = 0.2
"""Length of one look at an idle machine: twenty of the kernel's ticks for each core."""
_PAUSE_S = 1.0
"""Pause between two looks while the machine is not quiet."""


@dataclass(frozen=True, kw_only=True)
class QuietRule:
    """Largest shares of the cores' time that leave a launch quiet."""

    before: float = 0.10
    """Of processes that are not the recorder's in the moment before the launch."""
    others: float = 0.06
    """Of processes that are neither the launch's nor the recorder while the steps that count were measured."""
    stolen: float = 0.02
    """Of the hypervisor (``steal``) from the launch's start to its end."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What went on beside a launch; shares are of the time of the cores that it might use, None where unknown."""

    before: float | None = None
    others: float | None = None
    stolen: float | None = None
    on_gpus: tuple[str, ...] = ()
    """Other processes on its GPUs, and NVML's reasons for low clocks."""

    def breaches(self, rule: QuietRule) -> tuple[str, ...]:
        """Return in words what of it breaks the rule; empty for a quiet launch. What is unknown breaks it, too."""
        found = []
        for name, limit in asdict(rule).items():
            share = getattr(self, name)
            if share is None:
                found.append(f"{name} unknown")
            elif share > limit:
                found.append(f"{name} {share:.0%}")
        return (*found, *self.on_gpus)

    def to_json(self) -> dict[str, Any]:
        """Return the shares, rounded to what ticks can tell."""
        shares: Mapping[str, Any] = asdict(self)
        found = {
            name: share if share is None else round(share, 3) for name, share in shares.items() if name != "on_gpus"
        }
        return {**found, **({"on_gpus": list(self.on_gpus)} if self.on_gpus else {})}


@dataclass(kw_only=True)
class Watch:
    """Looks at the machine before and during launches.

    ``patience_s`` is what all waits for a quiet moment may take together; when it is spent, launches go ahead and are
    marked.
    """

    rule: QuietRule = field(default_factory=QuietRule)
    patience_s: float = 300.0
    cores: Collection[int] = field(default_factory=lambda: os.sched_getaffinity(0))
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    busy: Callable[[Collection[int]], float | None] = busy_seconds
    stolen: Callable[[Collection[int]], float | None] = lambda cores: stolen_seconds(cores)
    own: Callable[[], float] = time.process_time
    """CPU time of the recorder, which follows a launch as a search does."""
    tree: Callable[[], float] = lambda: tree_seconds()
    """CPU time of the recorder and of the processes that it has started and that live."""
    on_wait: Callable[[str], None] = lambda _: None

    def __post_init__(self) -> None:
        self._before: float | None = None
        self._began, self._own_s = self.clock(), self.own()
        self._stolen_s: float | None = None

    def wait(self) -> None:
        """Wait for a quiet moment while patience lasts; called before each launch."""
        said = False
        while True:
            self._before = self._look()
            if self._before is None or self._before <= self.rule.before or self.patience_s <= 0:
                break
            if not said:
                self.on_wait(f"the machine is not quiet: others take {self._before:.0%}; waiting ...")
                said = True
            began = self.clock()
            self.sleep(_PAUSE_S)
            self.patience_s -= self.clock() - began
        self._began, self._own_s, self._stolen_s = self.clock(), self.own(), self.stolen(self.cores)

    def _look(self) -> float | None:
        """Return the share of the cores' time that others use in a short moment; None if unknown."""
        own, began, first = self.tree(), self.clock(), self.busy(self.cores)
        self.sleep(LOOK_S)
        passed_s, last = self.clock() - began, self.busy(self.cores)
        if first is None or last is None:
            return None
        own = max(0.0, self.tree() - own)
        return max(0.0, last - first - own) / (passed_s * len(self.cores))

    def surroundings(self, conditions: Conditions) -> Surroundings:
        """Return what went on beside the launch since ``wait``.

        Args:
            conditions: Of the launch's report, which knows its processes.
        """
        core_s, stolen_s = (self.clock() - self._began) * len(self.cores), self.stolen(self.cores)
        known = self._stolen_s is not None and stolen_s is not None and core_s > 0
        own = (self.own() - self._own_s) / core_s if core_s > 0 else 0.0
        others = conditions.others_share
        return Surroundings(
            before=self._before,
            others=None if others is None else max(0.0, others - own),
            stolen=((stolen_s or 0.0) - (self._stolen_s or 0.0)) / core_s if known else None,
            on_gpus=(*conditions.gpu_processes, *conditions.throttle_reasons),
        )


def tree_seconds() -> float:
    """Return the CPU time of this process and of its living descendants, each for itself."""
    total = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def stolen_seconds(cores: Collection[int]) -> float | None:
    """Return the time that a hypervisor has taken from cores since the machine's start; None if unknown."""
    try:
        times = psutil.cpu_times(percpu=True)
        return float(sum(getattr(times[core], "steal", 0.0) for core in cores))
    except (OSError, IndexError):
        return None
