"""A disk that fails where nobody expects it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from optuna_dsat.study import conclusion
from tests.harness.entry_points import EntryPointBench, Run, bench, run_here

__all__ = ["bench", "run_here"]


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_a_file_that_cannot_be_written_is_named_in_one_line_with_the_code_of_storage(
    bench: EntryPointBench, run_here: Run, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path = str(bench.folder / "best_ds_config.json")

    def fails(*_: object) -> tuple[Path, Path]:
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(conclusion, "write_best", fails)
    options = ("--cpu-ranks", "2", "--max-trials", "2", "--confirm", "0", "--metric", "throughput", "--quiet")
    ended = run_here("random", "train.py", "ds.json", *options)
    assert ended.returncode == 5
    assert ended.stderr.count("\n") == 1
    assert f"{path}: {os.strerror(number)}" in ended.stderr
