"""Tune every public script of the list by the command of its README; see this folder's README.md.

python -m benchmarks.first_try [--sources FOLDER] [--only NAME ...] [--ways plain,prefix,...] [--output FOLDER]
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.first_try.entry import SCRIPTS, Entry, EntryError, read_entries
from benchmarks.first_try.hugging_face import absent_modules
from benchmarks.first_try.page import page
from benchmarks.first_try.sources import SourceError
from benchmarks.first_try.ways import WAYS, Limits, run_way

EX_USAGE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; return 0, or 2 where the list or the arguments are wrong."""
    args = _parser().parse_args(arguments)
    ways = args.ways.split(",")
    try:
        entries = read_entries(args.scripts)
    except EntryError as error:
        sys.stderr.write(f"{error}\n")
        return EX_USAGE
    names = [item.name for item in entries]
    if unknown := [*(set(args.only or ()) - set(names)), *(set(ways) - WAYS.keys())]:
        sys.stderr.write(f"Unknown: {', '.join(unknown)}. Scripts: {', '.join(names)}. Ways: {', '.join(WAYS)}.\n")
        return EX_USAGE
    limits = Limits(method=args.method, trials=args.max_trials, search_s=args.search_s, train_s=args.train_s)
    args.output.mkdir(parents=True, exist_ok=True)
    for entry in entries:
        if args.only is None or entry.name in args.only:
            _write(args.output, entry, _run(entry, ways, args, limits))
    _draw(args.output, names)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_try", description=__doc__.splitlines()[0])
    parser.add_argument("--sources", type=Path, help="folder of git directories (default: fetched from GitHub)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these scripts alone")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"what to run (default: {','.join(WAYS)})")
    parser.add_argument("--output", type=Path, default=Path("first-try-output"), help="folder of records and table")
    parser.add_argument("--scripts", type=Path, default=SCRIPTS, help="folder of the list")
    parser.add_argument("--keep", type=Path, help="folder to keep the checkouts and outputs in, for a look")
    parser.add_argument("--method", default=Limits.method)
    parser.add_argument("--max-trials", type=int, default=Limits.trials)
    parser.add_argument("--search-s", type=float, default=Limits.search_s, help="seconds of one search")
    parser.add_argument("--train-s", type=float, default=Limits.train_s, help="seconds of one training")
    return parser


def _run(entry: Entry, ways: Sequence[str], args: argparse.Namespace, limits: Limits) -> dict[str, Any]:
    """Return what became of a script, by way."""
    try:
        absent = absent_modules(entry)
        message = f"{', '.join(absent)} is not installed" if absent else ""
    except EntryError as error:
        message = str(error)
    if message:
        return {"plain": {"verdict": "not judged", "message": message}}
    result = {}
    for way in ways if entry.alone else [item for item in ways if item != "plain"]:
        with tempfile.TemporaryDirectory(prefix="first-try-", ignore_cleanup_errors=True) as scratch:
            folder = Path(scratch) / way if args.keep is None else args.keep / entry.name / way
            folder.mkdir(parents=True)
            try:
                record = run_way(way, entry, folder, limits=limits, sources=args.sources)
            except (SourceError, EntryError, OSError) as error:
                traceback.print_exc()
                record = {"verdict": "not judged", "message": str(error)} if way == "plain" else {}
        if record:
            result[way] = {**record, "date": datetime.date.today().isoformat()}
            print(f"{entry.name}: {way}: {record['verdict']}: {record['message']}", flush=True)
    return result


def _write(output: Path, entry: Entry, ways: dict[str, Any]) -> None:
    """Write a script's record; ways that were not run now stay as they were recorded."""
    path = output / f"{entry.name}.json"
    before = json.loads(path.read_text(encoding="utf-8"))["ways"] if path.is_file() else {}
    record = {
        "name": entry.name,
        "style": entry.style,
        "repository": entry.repository,
        "commit": entry.commit,
        "not_judged": entry.not_judged,
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "deepspeed", "optuna")},
        "ways": {**before, **ways},
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _draw(output: Path, names: Sequence[str]) -> None:
    paths = [output / f"{name}.json" for name in names]
    records = [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.is_file()]
    (output / "table.md").write_text(page(records), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
