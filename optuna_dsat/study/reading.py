"""What the database holds of a study is data: read here, or named as what this version cannot read."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from optuna.trial import FrozenTrial, TrialState
from pydantic import ValidationError

from optuna_dsat.config.ds_config import MICRO_BATCH
from optuna_dsat.config.structures import Structure
from optuna_dsat.errors import ConfigError, UnreadableStudyError
from optuna_dsat.launch.protocol import is_launch_id
from optuna_dsat.outcome import Outcome
from optuna_dsat.store import StudyRecord
from optuna_dsat.trials import attributes
from optuna_dsat.words import rule_in_words

__all__ = ["check_paths", "check_profile_names", "check_record", "check_study_attributes", "check_trials", "reading"]

_REASON_CHARS = 200
_LEARNED_VARIABLES = "ACCELERATE_"
"""Beginning of the variables that a profile launch learns (``runtime/accelerate_config.py``)."""


@contextmanager
def reading(name: str, what: str, versions: Mapping[str, str]) -> Iterator[None]:
    """Turn what reading a study's data raises into one error that names the study.

    Args:
        name: The study.
        what: What is read, such as ``its spec``.
        versions: Package -> version that the study was created with; empty if unknown.

    Raises:
        UnreadableStudyError: If the data are not what this version writes.
    """
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, ConfigError) as error:
        made = versions.get("optuna-dsat")
        by = f" (made by optuna-dsat {made})" if made else ""
        reason = f"{what}: {_reason(error)}{by}"
        why = "A newer version may have written it, or it was altered."
        raise UnreadableStudyError(f"The study {name!r} cannot be read: {reason}. {why}", reason=reason) from error


def check_record(record: StudyRecord) -> None:
    """Check that a study's row could be read.

    Raises:
        ValueError: Says why not.
    """
    if record.unreadable:
        raise ValueError(record.unreadable)


def _reason(error: Exception) -> str:
    """Return the first line of an error, one of pydantic's with the field."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(str(part) for part in first['loc'])}: {rule_in_words(first['msg'])}"[:_REASON_CHARS]
    if isinstance(error, KeyError):
        return f"{error} is not known or missing"[:_REASON_CHARS]
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")[:_REASON_CHARS]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_outcome(value: Any) -> bool:
    return value in {outcome.value for outcome in Outcome} if isinstance(value, str) else False


def _is_metrics(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(one, int | float) for one in value.values())


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


_OF_TRIALS: Mapping[str, Callable[[Any], bool]] = {
    attributes.ATTEMPTS: _is_count,
    attributes.CONFIG: _is_object,
    attributes.CONFIGURATION: _is_text,
    attributes.CONFIG_KEY: _is_text,
    attributes.DATA_LIMIT: _is_count,
    attributes.DATA_PARALLEL_SIZE: _is_count,
    attributes.ERROR: _is_text,
    attributes.HOST_THREADS: _is_count,
    attributes.INPUT_VARIATION: _is_number,
    attributes.LAUNCH_ID: lambda value: isinstance(value, str) and is_launch_id(value),
    attributes.MESSAGE: _is_text,
    attributes.METRICS: _is_metrics,
    attributes.OUTCOME: _is_outcome,
    attributes.OVERHEAD_S: _is_number,
    attributes.OVERLAY: _is_object,
    attributes.PEAK_BYTES: _is_count,
    attributes.PREDICTED_PEAK_BYTES: _is_count,
    attributes.PURPOSE: _is_text,
    attributes.SKIPPED_STEPS: _is_count,
    attributes.VETOED: _is_text,
}
"""Attribute of a trial -> whether a value can be its."""
_OF_STUDIES: Mapping[str, Callable[[Any], bool]] = {
    attributes.CONFIRMATION: _is_object,
    attributes.END_REASON: _is_text,
    attributes.FINALISTS: lambda value: isinstance(value, list),
    attributes.FINGERPRINT: _is_text,
    attributes.HEADROOM: lambda value: value is None or _is_number(value),
    attributes.RESULT: _is_text,
    attributes.WARM_START: _is_object,
    attributes.WINNER: _is_count,
}
"""Attribute of a study -> whether a value can be its."""


def check_trials(trials: Sequence[FrozenTrial]) -> None:
    """Check values, parameters and attributes of trials.

    Raises:
        ValueError: Names the trial and what of it is missing or cannot be read.
    """
    for trial in trials:
        if trial.state is TrialState.COMPLETE:
            # The user's own config has no parameters where it lies outside the search space.
            searched = trial.user_attrs.get(attributes.PURPOSE) != attributes.USER_CONFIG
            without_size = searched and MICRO_BATCH not in trial.params
            missing = "its value" if not trial.values else MICRO_BATCH if without_size else ""
            if missing:
                raise ValueError(f"trial {trial.number} was measured, and {missing} is missing")
        _check(trial.user_attrs, _OF_TRIALS, place=f"trial {trial.number}: ")
        config = trial.user_attrs.get(attributes.CONFIG)
        if config is None and attributes.LAUNCH_ID in trial.user_attrs:
            raise ValueError(f"trial {trial.number} was launched without a {attributes.CONFIG}")
        if config is not None and not _is_count(config.get(MICRO_BATCH, 1)):
            raise ValueError(f"trial {trial.number}: its micro-batch is {repr(config[MICRO_BATCH])[:60]}")
        if config is not None and Structure.of(config).stage not in (0, 1, 2, 3):
            raise ValueError(f"trial {trial.number}: its ZeRO stage is {repr(Structure.of(config).stage)[:60]}")


def check_paths(*paths: str) -> None:
    """Check that texts can be paths.

    Raises:
        ValueError: Names one with a NUL character or half a surrogate pair.
    """
    for path in paths:
        if b"\x00" in os.fsencode(path):
            raise ValueError(f"{path[:60]!r} can be no path")


def check_profile_names(modules: Sequence[str], environment: Mapping[str, str]) -> None:
    """Check what a profile has later launches import, and the variables that it sets for them.

    Raises:
        ValueError: Names what no profile launch learns.
    """
    strange = [name for name in modules if not name.isprintable() or "/" in name or name.startswith(".")]
    strange += [name for name in environment if not name.startswith(_LEARNED_VARIABLES)]
    if strange:
        raise ValueError(f"no launch learns {repr(strange[0])[:60]}")


def check_study_attributes(user_attrs: Mapping[str, Any]) -> None:
    """Check the attributes of a study.

    Raises:
        ValueError: Names the attribute that cannot be read.
    """
    _check(user_attrs, _OF_STUDIES, place="")


def _check(user_attrs: Mapping[str, Any], known: Mapping[str, Callable[[Any], bool]], *, place: str) -> None:
    for name, fits in known.items():
        if name in user_attrs and not fits(user_attrs[name]):
            raise ValueError(f"{place}{name} is {repr(user_attrs[name])[:60]}")
