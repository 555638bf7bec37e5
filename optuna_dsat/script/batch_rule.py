"""How a script's batch size follows each configuration: pure guesses from what a profile launch noted."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from optuna_dsat.config.ds_config import MICRO_BATCH, TRAIN_BATCH
from optuna_dsat.runtime.events import BatchSourcesFound

__all__ = ["BatchRule", "guesses", "held", "samples_per_rank"]

_BATCH = re.compile(r"batch|(^|[-_.])(m?bsz?|mbs|b)(=?$|[-_.=])", re.IGNORECASE)
"""Names that mean a batch size."""
_ELSEWHERE = re.compile(r"eval|valid|test|predict|infer|generat", re.IGNORECASE)
"""Names that mean another one than that of training."""
_MOST_GUESSES = 6
"""Guesses that are worth a launch each."""


@dataclass(frozen=True, kw_only=True)
class BatchRule:
    """What sets a script's batch size, and so how it follows a configuration."""

    kind: Literal["option", "setting", "loader", "held"]
    """An option of its command line, a number in a settings file, its data loaders, or nothing that was found."""
    own: int
    """Samples per rank and forward pass as the script says by itself."""
    option: str = ""
    """``option``: its name, such as ``--batch-size``; one that ends with ``=`` is an override of Hydra's."""
    counts: str = MICRO_BATCH
    """``option``, ``setting``: key of the DeepSpeed config that it counts: the micro-batch or the global batch."""
    file: str = ""
    """``setting``: the settings file; ``loader``: the source that makes the data loader."""
    key: str = ""
    """``setting``: its dotted key."""
    line: int = 0
    """``loader``: line of the source."""

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> BatchRule:
        """Build from what ``to_json`` returned."""
        return cls(**record)

    def to_json(self) -> dict[str, Any]:
        """Return what ``from_json`` reads back."""
        return asdict(self)

    @property
    def arg_mappings(self) -> dict[str, str]:
        """Key of the DeepSpeed config -> option of the script that follows it."""
        return {self.counts: self.option} if self.kind == "option" else {}

    def source(self, *, ranks: int) -> dict[str, Any]:
        """Return what the ranks of a launch are told (``optuna_dsat.runtime.batch_sources``); empty for an option.

        Args:
            ranks: Data-parallel ranks, for a setting that counts the global batch.
        """
        if self.kind == "loader":
            return {"kind": "loader", "own": self.own}
        if self.kind == "setting":
            scale = ranks if self.counts == TRAIN_BATCH else 1
            return {"kind": "setting", "file": self.file, "key": self.key, "own": self.own, "scale": scale}
        return {}

    def announcement(self) -> str:
        """Return one line for the user: what was found, and whether the batch size follows."""
        if self.kind == "held":
            return (
                f"What sets the script's batch size ({self.own}) was not found: the micro-batch stays {self.own}, and "
                "stage, offload and buckets are tuned. Name its option with --arg-mapping "
                "train_micro_batch_size_per_gpu=--OPTION if it has one."
            )
        return f"The script takes its batch size from {self._place()}; it follows each configuration."

    def _place(self) -> str:
        if self.kind == "option":
            return f"{self.option.rstrip('=')} (now {self.own})"
        if self.kind == "setting":
            return f"{self.key} in {Path(self.file).name} (now {self.own})"
        return f"its data loader ({Path(self.file).name}, line {self.line}, now {self.own})"

    def advice(self, config: Mapping[str, Any]) -> str:
        """Return what to change in the script before it trains with ``config``; empty if the command says it."""
        if self.kind not in ("setting", "loader") or config.get(MICRO_BATCH) == self.own:
            return ""
        size = config[self.counts if self.kind == "setting" else MICRO_BATCH]
        where = f"{self.key} in {self.file}" if self.kind == "setting" else f"the batch size at {self.file}:{self.line}"
        return f"Set {where} to {size}: the script takes its batch size from there, and DeepSpeed does not change it."


def held(own: int) -> BatchRule:
    """Return the rule of a script whose batch size stays as it is."""
    return BatchRule(kind="held", own=own)


def guesses(found: BatchSourcesFound, *, own: int, ranks: int) -> list[BatchRule]:
    """Return what may set the batch size, likeliest first: options, settings files, data loaders.

    Args:
        found: What the profile launch noted.
        own: Samples per rank and forward pass that its engine was fed.
        ranks: Data-parallel ranks.
    """
    options = [
        BatchRule(kind="option", own=own, option=name, counts=counts)
        for name, counts in _matching(found.options.items(), own=own, ranks=ranks)
    ]
    named = {(str(one["file"]), str(one["key"])): int(one["value"]) for one in found.settings}
    settings = [
        BatchRule(kind="setting", own=own, file=file, key=key, counts=counts)
        for (file, key), counts in _matching(
            [((file, key), value) for (file, key), value in named.items()], own=own, ranks=ranks
        )
    ]
    feeding = [one for one in found.loaders if one["trains"]] or list(found.loaders)
    loaders = [
        BatchRule(kind="loader", own=own, file=str(one["file"]), line=int(one["line"]))
        for one in feeding
        if one["batch_size"] == own
    ]
    likely = [rule for rule in (*options, *settings) if _BATCH.search(rule.option or rule.key)]
    unlikely = [rule for rule in (*options, *settings) if rule not in likely]
    return [*likely, *loaders[:1], *unlikely][:_MOST_GUESSES]


def _matching(numbers: Any, *, own: int, ranks: int) -> list[tuple[Any, str]]:
    """Return (name, what it counts) of the numbers that are the batch of a rank or of all, likeliest names first."""
    found = []
    for name, value in numbers:
        if value == own:
            found.append((name, MICRO_BATCH))
        elif ranks > 1 and value == own * ranks:
            found.append((name, TRAIN_BATCH))
    return sorted(found, key=lambda one: (_elsewhere(one[0]), one[1] != MICRO_BATCH))


def _elsewhere(name: str | Sequence[str]) -> bool:
    return _ELSEWHERE.search(name if isinstance(name, str) else name[-1]) is not None


def samples_per_rank(found: BatchSourcesFound, *, own: int | None = None) -> int | None:
    """Return the samples of one rank in an epoch of the loader that feeds the engine, None if none tells.

    Args:
        found: What a launch noted.
        own: Samples per rank and forward pass that its engine was fed; loaders of that batch size count before others.
    """
    told = [one for one in found.loaders if one["trains"] and one["samples"]]
    alike = [one for one in told if one["batch_size"] == own] or told
    return min((int(one["samples"]) for one in alike), default=None)
