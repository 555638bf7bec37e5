"""Infer from the profile launch how a script's batch size can follow each configuration. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from optuna_dsat.config.ds_config import GRADIENT_ACCUMULATION, MICRO_BATCH, TRAIN_BATCH, BatchTriangle
from optuna_dsat.config.record import Record
from optuna_dsat.runtime.adapt.parsers import means_batch, means_elsewhere, means_length, names_training_batch
from optuna_dsat.runtime.events import BatchSourcesFound
from optuna_dsat.script.arg_mapping import PASS_BATCH, RANK_BATCH

_MOST_GUESSES = 6
"""Maximum number of guesses; each costs a launch."""


@dataclass(frozen=True, kw_only=True)
class BatchRule(Record):
    """The source of a script's batch size, which determines how it follows a configuration."""

    kind: Literal["config", "option", "setting", "loader", "held"]
    """Kind of the source.

    The DeepSpeed config, a command-line option, a number in a settings file, a data loader, or nothing that can follow.
    """
    own: int
    """Samples per rank and forward pass that the script itself sets."""
    option: str = ""
    """``option``: its name, such as ``--batch-size``; a name that ends with ``=`` is an override ``key=value``.

    Two names, separated by a space, if the smaller of two batches counts.
    """
    counts: str = MICRO_BATCH
    """``option``, ``setting``: the key with the same meaning (``arg_mapping.MAPPABLE``)."""
    steps: int = 1
    """``option``, ``setting``: accumulation steps that the script divides its number by."""
    file: str = ""
    """``setting``: the settings file; ``held``: the source that feeds the engine; ``loader``: that makes the loader."""
    key: str = ""
    """``setting``: its dotted key."""
    line: int = 0
    """Line in the source file; 0 if unknown."""
    rows: tuple[int, int] = (1, 1)
    """(rows, samples) as fed to the engine: (2, 1) if each sample is fed as two views or as a pair."""
    keeps_file: bool = False
    """Whether the script finds the micro-batch of the user's file in it, as it fails with others there."""
    sizes: tuple[int, int] | None = None
    """``held``: smallest and largest batch in samples, if the size varies between steps; otherwise None."""

    @property
    def name(self) -> str:
        """Name of the option or dotted key of the setting; else empty."""
        return self.option or self.key

    @property
    def is_likely(self) -> bool:
        """Whether the name suggests a batch size, or the rule is a data loader."""
        return self.kind == "loader" or means_batch(self.name)

    @property
    def arg_mappings(self) -> dict[str, str]:
        """Key of the DeepSpeed config -> option of the script that follows it."""
        return {self.counts: self.option} if self.kind == "option" else {}

    def source(self, *, ranks: int) -> dict[str, Any]:
        """Return the source record for a launch (``runtime/adapt/batch_sources.py``); for an option, only its rows.

        With a ``held`` record, the launch does not compare the script's batches with the config.
        """
        rows = {} if self.rows == (1, 1) else {"rows": list(self.rows)}
        if self.kind == "loader":
            return {"kind": "loader", "own": self.own, **rows}
        if self.kind == "setting":
            scale = _units(ranks, self.steps)[self.counts]
            return {"kind": "setting", "file": self.file, "key": self.key, "own": self.own, "scale": scale, **rows}
        return {"kind": "held", **rows} if self.kind == "held" else rows

    def announcement(self, *, stated: object = None) -> str:
        """Return one line for the user: the source of the batch size, and whether it follows each configuration.

        ``stated`` is the micro-batch in the user's config.
        """
        if self.sizes is not None:
            least, most = self.sizes
            return (
                f"The script's batches differ in size from step to step ({least} to {most} samples in the first ones): "
                f"they stay as the script makes them, the micro-batch stays {self.own}, and stage, offload and buckets "
                "are tuned. Speed is in samples/s of the measured steps: a larger --end-profile-step averages more."
            )
        if self.kind == "held" and self.own * self.rows[0] == self.rows[1] != self.rows[0]:
            return (
                f"The engine is fed a single row at a batch size of {self.own}, as if the samples were packed into it: "
                f"the micro-batch stays {self.own}, and stage, offload and buckets are tuned."
            )
        if self.kind == "held":
            return (
                f"{self._why_held()}: the micro-batch stays {self.own}, and stage, offload and buckets are tuned. Name "
                "its option with --arg-mapping train_micro_batch_size_per_gpu=--OPTION if it has one; a constant, an "
                "environment variable or an INI file is not followed: use engine.train_micro_batch_size_per_gpu() in "
                "its place."
            )
        if self.kind == "config" and self.rows == (1, 1):
            return "The script's batch size follows its config; its inputs do not have a row for each sample."
        if self.kind == "config":
            return f"The script feeds the engine {self._rows_in_words}: samples are counted, not rows."
        rows = "" if self.rows == (1, 1) else f" and feeds the engine {self._rows_in_words}"
        differs = isinstance(stated, int) and stated != self.own
        now = f"now {self.own}, not {stated} as in the config" if differs else f"now {self.own}"
        now = now if self.counts == MICRO_BATCH else f"micro-batch {now}"
        place = f"its data loader ({Path(self.file).name}, line {self.line}, {now})"
        if self.kind != "loader":
            option = " and ".join(name.rstrip("=") for name in self.option.split())
            place = f"{option or f'{self.key} in {Path(self.file).name}'} ({now})"
        return f"The script takes its batch size from {place}{rows}; it follows each configuration."

    @property
    def _rows_in_words(self) -> str:
        rows, samples = self.rows
        return f"{rows} rows for each sample" if samples == 1 else f"{rows} rows for {samples} samples"

    @property
    def multiple(self) -> int:
        """Micro-batches must be multiples of this number to be fed as a whole number of rows."""
        return self.rows[1] if self.kind != "held" else 1

    def holds_steps(self, *, accumulation_option: str, ranks: int) -> bool:
        """Whether the accumulation steps must not change, because the script divides its number by its own steps.

        With as many steps as ranks, the script may divide by either.
        """
        follows = self.kind == "option" and accumulation_option and (self.counts == TRAIN_BATCH or self.steps != ranks)
        return self.steps > 1 and not follows

    def scaled(self, per_row: int) -> int:
        """Convert a quantity per row to a quantity per sample."""
        return per_row * self.rows[0] // self.rows[1]

    def _why_held(self) -> str:
        fed = f"; the batches go to the model at {Path(self.file).name}, line {self.line}" if self.line else ""
        if self.rows != (1, 1):
            count = self.own * self.rows[0] // self.rows[1]
            return f"The engine is fed {count} rows at a batch size of {self.own}, in no fixed proportion to it{fed}"
        return f"What sets the script's batch size ({self.own}) was not found{fed}"

    def advice(self, config: Mapping[str, Any]) -> str:
        """Return what to change in the script before its command trains with ``config``; empty if nothing."""
        if self.kind in ("config", "option", "held") or config.get(MICRO_BATCH) == self.own:
            return ""
        size = config[MICRO_BATCH]
        if self.counts != MICRO_BATCH:
            ranks = config[TRAIN_BATCH] // (size * config.get(GRADIENT_ACCUMULATION, 1))
            size *= _units(ranks, self.steps)[self.counts]
        if self.kind == "loader":
            return (
                f"The data loader at {self.file}:{self.line} needs a batch size of {size}, unless it takes that from "
                "the config: DeepSpeed does not change it."
            )
        where = f"{self.key} in {self.file}"
        return f"Set {where} to {size}: the script takes its batch size from there, and DeepSpeed does not change it."


