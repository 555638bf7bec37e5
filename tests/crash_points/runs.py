"""One study, its points, and what becomes of it when something befalls its process at one of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.crash_points.checks import Aftermath, violations
from tests.crash_points.command import LAUNCHES_FILE, POINTS_FILE, Ended, run_command, warm_up
from tests.crash_points.observed import Observed, files_of, launches_of, living_children, observe
from tests.crash_points.points import LASTING, Blow, Point
from tests.harness.databases import Server
from tests.harness.entry_points import DS_CONFIG

SEED = "OPTUNA_DSAT_CRASH_SEED"
"""Environment variable with the seed of a sample, to repeat one."""

METHODS = ("guided", "random", "binary", "asha")
DATABASES = ("sqlite", "postgres")
NAME = "crashed"
BUDGET = 4
_OPTIONS = (
    *("--study", NAME, "--cpu-ranks", "2", "--max-trials", str(BUDGET), "--metric", "throughput"),
    *("--zero-stages", "1", "2", "--no-tune", "offload_optimizer", "reduce_bucket_size", "contiguous_gradients"),
    *("--no-tune", "reduce_scatter", "--start-profile-step", "2", "--end-profile-step", "3", "--quiet", "--json"),
)
_AGAIN = 2
"""Times that a blow is tried again whose point a run did not come to."""
_COMPARED = ("config", "value", "metric", "reason", "speed_up", "train_batch_size")
"""Keys of the printed result that are the same whatever befell the study."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A study: method, database, and what the database holds before."""

    method: str
    database: str
    """One of ``DATABASES``."""
    new: bool = False
    """Whether the database is created, too; otherwise it has its tables."""

    @property
    def words(self) -> str:
        return f"{self.method}{' from nothing' if self.new else ''}, {self.database}"

    @property
    def continues(self) -> bool:
        """Whether trials continue launches. Later trials depend on it: after a kill, a search proposes others."""
        return not self.new and self.method != "guided"

    @property
    def options(self) -> tuple[str, ...]:
        """Studies in which trials continue launches end with the search; the others confirm, too."""
        return (*_OPTIONS, *(("--confirm", "0") if self.continues else ("--confirm", "1", "--no-continue")))


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A study that nothing befell."""

    points: tuple[Point, ...]
    aftermath: Aftermath


@dataclass(frozen=True, kw_only=True)
class Tried:
    """What came of one blow at one point."""

    first_code: int | None
    second_code: int | None
    """None where the first process ended well, or the second one hung."""
    violations: tuple[str, ...]


class StudyOfPoints:
    """Runs one case, in a folder and databases of its own.

    Args:
        case: The study.
        folder: For its files; removed by whoever made it.
        server: A PostgreSQL server; None where the case needs none.
        template: A database with all tables and no study: a file, or the name of one on the server.
    """

    def __init__(self, case: Case, *, folder: Path, server: Server | None, template: str) -> None:
        self.case = case
        self._folder = folder
        self._server = server
        self._template = template

    def moved(self, folder: Path) -> StudyOfPoints:
        """Return the same study in another folder, which is made."""
        folder.mkdir(parents=True)
        return StudyOfPoints(self.case, folder=folder, server=self._server, template=self._template)

    def warm_up(self) -> None:
        """Run the study once in this process, so that its forks begin with all imported."""
        with self._place() as (folder, url):
            warm_up(folder, self._search(url))

    def reference(self) -> Reference:
        """Run the study with nothing befalling it; return its points and its end."""
        with self._place() as (folder, url):
            ended = run_command(folder, self._search(url), count=True)
            lines = (folder / "notes" / POINTS_FILE).read_text(encoding="utf-8").splitlines()
            points = tuple(Point(**json.loads(line)) for line in lines)
            aftermath = _aftermath(folder, url, blow=None, first=ended, second=None, between=observe(url))
        wrong = violations(aftermath, aftermath, budget=BUDGET)
        if wrong or aftermath.result is None:
            raise RuntimeError(f"{self.case.words}: the undisturbed study is not whole: {wrong} {ended.stderr[-2000:]}")
        return Reference(points=points, aftermath=aftermath)

    def strike(self, number: int, blow: Blow, reference: Reference) -> Tried:
        """Let something befall the study at a point, go on, and return what does not hold then.

        A run may pass a few points fewer than the one that was counted, and end before it is killed: it runs again.
        """
        tried = self._strike(number, blow, reference)
        for _ in range(_AGAIN):
            if blow is not Blow.KILL or tried.first_code != 0:
                break
            tried = self._strike(number, blow, reference)
        return tried

    def _strike(self, number: int, blow: Blow, reference: Reference) -> Tried:
        with self._place() as (folder, url):
            first = run_command(folder, self._search(url), at=number, blow=blow)
            between = observe(url)
            done = first.code == 0 and blow not in LASTING  # what a failing disk kept goes with the next start
            second = None if done else self._go_on(folder, url, again=bool(number % 2))
            seen = _aftermath(folder, url, blow=blow, first=first, second=second, between=between)
        comparable = second is None or not self.case.continues
        return Tried(
            first_code=first.code,
            second_code=None if second is None else second.code,
            violations=tuple(violations(seen, reference.aftermath, budget=BUDGET, comparable=comparable)),
        )

    def _go_on(self, folder: Path, url: str, *, again: bool) -> Ended:
        """Resume the study, or give the same command again: where it was not made yet that is all there is."""
        if not again:
            resumed = run_command(folder, ("resume", NAME, "--storage", url, "--quiet", "--json"))
            if not (resumed.code == 2 and "There is no " in resumed.stderr):
                return resumed
        return run_command(folder, self._search(url))

    def _search(self, url: str) -> tuple[str, ...]:
        return (self.case.method, "train.py", "ds.json", "--storage", url, *self.case.options)

    @contextmanager
    def _place(self) -> Iterator[tuple[Path, str]]:
        """Make a folder and a database for one study, and remove both."""
        for name in ("work", "home", "tmp", "notes"):
            (self._folder / name).mkdir()
        (self._folder / "work" / "train.py").write_text("raise SystemExit('never run')\n")
        (self._folder / "work" / "ds.json").write_text(json.dumps(DS_CONFIG))
        try:
            if self._server is None:
                database = self._folder / "work" / "study.db"
                if not self.case.new:
                    shutil.copy(self._template, database)
                yield self._folder, f"sqlite:///{database}"
            else:
                url = self._server.new_database(template=None if self.case.new else self._template)
                try:
                    yield self._folder, url
                finally:
                    self._server.drop_database(url)
        finally:
            for name in ("work", "home", "tmp", "notes"):
                shutil.rmtree(self._folder / name)


def _aftermath(
    folder: Path, url: str, *, blow: Blow | None, first: Ended, second: Ended | None, between: Observed
) -> Aftermath:
    last = first if second is None else second
    places = {f"{name}/{file}" for name in ("work", "home", "tmp") for file in files_of(folder / name)}
    return Aftermath(
        blow=blow,
        first=first,
        second=second,
        between=between,
        after=observe(url),
        launches=launches_of(folder / "notes" / LAUNCHES_FILE),
        files=frozenset(places),
        processes=living_children(),
        result=_result(last.stdout),
    )


def _result(stdout: str) -> dict[str, Any] | None:
    try:
        printed = json.loads(stdout)
    except ValueError:
        return None
    return {key: printed.get(key) for key in _COMPARED}
