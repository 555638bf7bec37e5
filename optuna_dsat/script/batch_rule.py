"""How a script's batch size follows each configuration: pure guesses from what a profile launch noted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from optuna_dsat.config.ds_config import MICRO_BATCH, TRAIN_BATCH
from optuna_dsat.runtime.adapt.parsers import means_batch, means_elsewhere, means_length, names_training_batch
from optuna_dsat.runtime.events import BatchSourcesFound

__all__ = ["BatchRule", "guesses", "held", "loads_all", "samples_per_rank", "varying"]

_MOST_GUESSES = 6
"""Guesses that are worth a launch each."""


@dataclass(frozen=True, kw_only=True)
class BatchRule:
    """What sets a script's batch size, and so how it follows a configuration."""

    kind: Literal["config", "option", "setting", "loader", "attribute", "held"]
    """The DeepSpeed config, an option of its command line, a number in a settings file, what makes its batches (data
    loaders and their like), an attribute of a data set that batches by itself, or nothing that can follow.
    """
    own: int
    """Samples per rank and forward pass as the script says by itself."""
    option: str = ""
    """``option``: its name, such as ``--batch-size``; one that ends with ``=`` is an override ``key=value``."""
    counts: str = MICRO_BATCH
    """``option``, ``setting``: key of the DeepSpeed config that it counts: the micro-batch or the global batch."""
    file: str = ""
    """``setting``: the settings file; else the source that makes the data loader, uses the data set or, for ``held``,
    feeds the engine.
    """
    key: str = ""
    """``setting``: its dotted key; ``attribute``: class and name."""
    line: int = 0
    """Line of the source; 0 if there is none."""
    rows: tuple[int, int] = (1, 1)
    """Rows that the engine is fed for a number of samples: (2, 1) where each sample is fed as two views, or as a pair.
    """
    sizes: tuple[int, int] | None = None
    """``held``: least and most samples of the script's batches, where they differ from step to step; None if they do
    not.
    """

    def __post_init__(self) -> None:
        if self.counts not in (MICRO_BATCH, TRAIN_BATCH):
            raise ValueError(f"an option counts {MICRO_BATCH} or {TRAIN_BATCH}, not {self.counts!r:.60}")

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> BatchRule:
        """Build from what ``to_json`` of this or an older version returned."""
        known = {key: value for key, value in record.items() if key in {one.name for one in fields(cls)}}
        pairs = {key: tuple(known[key]) for key in ("rows", "sizes") if known.get(key) is not None}
        return cls(**{**known, **pairs})

    def to_json(self) -> dict[str, Any]:
        """Return what ``from_json`` reads back."""
        return asdict(self)

    @property
    def is_likely(self) -> bool:
        """Whether its name means a batch size, or it makes the batches."""
        return self.kind == "loader" or means_batch(self.option or self.key)

    @property
    def arg_mappings(self) -> dict[str, str]:
        """Key of the DeepSpeed config -> option of the script that follows it."""
        return {self.counts: self.option} if self.kind == "option" else {}

    def source(self, *, ranks: int) -> dict[str, Any]:
        """Return what a launch needs to know (``runtime/adapt/batch_sources.py``); of an option, its rows alone.

        One whose batches are held is told so: what its script feeds the engine is not compared with the config.

        Args:
            ranks: Data-parallel ranks, for a setting that counts the global batch.
        """
        rows = {} if self.rows == (1, 1) else {"rows": list(self.rows)}
        if self.kind == "loader":
            return {"kind": "loader", "own": self.own, **rows}
        if self.kind == "attribute":
            return {"kind": "attribute", "key": self.key, "own": self.own, **rows}
        if self.kind == "setting":
            scale = ranks if self.counts == TRAIN_BATCH else 1
            return {"kind": "setting", "file": self.file, "key": self.key, "own": self.own, "scale": scale, **rows}
        return {"kind": "held", **rows} if self.kind == "held" else rows

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
        if self.kind == "config":
            return f"The script feeds the engine {self._rows_in_words}: samples are counted, not rows."
        rows = "" if self.rows == (1, 1) else f" and feeds the engine {self._rows_in_words}"
        return f"The script takes its batch size from {self._place()}{rows}; it follows each configuration."

    @property
    def _rows_in_words(self) -> str:
        rows, samples = self.rows
        return f"{rows} rows for each sample" if samples == 1 else f"{rows} rows for {samples} samples"

    @property
    def multiple(self) -> int:
        """Micro-batches are multiples of this number: others would be fed as no whole number of rows."""
        return self.rows[1] if self.kind != "held" else 1

    def scaled(self, per_row: int) -> int:
        """Return a quantity per sample from one per row."""
        return per_row * self.rows[0] // self.rows[1]

    def _place(self) -> str:
        if self.kind == "option":
            return f"{self.option.rstrip('=')} (now {self.own})"
        if self.kind == "setting":
            return f"{self.key} in {Path(self.file).name} (now {self.own})"
        if self.kind == "attribute":
            return f"{self.key} of its data set ({Path(self.file).name}, line {self.line}, now {self.own})"
        return f"its data loader ({Path(self.file).name}, line {self.line}, now {self.own})"

    def _why_held(self) -> str:
        fed = f"; the batches go to the model at {Path(self.file).name}, line {self.line}" if self.line else ""
        if self.rows != (1, 1):
            count = self.own * self.rows[0] // self.rows[1]
            return f"The engine is fed {count} rows at a batch size of {self.own}, in no fixed proportion to it{fed}"
        return f"What sets the script's batch size ({self.own}) was not found{fed}"

    def advice(self, config: Mapping[str, Any]) -> str:
        """Return what to change in the script before its command trains with ``config``; empty for nothing."""
        if self.kind in ("config", "option", "held") or config.get(MICRO_BATCH) == self.own:
            return ""
        size = config[self.counts if self.kind == "setting" else MICRO_BATCH]
        where = {
            "setting": f"{self.key} in {self.file}",
            "attribute": f"{self.key}, used at {self.file}:{self.line},",
        }.get(self.kind, f"the batch size at {self.file}:{self.line}")
        return f"Set {where} to {size}: the script takes its batch size from there, and DeepSpeed does not change it."