def _units(ranks: int, steps: int) -> dict[str, int]:
    """Return the micro-batches in each key that counts samples."""
    return {PASS_BATCH: ranks, RANK_BATCH: steps, TRAIN_BATCH: ranks * steps, MICRO_BATCH: 1}


def held(
    fed: int, *, sources: BatchSourcesFound | None = None, present: int | None = None, ranks: int = 1
) -> BatchRule:
    """Return the rule of a script with a fixed batch size, with the source line that feeds the engine.

    ``fed`` are the rows per rank and forward pass that the engine was fed, ``present`` is the micro-batch of the user's
    config. The size is ``present`` if a number in the script confirms it, or if no number confirms the fed rows: the
    engine is then fed in other units, such as views, pairs or a row of packed sequences. Otherwise it is ``fed``.
    """
    if sources is None:
        return BatchRule(kind="held", own=fed)
    place: Mapping[str, Any] = next(iter(sources.fed_at), {"file": "", "line": 0})
    rule = BatchRule(kind="held", own=fed, file=str(place["file"]), line=int(place["line"]))
    if present in (None, 1, fed):
        return rule
    is_confirmed = any(map(_names_it, _of_size(sources, present, fed=fed, ranks=ranks)))
    if not is_confirmed and (
        (fed % present and fed > 1) or any(item.is_likely for item in _of_size(sources, fed, fed=fed, ranks=ranks))
    ):
        return rule
    return replace(rule, own=present, rows=Fraction(fed, present).as_integer_ratio())


