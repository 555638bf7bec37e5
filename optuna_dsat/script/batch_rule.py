"""How a script's batch size follows each configuration: pure guesses from what a profile launch noted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from optuna_dsat.config.ds_config import MICRO_BATCH, TRAIN_BATCH
from optuna_dsat.runtime.batch_names import means_batch, means_elsewhere, means_length, names_training_batch
from optuna_dsat.runtime.events import BatchSourcesFound

__all__ = ["BatchRule", "guesses", "held", "samples_per_rank", "varying"]

_MOST_GUESSES = 6
"""Guesses that are worth a launch each."""


@dataclass(frozen=True, kw_only=True)
class BatchRule:
    """What sets a script's batch size, and so how it follows a configuration."""

    kind: Literal["option", "setting", "loader", "attribute", "held"]
    """An option of its command line, a number in a settings file, what makes its batches (data loaders and their like),
    an attribute of a data set that batches by itself, or nothing that can follow.
    """
    own: int
    """Samples per rank and forward pass as the script says by itself."""
    option: str = ""
    """``option``: its name, such as ``--batch-size``; one that ends with ``=`` is an override ``key=value``."""
    counts: str = MICRO_BATCH
    """``option``, ``setting``: key of the DeepSpeed config that it counts: the micro-batch or the global batch."""
    file: str = ""
    """``setting``: the settings file; else the source that makes the data loader, uses the data set, has the constant
    or, for ``held`` without ``constant``, feeds the engine.
    """
    key: str = ""
    """``setting``: its dotted key; ``attribute``: class and name; ``held``: name of what the constant is given to."""
    line: int = 0
    """Line of the source; 0 if there is none."""
    constant: bool = False
    """``held``: whether the source has a constant of that value there."""
    sizes: tuple[int, int] | None = None
    """``held``: least and most samples of the script's batches, where they differ from step to step; None if they do
    not.
    """

    def __post_init__(self) -> None:
        if self.counts not in (MICRO_BATCH, TRAIN_BATCH):
            raise ValueError(f"an option counts {MICRO_BATCH} or {TRAIN_BATCH}, not {self.counts!r:.60}")

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> BatchRule:
        """Build from what ``to_json`` returned."""
        sizes = record.get("sizes")
        return cls(**{**record, "sizes": None if sizes is None else tuple(sizes)})

    def to_json(self) -> dict[str, Any]:
        """Return what ``from_json`` reads back."""
        return asdict(self)

    @property
    def arg_mappings(self) -> dict[str, str]:
        """Key of the DeepSpeed config -> option of the script that follows it."""
        return {self.counts: self.option} if self.kind == "option" else {}

    def source(self, *, ranks: int) -> dict[str, Any]:
        """Return what a launch is told (``optuna_dsat.runtime.batch_sources``); empty for an option.

        One whose batches are held is told so: what its script feeds the engine is not compared with the config.

        Args:
            ranks: Data-parallel ranks, for a setting that counts the global batch.
        """
        if self.kind == "loader":
            return {"kind": "loader", "own": self.own}
        if self.kind == "attribute":
            return {"kind": "attribute", "key": self.key, "own": self.own}
        if self.kind == "setting":
            scale = ranks if self.counts == TRAIN_BATCH else 1
            return {"kind": "setting", "file": self.file, "key": self.key, "own": self.own, "scale": scale}
        return {"kind": "held"} if self.kind == "held" else {}

    def announcement(self) -> str:
        """Return one line for the user: what was found, and whether the batch size follows."""
        if self.sizes is not None:
            least, most = self.sizes
            return (
                f"The script's batches differ in size from step to step ({least} to {most} samples in the first ones): "
                f"they stay as the script makes them, the micro-batch stays {self.own}, and stage, offload and buckets "
                "are tuned."
            )
        if self.kind == "held":
            return (
                f"{self._why_held()}: the micro-batch stays {self.own}, and stage, offload and buckets are tuned. Name "
                "its option with --arg-mapping train_micro_batch_size_per_gpu=--OPTION if it has one."
            )
        return f"The script takes its batch size from {self._place()}; it follows each configuration."

    def _place(self) -> str:
        if self.kind == "option":
            return f"{self.option.rstrip('=')} (now {self.own})"
        if self.kind == "setting":
            return f"{self.key} in {Path(self.file).name} (now {self.own})"
        if self.kind == "attribute":
            return f"{self.key} of its data set ({Path(self.file).name}, line {self.line}, now {self.own})"
        return f"its data loader ({Path(self.file).name}, line {self.line}, now {self.own})"

    def _why_held(self) -> str:
        where = f"{Path(self.file).name}, line {self.line}"
        if self.constant:
            named = f", {self.key}" if self.key else ""
            return f"The script's batch size ({self.own}) seems to be a constant ({where}{named})"
        fed = f"; the batches go to the model at {where}" if self.line else ""
        return f"What sets the script's batch size ({self.own}) was not found{fed}"

    def advice(self, config: Mapping[str, Any]) -> str:
        """Return what to change in the script before its command trains with ``config``; empty for nothing."""
        if self.kind in ("option", "held") or config.get(MICRO_BATCH) == self.own:
            return ""
        size = config[self.counts if self.kind == "setting" else MICRO_BATCH]
        where = {
            "setting": f"{self.key} in {self.file}",
            "attribute": f"{self.key}, used at {self.file}:{self.line},",
        }.get(self.kind, f"the batch size at {self.file}:{self.line}")
        return f"Set {where} to {size}: the script takes its batch size from there, and DeepSpeed does not change it."

    def advice_on_held(self) -> str:
        """Return how a batch size that was held as a constant of the source can be tuned; empty if it was not."""
        if self.kind != "held" or not self.constant:
            return ""
        return (
            f"The micro-batch was held at {self.own}, which seems to be a constant at {self.file}:{self.line}: "
            "write another value there and tune again, or take it from an option, which then follows by itself."
        )