def held(own: int, *, found: BatchSourcesFound | None = None, present: int | None = None, ranks: int = 1) -> BatchRule:
    """Return the rule of a script whose batch size stays as it is, with the place that feeds the engine.

    The size is that of the user's config where a number of the script's confirms it, or where none confirms what the
    engine was fed: the engine is fed in other units then, such as views, pairs or packed sequences. Else it is what the
    engine was fed.

    Args:
        own: Rows per rank and forward pass that the engine was fed.
        found: What the profile launch noted; None for nothing.
        present: Micro-batch of the user's config; None if it is not to be kept.
        ranks: Data-parallel ranks.
    """
    if found is None:
        return BatchRule(kind="held", own=own)
    place: Mapping[str, Any] = next(iter(found.fed_at), {"file": "", "line": 0})
    rule = BatchRule(kind="held", own=own, file=str(place["file"]), line=int(place["line"]))
    if present in (None, 1, own):
        return rule
    is_confirmed = any(map(_names_it, _of_size(found, present, fed=own, ranks=ranks)))
    if not is_confirmed and (own % present or any(one.is_likely for one in _of_size(found, own, fed=own, ranks=ranks))):
        return rule
    return replace(rule, own=present, rows=Fraction(own, present).as_integer_ratio())


def varying(own: int, *, sizes: Sequence[int]) -> BatchRule:
    """Return the rule of a script whose batches differ in size: bucketed or packed by their tokens, say.

    Args:
        own: Micro-batch of the user's config.
        sizes: Samples of the batches that were seen.
    """
    return BatchRule(kind="held", own=own, sizes=(min(sizes), max(sizes)))


