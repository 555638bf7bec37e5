"""``--on-end``: a command after the search, which learns the result from its environment."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness.entry_points import EntryPointBench, Run, bench, run_here
from tests.harness.landscapes import Hill, Interrupted
from tests.harness.simulated import SimulatedResult

__all__ = ["bench", "run_here"]

SEARCH = ("random", "train.py", "ds.json", "--cpu-ranks", "2", "--confirm", "0", "--quiet", "--json")
NOTE = "env | grep ^OPTUNA_DSAT_ | sort >> end.txt; echo done"


def noted(folder: Path) -> dict[str, str]:
    lines = (folder / "end.txt").read_text().splitlines()
    assert len(lines) == len({line.split("=")[0] for line in lines}), "run once"
    return dict(line.split("=", 1) for line in lines)


def test_it_gets_study_result_and_exit_code_and_leaves_stdout_to_the_result(
    bench: EntryPointBench, run_here: Run
) -> None:
    name = "a'$(touch hacked);b"
    done = run_here(*SEARCH, "--max-trials", "2", "--study", name, "--storage", "sqlite:///s.db", "--on-end", NOTE)
    assert done.returncode == 0
    assert json.loads(done.stdout)["study"] == name
    assert done.stderr == "done\n"
    variables = noted(bench.folder)
    assert variables["OPTUNA_DSAT_STUDY"] == name
    assert variables["OPTUNA_DSAT_EXIT_CODE"] == "0"
    assert variables["OPTUNA_DSAT_STORAGE"] == "sqlite:///s.db"
    assert json.loads(Path(variables["OPTUNA_DSAT_RESULT"]).read_text())["study"] == name
    assert not (bench.folder / "hacked").exists()


def test_it_runs_after_an_interruption_and_after_the_search_was_resumed(bench: EntryPointBench, run_here: Run) -> None:
    bench.landscape = Interrupted()
    assert run_here(*SEARCH, "--max-trials", "4", "--on-end", NOTE).returncode == 130
    variables = noted(bench.folder)
    assert variables["OPTUNA_DSAT_EXIT_CODE"] == "130"
    assert Path(variables["OPTUNA_DSAT_RESULT"]).is_file()
    (bench.folder / "end.txt").unlink()
    bench.landscape = Hill()
    done = run_here("resume", "train-random", "--on-end", NOTE, "--quiet", "--price", "60")
    assert done.returncode == 0
    assert "which cost " in done.stdout
    assert noted(bench.folder)["OPTUNA_DSAT_EXIT_CODE"] == "0"


def test_its_failure_is_a_warning_and_it_runs_after_a_search_that_failed(bench: EntryPointBench, run_here: Run) -> None:
    done = run_here(*SEARCH[:-1], "--max-trials", "2", "--price", "60", "--on-end", "exit 7")
    assert done.returncode == 0
    assert done.stderr == "Warning: the command of --on-end ended with exit code 7.\n"
    cost = next(line for line in done.stdout.splitlines() if "which cost" in line)
    assert " at 60.00 per CPU rank hour" in cost
    assert float(cost.partition("which cost ")[2].split()[0].replace(",", "")) > 0
    other = ("--max-trials", "2", "--fix", "overlap_comm=true", "--on-end", NOTE)
    assert run_here(*SEARCH, *other).returncode == 2  # the study exists with other settings
    variables = noted(bench.folder)
    assert (variables["OPTUNA_DSAT_STUDY"], variables["OPTUNA_DSAT_RESULT"]) == ("train-random", "")
    assert variables["OPTUNA_DSAT_EXIT_CODE"] == "2"


class FullDisk(Hill):
    def run(self, *_: Any) -> SimulatedResult:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_it_gets_the_exit_code_of_a_search_that_a_full_disk_ended(bench: EntryPointBench, run_here: Run) -> None:
    bench.landscape = FullDisk()
    code = run_here(*SEARCH, "--max-trials", "2", "--on-end", NOTE).returncode
    assert (code, noted(bench.folder)["OPTUNA_DSAT_EXIT_CODE"]) == (5, "5")


@pytest.mark.parametrize("command", [[*SEARCH, "--dry-run"], ["resume", "s"], ["report", "s"]])
def test_a_price_is_a_finite_number(command: list[str], run_here: Run) -> None:
    done = run_here(*command, "--price", "inf")
    assert done.returncode == 2
    assert "Invalid value for '--price': it must be" in done.stderr
