"""Which blows are tried: all, or those at distinct places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.crash_points.points import Blow, Point, applies
from tests.crash_points.runs import Case, Reference


@dataclass(frozen=True, kw_only=True)
class Strike:
    """One blow at one point of one case."""

    case: Case
    number: int
    point: Point
    blow: Blow


def all_strikes(references: Mapping[Case, Reference], blows: Sequence[Blow]) -> list[Strike]:
    """Return every blow that applies, at every point."""
    return [
        Strike(case=case, number=number, point=point, blow=blow)
        for case, reference in references.items()
        for number, point in enumerate(reference.points)
        for blow in blows
        if applies(blow, point, database=case.database)
    ]


def distinct(strikes: Sequence[Strike], *, times: int) -> list[Strike]:
    """Return at most so many blows of each kind at each place: the first, the last, and some between.

    A place is what a point does and the code that leads there, so the profile, the search, the confirmation and the
    conclusion have places of their own; the passes of a loop share theirs. Each study has its own kills, since what a
    method makes of its history is its own; other blows meet the same code whatever the method, so the studies of a
    database share these.

    Args:
        strikes: Of all points, in order.
        times: How many of each.

    Raises:
        ValueError: If ``times`` is less than 2.
    """
    if times < 2:
        raise ValueError(f"The first and the last of each are tried at least; got {times}.")
    groups: dict[object, list[Strike]] = {}
    for strike in strikes:
        shared = strike.case if strike.blow is Blow.KILL else strike.case.database
        groups.setdefault((shared, strike.blow, strike.point.place), []).append(strike)
    kept = set()
    for group in groups.values():
        last = len(group) - 1
        kept |= {group[round(index * last / (times - 1))] for index in range(times)} if last >= times else {*group}
    return [item for item in strikes if item in kept]
