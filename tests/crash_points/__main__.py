"""Try every point, or a sample of them: ``python -m tests.crash_points``."""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import pickle
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

import optuna
from sqlalchemy.engine import make_url

from optuna_dsat.store import Store
from tests.crash_points.points import Blow, applies
from tests.crash_points.runs import METHODS, SEED, Case, Reference, StudyOfPoints, Tried
from tests.harness.databases import Server, revisions_loaded_once, running_server

_ANSWERS = "answers"
"""File in which a process of the harness leaves what came of its blows."""

_SUBREAPER = 36
"""``PR_SET_CHILD_SUBREAPER`` of prctl(2): orphans of ended processes become children of this one."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One blow at one point of one case."""

    case: Case
    number: int
    blow: Blow


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.crash_points", description=__doc__)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--databases", nargs="+", default=["sqlite", "postgres"], choices=["sqlite", "postgres"])
    parser.add_argument("--blows", nargs="+", type=Blow, default=list(Blow), metavar="BLOW", help=", ".join(Blow))
    parser.add_argument("--sample", type=int, help="Try so many blows instead of all.")
    parser.add_argument("--every", type=int, default=1, help="Try each Nth blow instead of all.")
    parser.add_argument("--seed", type=int, help=f"Seed of the sample; otherwise {SEED}, or drawn.")
    parser.add_argument("--minutes", type=float, default=math.inf, help="Try no further ones after so many minutes.")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="Studies at a time.")
    parser.add_argument("--json", type=Path, help="Write every outcome to this file, one line each.")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Try the blows that the arguments choose; print a table; return 1 where anything does not hold."""
    asked = _arguments(argv)
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    seed = asked.seed if asked.seed is not None else int(os.environ.get(SEED) or random.SystemRandom().randrange(10**6))
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="dsat-crash-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        stack.enter_context(revisions_loaded_once())
        server = stack.enter_context(running_server()) if "postgres" in asked.databases else None
        studies = list(_studies(asked, folder, server, stack))
        for study in studies:
            study.warm_up()
        references = {study.case: study.reference() for study in studies}
        trials = _chosen(references, asked.blows, seed=seed, sample=asked.sample, every=asked.every)
        for case, reference in references.items():
            print(f"{case.words}: {len(reference.points)} points", flush=True)
        if asked.sample is not None:
            print(f"a sample of {len(trials)}; to repeat it: {SEED}={seed}", flush=True)
        until = time.monotonic() + 60 * asked.minutes
        tried = _try_all(trials, studies, references, folder=folder, jobs=asked.jobs, until=until)
    if asked.json is not None:
        asked.json.write_text("".join(f"{json.dumps({**asdict(t), **asdict(r)})}\n" for t, r in tried))
    return _show(tried, chosen=len(trials))


def _studies(
    asked: argparse.Namespace, folder: Path, server: Server | None, stack: ExitStack
) -> Iterator[StudyOfPoints]:
    """Yield the studies: each method on a database with tables, and one that makes its own database."""
    for database in asked.databases:
        used = server if database == "postgres" else None
        template = _template(folder, used, stack)
        for method in asked.methods:
            case = Case(method=method, database=database)
            place = folder / f"{method}-{database}"
            place.mkdir()
            yield StudyOfPoints(case, folder=place, server=used, template=template)
        place = folder / f"new-{database}"
        place.mkdir()
        yield StudyOfPoints(
            Case(method=asked.methods[-1], database=database, new=True), folder=place, server=used, template=template
        )


def _template(folder: Path, server: Server | None, stack: ExitStack) -> str:
    """Make a database with all tables, which lasts as long as the stack; return its file, or its name on the server."""
    url = f"sqlite:///{folder}/template.db" if server is None else server.new_database()
    if server is not None:
        stack.callback(server.drop_database, url)
    Store.open(url).close()
    return str(make_url(url).database)


def _chosen(
    references: dict[Case, Reference], blows: Sequence[Blow], *, seed: int, sample: int | None, every: int
) -> list[Trial]:
    """Return the blows to try, in an order drawn by the seed, so that what is drawn first is a sample of all."""
    trials = [
        Trial(case=case, number=number, blow=blow)
        for case, reference in references.items()
        for number, point in enumerate(reference.points)
        for blow in blows
        if applies(blow, point, database=case.database)
    ][::every]
    random.Random(seed).shuffle(trials)
    return trials if sample is None else trials[:sample]


def _try_all(
    trials: Sequence[Trial],
    studies: Sequence[StudyOfPoints],
    references: dict[Case, Reference],
    *,
    folder: Path,
    jobs: int,
    until: float,
) -> list[tuple[Trial, Tried]]:
    """Try blows in several processes; each writes what came of its own to a file.

    Raises:
        RuntimeError: If one of the processes died.
    """
    sys.stdout.flush()
    children = []
    for job in range(jobs):
        child = os.fork()
        if child == 0:
            _work(trials[job::jobs], studies, references, folder=folder / f"job-{job}", until=until)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        raise RuntimeError(f"Processes of the harness ended with {codes}.")
    tried: list[tuple[Trial, Tried]] = []
    for job in range(jobs):
        tried += pickle.loads((folder / f"job-{job}" / _ANSWERS).read_bytes())
    return tried


def _work(
    trials: Sequence[Trial],
    studies: Sequence[StudyOfPoints],
    references: dict[Case, Reference],
    *,
    folder: Path,
    until: float,
) -> NoReturn:
    """Try blows in this process until a moment of the monotonic clock, and end it."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
        by_case = {study.case: study.moved(folder / str(number)) for number, study in enumerate(studies)}
        answers = []
        for trial in trials:
            if time.monotonic() > until:
                break
            answers.append((trial, by_case[trial.case].strike(trial.number, trial.blow, references[trial.case])))
            _say(*answers[-1])
        (folder / _ANSWERS).write_bytes(pickle.dumps(answers))
        code = 0
    except BaseException:  # noqa: BLE001 - the process ends here, whatever it is
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _say(trial: Trial, tried: Tried) -> None:
    if not tried.violations:
        return
    place = f"{trial.case.words}, {trial.blow} at point {trial.number} ({tried.point.kind}: {tried.point.what})"
    print(f"{place}: {'; '.join(tried.violations)}", flush=True)


def _show(tried: Sequence[tuple[Trial, Tried]], *, chosen: int) -> int:
    """Print how many blows of each kind were tried and what became of the processes; return 1 for any violation."""
    rows: dict[tuple[str, str], Counter[str]] = {}
    for trial, result in tried:
        count = rows.setdefault((trial.case.words, str(trial.blow)), Counter())
        count["tried"] += 1
        count["first went on"] += result.first_code == 0
        count["second finished"] += result.second_code == 0
        count["violations"] += bool(result.violations)
    columns = ("tried", "first went on", "second finished", "violations")
    print(f"{'study':32} {'blow':10}" + "".join(f" {name:>15}" for name in columns))
    for (words, blow), count in sorted(rows.items()):
        print(f"{words:32} {blow:10}" + "".join(f" {count[name]:>15}" for name in columns))
    wrong = sum(count["violations"] for count in rows.values())
    left = f" ({chosen - len(tried)} more were not tried)" if chosen > len(tried) else ""
    print(f"{len(tried)} blows, {wrong} with violations{left}")
    return 1 if wrong else 0


if __name__ == "__main__":
    began = time.monotonic()
    code = main()
    print(f"{time.monotonic() - began:.0f} s")
    sys.exit(code)
