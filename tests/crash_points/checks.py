"""What must hold after a process was ended or failed at a point, and the command went on: pure functions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.crash_points.command import Ended
from tests.crash_points.launcher import Launched
from tests.crash_points.observed import Observed
from tests.crash_points.points import LASTING, TRANSIENT, Blow

_LONGEST_LINE = 1000
_EXIT_DATABASE = 5
_SET_ASIDE = re.compile(r"/[^/]+\.old-\d+/")
_RUN_DIRECTORY = re.compile(r"^work/optuna-dsat-output/[^/]+/(?:trial-\d{4}|profile|confirm)[^/]*/")
_OWN_FOLDER = re.compile(r"^tmp/optuna-dsat-\d+/(?:[a-z]+/)?$")
"""The user's own folder, empty: it stays."""
_PARTIAL = re.compile(r"(?:^|/)\.[^/]+\.\d+$")
"""What ``runtime.atomic_write`` calls a file until it is whole."""


@dataclass(frozen=True, kw_only=True)
class Aftermath:
    """A study that something befell, after the command went on."""

    blow: Blow | None
    """None where nothing befell it."""
    first: Ended
    second: Ended | None
    """How the command ended that went on; None where the first one ended well."""
    between: Observed
    """What was stored when the first one had ended."""
    after: Observed
    launches: tuple[Launched, ...]
    """Those of both."""
    files: frozenset[str]
    processes: tuple[str, ...]
    """Living processes of the launches."""
    result: dict[str, Any] | None
    """What the command printed at last."""


def violations(seen: Aftermath, undisturbed: Aftermath, *, budget: int, comparable: bool = True) -> list[str]:
    """Return what does not hold, in words; nothing where all is well.

    Args:
        seen: What was observed.
        undisturbed: The same study when nothing befell it.
        budget: Launches of trials that it was given.
        comparable: Whether it measures the same as the undisturbed study, and so has its result.
    """
    return [
        *_ends(seen),
        *_lost(seen.between, seen.after),
        *_budget(seen.after, budget),
        *_twice(seen, undisturbed),
        *_left_in_database(seen.after),
        *_left_in_folder(seen.files, undisturbed.files),
        *(f"process left: {process}" for process in seen.processes),
        *(_other_result(seen, undisturbed) if comparable else ()),
    ]


def _ends(seen: Aftermath) -> Iterator[str]:
    """Yield what is wrong with the ends of the processes."""
    if seen.first.code is None:
        yield "the first process hung"
    elif seen.first.code != {None: 0, Blow.KILL: -9}.get(seen.blow, seen.first.code):
        yield f"the first process ended with {seen.first.code}"
    elif seen.blow in TRANSIENT and seen.first.code != 0:
        yield f"it did not get over it: {seen.first.code}, {seen.first.stderr[-300:]}"
    elif seen.blow in LASTING and seen.first.code not in (0, _EXIT_DATABASE, *_codes_of_opening(seen.between)):
        yield f"the first process ended with {seen.first.code}: {seen.first.stderr[-300:]}"
    if seen.second is not None and seen.second.code != 0:
        how = "hung" if seen.second.code is None else f"ended with {seen.second.code}"
        yield f"the second process {how}: {seen.second.stderr[-300:]}"
    for name, ended in (("first", seen.first), ("second", seen.second)):
        if ended is not None:
            yield from (f"{name} process: {what}" for what in _errors(ended.stderr))


def _codes_of_opening(between: Observed) -> tuple[int, ...]:
    """Return the exit codes of a command whose database could not be opened: one that cannot be used is bad input."""
    return () if between.studies else (2,)


def _errors(stderr: str) -> Iterator[str]:
    if "Traceback (most recent call last)" in stderr:
        yield f"traceback: {stderr.strip().splitlines()[-1][:200]}"
    for line in stderr.splitlines():
        if len(line) > _LONGEST_LINE:
            yield f"a line of {len(line)} characters: {line[:100]}"


def _lost(between: Observed, after: Observed) -> Iterator[str]:
    """Yield what was finished and is not as it was."""
    now = {trial.number: trial for trial in after.trials}
    for trial in between.trials:
        if trial.finished and now.get(trial.number) != trial:
            yield f"finished trial changed: {trial} is {now.get(trial.number)}"
    gone = set(between.launches) - set(after.launches)
    if gone:
        yield f"recorded launches are gone: {sorted(gone)}"


def _budget(after: Observed, budget: int) -> Iterator[str]:
    launched = [trial for trial in after.trials if trial.launched]
    counted = [trial for trial in launched if not trial.simplifies]
    if len(counted) != budget:
        yield f"{len(counted)} launches of a budget of {budget}"
    for trial in after.trials:
        if not trial.finished:
            yield f"trial {trial.number} is {trial.state}"
    measured = Counter(trial.key for trial in launched)
    yield from (f"measured {count} times: {key[:80]}" for key, count in measured.items() if count > 1)


def _twice(seen: Aftermath, undisturbed: Aftermath) -> Iterator[str]:
    """Yield what was launched again without need: one launch was in flight, and only that one may be repeated."""
    wanted = Counter((launch.purpose, launch.key) for launch in undisturbed.launches if not launch.ended)
    started = Counter((launch.purpose, launch.key) for launch in seen.launches if not launch.ended)
    extra = sum((started - wanted).values())
    allowed = 0 if seen.blow in (None, Blow.LOCKED) else 1
    if extra > allowed:
        what = ", ".join(f"{count} x {purpose}" for (purpose, _), count in (started - wanted).items())
        yield f"{extra} launches more than undisturbed: {what}"


def _left_in_database(after: Observed) -> Iterator[str]:
    if after.heartbeats:
        yield f"signs of life left: {after.heartbeats}"
    launched = {trial.number for trial in after.trials if trial.launched}
    idle = [number for number in after.claims if number not in launched]
    if idle:
        yield f"claims left of trials {idle}"
    unclaimed = sorted(launched - set(after.claims))
    if unclaimed:
        yield f"trials without a claim: {unclaimed}"
    if after.connections:
        yield f"{after.connections} connections left"
    if after.locked:
        yield "the lock of the database is held"
    if len(after.studies) != 1:
        yield f"studies: {after.studies}"


def _left_in_folder(files: Iterable[str], undisturbed: Iterable[str]) -> Iterator[str]:
    """Yield files that an undisturbed study has not, apart from what launches that were lost wrote."""
    files, undisturbed = ({name for name in names if not _OWN_FOLDER.match(name)} for names in (files, undisturbed))
    for name in sorted(files - undisturbed):
        if _PARTIAL.search(name) or not (_RUN_DIRECTORY.match(name) or _SET_ASIDE.search(name)):
            yield f"left: {name}"
    missing = [name for name in sorted(undisturbed - files) if not _RUN_DIRECTORY.match(name)]
    if missing:
        yield f"missing: {missing}"


def _other_result(seen: Aftermath, undisturbed: Aftermath) -> Iterator[str]:
    wanted, result = _measured(undisturbed.after), _measured(seen.after)
    if wanted != result:
        yield f"other measurements: {sorted(result - wanted)} instead of {sorted(wanted - result)}"[:400]
    for key, value in (undisturbed.result or {}).items():
        if seen.result is None:
            yield "no result was printed"
            return
        if seen.result.get(key) != value:
            yield f"other result: {key} is {seen.result.get(key)!r}, was {value!r}"[:400]


def _measured(observed: Observed) -> set[tuple[str, str, float | None]]:
    return {(trial.key, trial.outcome, trial.value) for trial in observed.trials if trial.launched}
