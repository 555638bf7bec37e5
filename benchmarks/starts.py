"""CPU time of each command's start, beside that of the libraries which reading a study takes.

    python -m benchmarks.starts [--rounds 5] [--trials 12]

A study is searched over a simulated landscape first. Each round runs every command once, in a process of its own. What
is shown is the least of all rounds, user and kernel mode together, and its ratio to the imports of Optuna and
SQLAlchemy in the same rounds, which differs less than seconds do on a machine that others use. Bytecode is compiled
before, as in an installed package.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from optuna_dsat.store import Store
from tests.harness.landscapes import Hill
from tests.harness.studies import USER_CONFIG, StudyBench

STUDY = "s"
IMPORTS = "import optuna, sqlalchemy.orm, optuna.storages._rdb.models"
OPTUNA_ALONE = "import optuna; optuna.load_study(study_name={name!r}, storage={url!r}).trials"
COMMANDS = (
    "--version",
    "--help",
    "guided --help",
    "plan --params 7e9 --gpu h100 --gpus 8",
    "studies",
    f"show {STUDY}",
    f"trials {STUDY}",
    f"best {STUDY}",
    f"export {STUDY}",
    "db current",
    f"worker {STUDY} --trust --quiet",
    f"explain {STUDY}",
    f"report {STUDY} -o report.html",
)


def cpu_s(command: list[str], *, folder: Path, environment: dict[str, str]) -> float:
    """Run a command and return its CPU time in seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{command} ended with {done.returncode}: {done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def search(folder: Path, *, trials: int) -> str:
    """Search over a simulated landscape; return the URL of the database."""
    url = f"sqlite:///{folder / 'study.db'}"
    (folder / "train.py").write_text("raise SystemExit('never run')\n")
    (folder / "ds.json").write_text(json.dumps(USER_CONFIG))
    with Store.open(url) as store:
        bench = StudyBench(folder, store)
        spec = bench.spec(name=STUDY, method="guided", device="cpu", max_trials=trials, options={"min_gain": 0.0})
        bench.run(spec, Hill())
    return url


def measure(folder: Path, url: str, *, rounds: int) -> dict[str, float]:
    """Return the least CPU seconds of each command by its name; the first is that of the imports."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPYCACHEPREFIX": str(folder / "bytecode"), "OPTUNA_DSAT_STORAGE": url}
    python = [sys.executable, "-c"]
    commands = {
        "Optuna and SQLAlchemy imported": [*python, IMPORTS],
        "the trials read by Optuna alone": [*python, OPTUNA_ALONE.format(name=STUDY, url=url)],
        **{
            f"optuna-dsat {one}": [*python, "from optuna_dsat.cli import main; main()", *one.split()]
            for one in COMMANDS
        },
    }
    least = dict.fromkeys(commands, float("inf"))
    for number in range(rounds + 1):
        for name, command in commands.items():
            taken = cpu_s(command, folder=folder, environment=environment)
            if number:  # the first compiles
                least[name] = min(least[name], taken)
    return least


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trials", type=int, default=12)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        url = search(Path(name), trials=arguments.trials)
        found = measure(Path(name), url, rounds=arguments.rounds)
    floor = next(iter(found.values()))
    print("| what | CPU s | ratio |\n|---|--:|--:|")
    for what, taken in found.items():
        print(f"| {what.removesuffix(' -o report.html')} | {taken:.2f} | {taken / floor:.2f} |")


if __name__ == "__main__":
    main()
