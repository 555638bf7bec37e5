"""What came of each blow, one line of JSON each in a file that several processes add to and later runs go on with."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.crash_points.chosen import Strike
from tests.crash_points.points import Blow, Point
from tests.crash_points.runs import Case, Tried

__all__ = ["Results", "show"]


class Results:
    """A file of outcomes.

    Args:
        path: The file; made where it is not there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, case: Case, tried: Tried) -> None:
        """Add one outcome: one write, so that processes do not mix theirs."""
        line = json.dumps({"case": asdict(case), **asdict(tried)}) + "\n"
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def of(self, strikes: Iterable[Strike]) -> dict[Strike, Tried]:
        """Return the last outcome of each of these blows that has one; one at other code does not count."""
        wanted = {_identity(strike): strike for strike in strikes}
        result = {_identity(strike): tried for strike, tried in self._lines()}
        return {strike: result[identity] for identity, strike in wanted.items() if identity in result}

    def _lines(self) -> Iterator[tuple[Strike, Tried]]:
        if not self._path.exists():
            return
        for line in self._path.read_text(encoding="utf-8").splitlines():
            strike, tried = _decoded(json.loads(line))
            yield strike, tried


def _identity(strike: Strike) -> object:
    """Return what a blow is the same by in another run, where the numbers in names are others."""
    return strike.case, strike.number, strike.blow, strike.point.place


def _decoded(record: dict[str, Any]) -> tuple[Strike, Tried]:
    case, point, blow = Case(**record.pop("case")), Point(**record.pop("point")), Blow(record.pop("blow"))
    tried = Tried(**{**record, "point": point, "blow": blow, "violations": tuple(record["violations"])})
    return Strike(case=case, number=tried.number, point=point, blow=blow), tried


def show(found: dict[Strike, Tried], *, chosen: Collection[Strike]) -> int:
    """Print how many blows of each kind were tried and what became of the processes; return 1 for any violation."""
    rows: dict[tuple[str, str], Counter[str]] = {}
    for strike, result in found.items():
        count = rows.setdefault((strike.case.words, str(strike.blow)), Counter())
        count["tried"] += 1
        count["first went on"] += result.first_code == 0
        count["second finished"] += result.second_code == 0
        count["violations"] += bool(result.violations)
    columns = ("tried", "first went on", "second finished", "violations")
    print(f"{'study':32} {'blow':10}" + "".join(f" {name:>15}" for name in columns))
    for (words, blow), count in sorted(rows.items()):
        print(f"{words:32} {blow:10}" + "".join(f" {count[name]:>15}" for name in columns))
    wrong = sum(count["violations"] for count in rows.values())
    left = f" ({len(chosen) - len(found)} more were not tried)" if len(chosen) > len(found) else ""
    print(f"{len(found)} blows, {wrong} with violations{left}")
    if found:
        wall_s, cpu_s = sum(item.seconds for item in found.values()), sum(item.cpu_s for item in found.values())
        print(f"{wall_s / len(found):.2f} s a blow, {cpu_s / len(found):.2f} s of them of the CPU")
    return 1 if wrong else 0