def guesses(
    found: BatchSourcesFound, *, own: int, ranks: int, present: int | None = None, configured: int | None = None
) -> list[BatchRule]:
    """Return what may set the batch size, likeliest first: options, settings files, data loaders.

    Where the engine was fed more rows than the micro-batch of the user's config, a number of that micro-batch comes
    first: each sample may be several rows (views, pairs, groups).

    Args:
        found: What the profile launch noted.
        own: Rows per rank and forward pass that its engine was fed.
        ranks: Data-parallel ranks.
        present: Micro-batch of the user's config; None if it is not known.
        configured: Micro-batch of the profile launch, which the rows may be a multiple of; None if they cannot.
    """
    as_config = [] if present is None or present == own else _of_size(found, present, fed=own, ranks=ranks)
    named = [rule for rule in as_config if _names_it(rule)]
    other = [
        rule
        for rule in as_config
        if not _names_it(rule) and rule.counts == MICRO_BATCH and not means_elsewhere(_last(rule.option or rule.key))
    ]
    alike = _of_size(found, own, fed=own, ranks=ranks)
    smaller = [
        rule
        for size in sorted(_batch_sizes(found) - {present or own, own}, reverse=True)
        if 1 < size < own and own % size == 0
        for rule in _of_size(found, size, fed=own, ranks=1)
        if _names_it(rule)
    ]
    follows = []
    if configured is not None and own % configured == 0:
        follows = [BatchRule(kind="config", own=present or configured, rows=(own // configured, 1))]
    likely = [rule for rule in alike if rule.is_likely]
    unlikely = [rule for rule in alike if not rule.is_likely]
    if present is not None and own < present:  # no number of the script's was used whole
        return [*likely, *follows, *unlikely][:_MOST_GUESSES]
    return [*[*named, *likely, *smaller, *other, *unlikely][: _MOST_GUESSES - len(follows)], *follows]


def _names_it(rule: BatchRule) -> bool:
    """Whether a rule's name means a batch size of training, or it makes the batches."""
    return rule.kind == "loader" or names_training_batch(rule.option or rule.key)


def _batch_sizes(found: BatchSourcesFound) -> set[int]:
    """Return the numbers whose names mean a batch size of training, and those of the loaders that feed the engine."""
    named = [*found.options.items(), *((str(one["key"]), int(one["value"])) for one in found.settings)]
    loaded = {one["batch_size"] for one in found.loaders if one["trains"] and one["batch_size"] is not None}
    return {value for name, value in named if names_training_batch(name)} | loaded


def _of_size(found: BatchSourcesFound, size: int, *, fed: int, ranks: int) -> list[BatchRule]:
    """Return what may set a batch of a size, likeliest first.

    Args:
        found: What the profile launch noted.
        size: Samples per rank and forward pass.
        fed: Rows that the engine was fed.
        ranks: Data-parallel ranks.
    """
    rows = Fraction(fed, size).as_integer_ratio()
    options = [
        BatchRule(kind="option", own=size, option=name, counts=counts, rows=rows)
        for name, counts in _matching(found.options.items(), own=size, ranks=ranks)
    ]
    in_files = {(str(one["file"]), str(one["key"])): int(one["value"]) for one in found.settings}
    settings = [
        BatchRule(kind="setting", own=size, file=file, key=key, counts=counts, rows=rows)
        for (file, key), counts in _matching(
            [((file, key), value) for (file, key), value in in_files.items()], own=size, ranks=ranks
        )
    ]
    feeding = sorted((one for one in found.loaders if one["batch_size"] == size), key=lambda one: not one["trains"])
    loaders = [
        BatchRule(kind="loader", own=size, file=str(one["file"]), line=int(one["line"]), rows=rows)
        for one in feeding
        if not one.get("attribute") and (one["trains"] or size == fed)
    ]
    attributes = {
        one["attribute"]: BatchRule(
            kind="attribute",
            own=size,
            file=str(one["file"]),
            line=int(one["line"]),
            key=str(one["attribute"]),
            rows=rows,
        )
        for one in reversed(feeding)
        if one.get("attribute")
    }
    named = (*options, *settings, *reversed(attributes.values()))
    likely = [rule for rule in named if means_batch(rule.option or rule.key)]
    return [*likely, *loaders[:1], *(rule for rule in named if rule not in likely)]


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
    loader = _counted_loader(found, own=own)
    return None if loader is None else int(loader["samples"])


def loads_all(found: BatchSourcesFound) -> bool:
    """Whether each rank's loader that feeds the engine loads all samples of its data set."""
    loader = _counted_loader(found, own=None)
    return loader is not None and bool(loader.get("loads_all"))


def _counted_loader(found: BatchSourcesFound, *, own: int | None) -> Mapping[str, Any] | None:
    counted = [loader for loader in found.loaders if loader["trains"] and loader["samples"]]
    alike = [loader for loader in counted if loader["batch_size"] == own] or counted
    return min(alike, key=lambda loader: int(loader["samples"]), default=None)
