"""Try every point, or a sample of them: ``python -m tests.crash_points``."""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import pickle
import random
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

import optuna
import psutil
from sqlalchemy.engine import make_url

from optuna_dsat.store import Store
from tests.crash_points.chosen import Strike, all_strikes, distinct
from tests.crash_points.points import Blow
from tests.crash_points.runs import DATABASES, METHODS, SEED, Case, Reference, StudyOfPoints, Tried
from tests.harness.databases import Server, revisions_loaded_once, running_server

_ROOM_BYTES = 4 * 2**30
_SUBREAPER = 36
"""``PR_SET_CHILD_SUBREAPER`` of prctl(2): orphans of ended processes become children of this one."""
_RESULTS = "results.pickle"


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.crash_points", description=__doc__)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--databases", nargs="+", default=list(DATABASES), choices=DATABASES)
    parser.add_argument("--blows", nargs="+", type=Blow, default=list(Blow), metavar="BLOW", help=", ".join(Blow))
    parser.add_argument("--all", action="store_true", help="Try every blow, however often the same code gets there.")
    parser.add_argument(
        "--times", type=int, default=2, help="Without --all: blows of each kind at each place; %(default)s or more."
    )
    parser.add_argument("--at", default="", metavar="TEXT", help="Only at points with this in what they do, or where.")
    parser.add_argument("--sample", type=int, help="Try so many of these blows.")
    parser.add_argument("--seed", type=int, help=f"Seed of the sample; otherwise {SEED}, or drawn.")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="Studies at a time.")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Try the blows that the arguments choose; print a table; return 1 where anything does not hold."""
    asked = _arguments(argv)
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    seed = asked.seed if asked.seed is not None else int(os.environ.get(SEED) or random.SystemRandom().randrange(10**6))
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="dsat-crash-", dir=_fastest_place()))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        stack.enter_context(revisions_loaded_once())
        server = stack.enter_context(running_server(folder)) if "postgres" in asked.databases else None
        studies = list(_studies(asked, folder, server, stack))
        made = {(study.case.method, study.case.database) for study in studies if study.case.new}
        for study in studies:  # what makes its database needs all that the same study on one with tables does
            if study.case.new or (study.case.method, study.case.database) not in made:
                study.warm_up()
        references = {study.case: study.reference() for study in studies}
        strikes = _chosen(asked, references, seed=seed)
        return _show(_try_all(strikes, studies, references, folder=folder, jobs=asked.jobs))


def _fastest_place() -> Path | None:
    """Return a folder in memory with room for the studies and a server; None for that of temporary files."""
    memory = Path("/dev/shm")
    there = memory.is_dir() and os.access(memory, os.W_OK)
    return memory if there and shutil.disk_usage(memory).free > _ROOM_BYTES else None


def _chosen(asked: argparse.Namespace, references: dict[Case, Reference], *, seed: int) -> list[Strike]:
    """Return the blows to try, in an order drawn by the seed; say how many there are."""
    every = [strike for strike in all_strikes(references, asked.blows) if asked.at in " < ".join(strike.point.place)]
    strikes = every if asked.all else distinct(every, times=asked.times)
    for case, reference in references.items():
        places = len({point.place for point in reference.points})
        print(f"{case.words}: {len(reference.points)} points at {places} places", flush=True)
    chosen = random.Random(seed).sample(strikes, min(asked.sample or len(strikes), len(strikes)))
    print(f"{len(chosen)} blows of {len(every)}; to repeat the order or the sample: {SEED}={seed}", flush=True)
    return chosen


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


def _try_all(
    strikes: Sequence[Strike],
    studies: Sequence[StudyOfPoints],
    references: dict[Case, Reference],
    *,
    folder: Path,
    jobs: int,
) -> list[tuple[Strike, Tried]]:
    """Try blows in several processes; return the result of each.

    Raises:
        RuntimeError: If one of the processes died, or they could share more than memory.
    """
    shared = [*threading.enumerate()[1:], *psutil.Process().net_connections()]
    if shared:
        raise RuntimeError(f"Forks would share {shared} with this process.")
    sys.stdout.flush()
    gc.collect()
    gc.freeze()  # no collection in a fork then writes to, and so copies, what it shares
    children = []
    for job in range(jobs):
        child = os.fork()
        if child == 0:
            _work(strikes[job::jobs], studies, references, folder=folder / f"job-{job}")
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        raise RuntimeError(f"Processes of the harness ended with {codes}.")
    return [pair for job in range(jobs) for pair in pickle.loads((folder / f"job-{job}" / _RESULTS).read_bytes())]


def _work(
    strikes: Sequence[Strike],
    studies: Sequence[StudyOfPoints],
    references: dict[Case, Reference],
    *,
    folder: Path,
) -> NoReturn:
    """Try blows in this process, write their results to a file, and end the process."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
        by_case = {study.case: study.moved(folder / str(number)) for number, study in enumerate(studies)}
        results = []
        for strike in strikes:
            tried = by_case[strike.case].strike(strike.number, strike.blow, references[strike.case])
            results.append((strike, tried))
            _say(strike, tried)
        (folder / _RESULTS).write_bytes(pickle.dumps(results))
        code = 0
    except BaseException:  # noqa: BLE001 - the process ends here, whatever it is
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _say(strike: Strike, tried: Tried) -> None:
    if not tried.violations:
        return
    point = strike.point
    place = f"{strike.case.words}, {strike.blow} at point {strike.number} ({point.kind}: {point.what}; {point.site})"
    print(f"{place}: {'; '.join(tried.violations)}", flush=True)


def _show(results: Sequence[tuple[Strike, Tried]]) -> int:
    """Print how many blows of each kind were tried and how the processes ended; return 1 for any violation."""
    rows: dict[tuple[str, str], Counter[str]] = {}
    for strike, result in results:
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
    print(f"{len(results)} blows, {wrong} with violations")
    return 1 if wrong else 0


if __name__ == "__main__":
    began = time.monotonic()
    code = main()
    print(f"{time.monotonic() - began:.0f} s")
    sys.exit(code)
