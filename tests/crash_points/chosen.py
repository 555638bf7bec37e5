"""Which blows are tried: all, those at distinct places, or a sample."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from tests.crash_points.points import Blow, Point, applies
from tests.crash_points.runs import Case, Reference

__all__ = ["Strike", "all_strikes", "distinct", "drawn"]


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


def drawn(strikes: Sequence[Strike], *, seed: int, sample: int | None) -> list[Strike]:
    """Return blows in an order drawn by a seed, whose beginning samples all code: each is met once before any is again.

    Code is what a point does and the functions that lead there, whatever the lines, the method and the database.

    Args:
        strikes: What may be tried.
        seed: Draws the order.
        sample: How many of them; None for all.
    """
    order = list(strikes)
    random.Random(seed).shuffle(order)
    met: Counter[object] = Counter()
    rounds = []
    for item in order:
        code = (item.blow, item.point.code)
        rounds.append(met[code])
        met[code] += 1
    order = [one for _, one in sorted(zip(rounds, order, strict=True), key=itemgetter(0))]
    return order if sample is None else order[:sample]
