"""Kill what works on real studies at random moments: ``python -m benchmarks.chaos --kills N``."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from benchmarks.chaos.studies import StudyUnderFire
from tests.harness.databases import Server, running_server

_BLOWS_PER_STUDY = 6
"""Most blows of one study: a configuration whose worker dies four times is not tried again, by design."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run studies until so many blows have befallen them; print what came of each; return 1 for any violation."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="Blows in all.")
    parser.add_argument("--seed", type=int, help="Draws moments and victims; otherwise drawn, and printed.")
    parser.add_argument("--minutes", type=float, help="Begin no further study after so many minutes.")
    parser.add_argument("--postgres", action="store_true", help="On a PostgreSQL server, which is restarted, too.")
    parser.add_argument("--keep", action="store_true", help="Keep the folders of studies with violations.")
    asked = parser.parse_args(argv)
    seed = asked.seed if asked.seed is not None else random.SystemRandom().randrange(10**6)
    print(f"seed {seed}", flush=True)
    with running_server() if asked.postgres else nullcontext() as server:
        return _run(asked, random.Random(seed), server)


def _run(asked: argparse.Namespace, rng: random.Random, server: Server | None) -> int:
    """Run the studies, on a server's databases or on SQLite; return the exit code."""
    blows, studies, wrong, given_up = Counter[str](), 0, 0, 0
    began = time.monotonic()
    while blows.total() < asked.kills:
        if asked.minutes is not None and time.monotonic() - began > 60 * asked.minutes:
            break
        folder, start = Path(tempfile.mkdtemp(prefix="dsat-chaos-")), time.monotonic()
        study = StudyUnderFire(
            folder=folder,
            rng=rng,
            two=server is not None or studies % 2 == 1,
            database=None if server is None else server.new_database(),
            restart=None if server is None else server.restart,
        )
        result = study.run(min(_BLOWS_PER_STUDY, asked.kills - blows.total()))
        blows += study.blows
        studies += 1
        wrong += bool(result)
        given_up += study.given_up
        took_s = round(time.monotonic() - start)
        words = {"study": studies, "two": study.two, "blows": study.blows, "took_s": took_s, "violations": result}
        print(json.dumps(words), flush=True)
        if result and asked.keep:
            print(f"kept: {folder}", flush=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
            if server is not None:
                server.drop_database(study.url)
    minutes = (time.monotonic() - began) / 60
    print(f"{blows.total()} blows ({dict(blows)}) on {studies} studies, {wrong} with violations, {minutes:.0f} min")
    print(f"{given_up} trials given up, whose launches were all killed: by design no violation")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
