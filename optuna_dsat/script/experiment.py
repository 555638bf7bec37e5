"""Read the supported part of a Determined experiment configuration (YAML), for searches and trainings."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna_dsat.config.documents import as_written
from optuna_dsat.errors import UsageError
from optuna_dsat.script.trial_class import CONFIG, is_trial_class, read_settings

_LENGTHS = {
    "--max-length": ("searcher", "max_length"),
    "--validation-period": ("min_validation_period",),
    "--checkpoint-period": ("min_checkpoint_period",),
    "--report-period": ("scheduling_unit",),
}
"""Option of ``optuna-dsat train`` -> location of the length in the configuration."""
_UNITS = ("batches", "epochs", "records")

_OPTIONS = {
    ("searcher", "max_trials"): "--max-trials",
    ("searcher", "max_concurrent_trials"): "--max-concurrent-trials",
    ("searcher", "max_rungs"): "--max-rungs",
    ("searcher", "num_rungs"): "--max-rungs",
    ("searcher", "divisor"): "--divisor",
    ("resources", "max_slots"): "--max-slots",
    ("reproducibility", "experiment_seed"): "--random-seed",
}
"""Key of the configuration -> equivalent option of a search."""

_READ: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("name", "description", "labels", "entrypoint", "hyperparameters", "data", "scheduling_unit"), ()),
    **dict.fromkeys(("min_validation_period", "min_checkpoint_period"), ()),
    "searcher": ("name", "max_length", "smaller_is_better"),
    "resources": ("slots_per_trial",),
    "environment": ("environment_variables",),
}
"""Other keys that are read or only descriptive -> subkeys; empty for all."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """The part of an experiment configuration that a search uses."""

    entry: tuple[str, ...]
    """``NAME:CLASS``, or the command of a script without Determined's launch layer."""
    config: str
    """Path of the DeepSpeed config, relative to the model directory; empty if the hyperparameters name none."""
    options: Mapping[str, str]
    """Option of a search -> value; not every search has every option."""
    slots: int | None
    """Ranks of a trial; None if not given."""
    environment: Mapping[str, str]
    without_meaning: tuple[str, ...]
    """Keys without an equivalent here, such as ``resources.priority``."""

    @property
    def is_trial(self) -> bool:
        """Whether it trains a ``DeepSpeedTrial``."""
        return len(self.entry) == 1 and is_trial_class(self.entry[0])


def read_experiment(path: Path) -> Experiment:
    """Read an experiment configuration.

    Raises:
        UsageError: If the file is unreadable, is not an experiment configuration, or contains its DeepSpeed config in
            the hyperparameters.
    """
    record = read_settings(path, what="The experiment configuration")
    if not isinstance(record, dict) or "entrypoint" not in record:
        raise UsageError(f"{path} is not an experiment configuration of Determined: it has no entrypoint.")
    options = {option: str(value) for key, option in _OPTIONS.items() if (value := _at(record, key)) is not None}
    slots = _at(record, ("resources", "slots_per_trial"))
    if slots is not None and (type(slots) is not int or slots < 1):
        raise UsageError(
            f"{path}: resources.slots_per_trial is {as_written(slots)}; it is a number of GPUs, at least 1."
        )
    return Experiment(
        entry=_entry(record["entrypoint"], path),
        config=_config(record, path),
        options=options,
        slots=slots,
        environment=_environment(_at(record, ("environment", "environment_variables")), path),
        without_meaning=tuple(_without_meaning(record)),
    )


def training_options(experiment: Mapping[str, Any]) -> dict[str, str]:
    """Return the options of ``optuna-dsat train`` for the lengths and the seed of an experiment configuration.

    Raises:
        UsageError: If a length is invalid.
    """
    options = {option: _length(_at(experiment, key), ".".join(key)) for option, key in _LENGTHS.items()}
    seed = _at(experiment, ("reproducibility", "experiment_seed"))
    options["--seed"] = None if seed is None else str(seed)
    return {option: value for option, value in options.items() if value is not None}


def _at(record: Mapping[str, Any], key: Sequence[str]) -> Any:
    result: Any = record
    for part in key:
        result = result.get(part) if isinstance(result, Mapping) else None
    return result


def _length(value: Any, name: str) -> str | None:
    """Return a length such as ``100batches``; None if it is absent or 0, which means never in Determined."""
    if value is None:
        return None
    unit, count = next(iter(value.items())) if isinstance(value, Mapping) and len(value) == 1 else ("batches", value)
    if unit not in _UNITS or not isinstance(count, int) or count < 0:
        raise UsageError(
            f"{name} is {as_written(value)}; it is a number of batches, or one of {', '.join(_UNITS)} with a number."
        )
    return f"{count}{unit}" if count else None


def _entry(entrypoint: Any, path: Path) -> tuple[str, ...]:
    """Return ``NAME:CLASS``, or a script's command as a list of words."""
    try:
        words = shlex.split(entrypoint) if isinstance(entrypoint, str) else _texts(entrypoint, "entrypoint", path)
    except ValueError as error:
        raise UsageError(f"{path}: the entrypoint {as_written(entrypoint)} is not a command: {error}.") from None
    if "-m" in words[:-1] and words[words.index("-m") + 1].startswith("determined.launch."):
        words = words[words.index("-m") + 2 :]
        words = [part for word in words for part in (word.split("=", 1) if word.startswith("--trial=") else [word])]
        words = words[words.index("--trial") + 1 :][:1] if "--trial" in words else _without_launch_options(words)
    if not words:
        raise UsageError(f"{path}: the entrypoint {as_written(entrypoint)} names nothing to run.")
    return tuple(words)


def _texts(value: Any, name: str, path: Path) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise UsageError(f"{path}: {name} is {as_written(value)}; it is a list of texts.")
    return [str(item) for item in value]


def _without_launch_options(words: Sequence[str]) -> list[str]:
    """Strip a launch layer and its options: return the words from the first program or Python file on."""
    if "--" in words:
        return list(words[list(words).index("--") + 1 :])
    for index, word in enumerate(words):
        if word.endswith(".py") or Path(word).name.startswith("python"):
            return list(words[index:])
    return [word for word in words if not word.startswith("-")]


def _config(record: Mapping[str, Any], path: Path) -> str:
    """Return the path of the DeepSpeed config that the hyperparameters name; empty if they name none."""
    named = _at(record, ("hyperparameters", CONFIG))
    if isinstance(named, Mapping) and named.get("type") == "const":
        named = named.get("val")
    if named is not None and not isinstance(named, str):
        raise UsageError(
            f"{path}: hyperparameters.{CONFIG} is the config itself; write it to a JSON file and name that file, so "
            "that each trial can be given its own."
        )
    return named or ""


def _environment(variables: Any, path: Path) -> dict[str, str]:
    """Return environment variables from a list of ``NAME=VALUE``, or a mapping of devices to such lists."""
    where = "environment.environment_variables"
    parts = variables.values() if isinstance(variables, Mapping) else [variables]
    result = {}
    for item in [text for part in parts for text in _texts(part, where, path)]:
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise UsageError(f"{path}: {where} has {as_written(item)}; write NAME=VALUE.")
        result[name] = value
    return result


def _without_meaning(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys that are ignored, with one level of subkeys."""
    for key, value in record.items():
        read = {*_READ.get(key, ()), *(path[1] for path in _OPTIONS if path[0] == key)}
        if isinstance(value, Mapping) and read:
            yield from (f"{key}.{name}" for name in value if name not in read)
        elif read or key not in _READ:
            yield str(key)