def varying(fed: int, *, sizes: Sequence[int]) -> BatchRule:
    """Return the rule of a script whose batches vary in size, for example bucketed or packed by tokens."""
    return BatchRule(kind="held", own=fed, sizes=(min(sizes), max(sizes)))


def guesses(
    sources: BatchSourcesFound,
    *,
    fed: int,
    ranks: int,
    steps: int = 1,
    present: int | None = None,
    configured: int | None = None,
    reads_launch: bool = True,
) -> list[BatchRule]:
    """Return candidate sources of the batch size, likeliest first: options, settings files, data loaders.

    If the engine was fed more rows (``fed``) than ``present``, the micro-batch of the user's config, numbers equal to
    that micro-batch come first: each sample may be several rows (views, pairs, groups). ``configured`` is the
    micro-batch of the profile launch, if the rows may be a multiple of it. ``steps`` are the script's accumulation
    steps. ``reads_launch`` is whether a DeepSpeed config that the script reads is the launch's.
    """
    as_config = (
        [] if present is None or present == fed else _of_size(sources, present, fed=fed, ranks=ranks, steps=steps)
    )
    named = [rule for rule in as_config if _names_it(rule)]
    # A number that equals the rows is rather their number than a global batch of samples with several rows.
    doubtful = [rule for rule in named if rule.own * _units(ranks, rule.steps)[rule.counts] == fed != rule.own]
    named = [rule for rule in named if rule not in doubtful]
    other = [
        rule
        for rule in as_config
        if not _names_it(rule) and rule.counts == MICRO_BATCH and not means_elsewhere(rule.name)
    ]
    alike = _of_size(sources, fed, fed=fed, ranks=ranks, steps=steps)
    smaller = [
        rule
        for size in sorted(_batch_sizes(sources) - {present or fed, fed}, reverse=True)
        if 1 < size < fed and fed % size == 0
        for rule in _of_size(sources, size, fed=fed, ranks=1)
        if _names_it(rule)
    ]
    follows = []
    if configured is not None and fed % configured == 0:
        follows = [BatchRule(kind="config", own=present or configured, rows=(fed // configured, 1))]
    likely = [rule for rule in alike if rule.is_likely]
    unlikely = [rule for rule in alike if not rule.is_likely]
    if fed == present == configured:  # an option first: a script that follows the config may be given it as well
        likely = [rule for rule in likely if rule.key != MICRO_BATCH or not reads_launch]
        options = [rule for rule in likely if rule.kind == "option"]
        others = [rule for rule in likely if rule.kind != "option"]
        return [*options, *follows, *others, *_pairs(likely), *unlikely][:_MOST_GUESSES] if likely else []
    likely += _pairs(likely)
    if present is not None and fed < present:  # no number in the script was used whole
        return [*likely, *follows, *unlikely][:_MOST_GUESSES]
    return [*[*named, *likely, *doubtful, *smaller, *other, *unlikely][: _MOST_GUESSES - len(follows)], *follows]


def _pairs(likely: Sequence[BatchRule]) -> list[BatchRule]:
    """Return rules with two options, as of RLHF: samples are generated in one batch and trained in parts of another."""
    rules = [rule for rule in likely if rule.kind == "option" and rule.counts == MICRO_BATCH]
    rules = [rule for rule in rules if names_training_batch(rule.option) or "generat" in rule.option]
    return [replace(rule, option=f"{rules[0].option} {rule.option}") for rule in rules[1:]]


def global_batch_option(sources: BatchSourcesFound, user: BatchTriangle, *, micro_batch: int) -> tuple[str, str]:
    """Return the option that is the global batch, or a rank's part of it, where another option is the micro-batch.

    Such a script computes its accumulation steps from both: they are 0 if the micro-batch alone grows. ``micro_batch``
    is the script's, which the config of ``user`` need not give.

    Returns:
        The option, empty for none, and the key with the same meaning.
    """
    sizes = {
        TRAIN_BATCH: user.train_batch_size // user.micro_batch * micro_batch,
        RANK_BATCH: user.gradient_accumulation_steps * micro_batch,
    }
    options = [(name, value) for name, value in sources.options.items() if names_training_batch(name)]
    alike = ((name, key) for key, size in sizes.items() for name, value in options if value == size != micro_batch)
    return next(alike, ("", TRAIN_BATCH))


def _names_it(rule: BatchRule) -> bool:
    """Whether a rule's name is a training batch size, or the rule is a data loader."""
    return rule.kind == "loader" or names_training_batch(rule.name)


def _numbers(sources: BatchSourcesFound) -> list[tuple[int, dict[str, Any]]]:
    """Return the numbers in options and settings files, with the fields of ``BatchRule`` that name them."""
    options = [(value, {"kind": "option", "option": name}) for name, value in sources.options.items()]
    settings = [
        (item["value"], {"kind": "setting", "file": item["file"], "key": item["key"]}) for item in sources.settings
    ]
    return [*options, *settings]


def _name(fields: Mapping[str, str]) -> str:
    return fields.get("option") or fields["key"]


def _batch_sizes(sources: BatchSourcesFound) -> set[int]:
    named = {value for value, name in _numbers(sources) if names_training_batch(_name(name))}
    return named | {item["batch_size"] for item in sources.loaders if item["trains"] and item["batch_size"] is not None}


def _of_size(sources: BatchSourcesFound, size: int, *, fed: int, ranks: int, steps: int = 1) -> list[BatchRule]:
    """Return candidate sources of a batch of ``size`` samples, likeliest first; not by names of sequence lengths."""
    rows = Fraction(fed, size).as_integer_ratio()
    counts = {size * unit: key for key, unit in _units(ranks, steps).items()}
    matching = [
        BatchRule(own=size, counts=key, steps=steps if key in (RANK_BATCH, TRAIN_BATCH) else 1, rows=rows, **name)
        for value, name in _numbers(sources)
        if (key := counts.get(value)) and (value in (size, size * ranks) or means_batch(_name(name)))
    ]
    named = sorted(
        (rule for rule in matching if not means_length(rule.name)),
        key=lambda rule: (rule.kind != "option", means_elsewhere(rule.name), rule.counts != MICRO_BATCH),
    )
    loaders = [
        BatchRule(kind="loader", own=size, file=str(item["file"]), line=int(item["line"]), rows=rows)
        for item in sorted(sources.loaders, key=lambda item: not item["trains"])
        if item["batch_size"] == size and (item["trains"] or size == fed)
    ]
    likely = [rule for rule in named if rule.is_likely]
    return [*likely, *loaders[:1], *(rule for rule in named if not rule.is_likely)]


def samples_per_rank(sources: BatchSourcesFound, *, fed: int | None = None) -> int | None:
    """Return a rank's samples per epoch of the loader that feeds the engine (of batch size ``fed``), or None."""
    loader = _counted_loader(sources, fed=fed)
    return None if loader is None else int(loader["samples"])


def loads_all(sources: BatchSourcesFound) -> bool:
    """Whether each rank's loader that feeds the engine loads all samples of its data set."""
    loader = _counted_loader(sources, fed=None)
    return loader is not None and bool(loader.get("loads_all"))


def _counted_loader(sources: BatchSourcesFound, *, fed: int | None) -> Mapping[str, Any] | None:
    counted = [loader for loader in sources.loaders if loader["trains"] and loader["samples"]]
    alike = [loader for loader in counted if loader["batch_size"] == fed] or counted
    return min(alike, key=lambda loader: int(loader["samples"]), default=None)