def held(own: int, *, found: BatchSourcesFound | None = None, ranks: int = 1) -> BatchRule:
    """Return the rule of a script whose batch size stays as it is, with the place of its source that says so.

    That is a constant of the size, or of that of all ranks: one whose name means a batch size, else one on the lines
    that led to the engine's first input, else the only one of its value. Of several that are as likely none is named.

    Args:
        own: Samples per rank and forward pass that the engine was fed.
        found: What the profile launch noted; None for nothing.
        ranks: Data-parallel ranks.
    """
    if found is None:
        return BatchRule(kind="held", own=own)
    fitting = [one for one in found.constants if one["value"] in (own, own * ranks)]
    named = [one for one in fitting if names_training_batch(one["name"])]
    fed_at = {(one["file"], one["line"]) for one in found.fed_at}
    on_the_way = [one for one in fitting if (one["file"], one["line"]) in fed_at]
    for likely in (named, on_the_way, fitting):
        places = {(str(one["file"]), int(one["line"])): str(one["name"]) for one in likely}
        if len(places) == 1:
            ((file, line), name) = places.popitem()
            return BatchRule(kind="held", own=own, file=file, line=line, key=name, constant=True)
        if places:
            break
    place: Mapping[str, Any] = next(iter(found.fed_at), {"file": "", "line": 0})
    return BatchRule(kind="held", own=own, file=str(place["file"]), line=int(place["line"]))


def varying(own: int, *, sizes: Sequence[int]) -> BatchRule:
    """Return the rule of a script whose batches differ in size: bucketed or packed by their tokens, say.

    Args:
        own: Micro-batch of the user's config.
        sizes: Samples of the batches that were seen.
    """
    return BatchRule(kind="held", own=own, sizes=(min(sizes), max(sizes)))


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
    in_files = {(str(one["file"]), str(one["key"])): int(one["value"]) for one in found.settings}
    settings = [
        BatchRule(kind="setting", own=own, file=file, key=key, counts=counts)
        for (file, key), counts in _matching(
            [((file, key), value) for (file, key), value in in_files.items()], own=own, ranks=ranks
        )
    ]
    feeding = sorted((one for one in found.loaders if one["batch_size"] == own), key=lambda one: not one["trains"])
    loaders = [
        BatchRule(kind="loader", own=own, file=str(one["file"]), line=int(one["line"]))
        for one in feeding
        if not one.get("attribute")
    ]
    attributes = {
        one["attribute"]: BatchRule(
            kind="attribute", own=own, file=str(one["file"]), line=int(one["line"]), key=str(one["attribute"])
        )
        for one in reversed(feeding)
        if one.get("attribute")
    }
    named = (*options, *settings, *reversed(attributes.values()))
    likely = [rule for rule in named if means_batch(rule.option or rule.key)]
    unlikely = [rule for rule in named if not means_batch(rule.option or rule.key)]
    return [*likely, *loaders[:1], *unlikely][:_MOST_GUESSES]


def _matching(numbers: Any, *, own: int, ranks: int) -> list[tuple[Any, str]]:
    """Return (name, what it counts) of the numbers that are the batch of a rank or of all, likeliest names first.

    A number that is a length by its name is none: inputs that have time first would follow it as if it were one.
    """
    found = []
    for name, value in numbers:
        if means_length(_last(name)):
            continue
        if value == own:
            found.append((name, MICRO_BATCH))
        elif ranks > 1 and value == own * ranks:
            found.append((name, TRAIN_BATCH))
    return sorted(found, key=lambda one: (means_elsewhere(_last(one[0])), one[1] != MICRO_BATCH))


def _last(name: str | Sequence[str]) -> str:
    return name if isinstance(name, str) else name[-1]


def samples_per_rank(found: BatchSourcesFound, *, own: int | None = None) -> int | None:
    """Return the samples of one rank in an epoch of the loader that feeds the engine, None if none tells.

    Args:
        found: What a launch noted.
        own: Samples per rank and forward pass that its engine was fed; loaders of that batch size count before others.
    """
    told = [one for one in found.loaders if one["trains"] and one["samples"]]
    alike = [one for one in told if one["batch_size"] == own] or told
    return min((int(one["samples"]) for one in alike), default=None)
