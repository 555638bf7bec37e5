"""A disk that fails where nobody expects it."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from optuna_dsat.study import conclusion
from tests.harness.entry_points import EntryPointBench, Run, bench, run_here

__all__ = ["bench", "run_here"]


def test_a_file_that_cannot_be_written_is_named_in_one_line_with_the_code_of_storage(
    bench: EntryPointBench, run_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, number = str(bench.folder / "best_ds_config.json"), errno.EIO

    def fails(*_: object) -> tuple[Path, Path]:
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(conclusion, "write_best", fails)
    options = ("--cpu-ranks", "2", "--max-trials", "2", "--confirm", "0", "--metric", "throughput", "--quiet")
    ended = run_here("random", "train.py", "ds.json", *options)
    assert ended.returncode == 5
    assert ended.stderr.count("\n") == 1
    assert f"{path}: {os.strerror(number)}" in ended.stderr


def test_a_limit_on_the_size_of_files_is_named(tmp_path: Path) -> None:
    """It was 'disk I/O error' where the disk is fine."""
    limit_bytes = 4096
    (tmp_path / "train.py").write_text("")
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 1}')
    ended = subprocess.run(
        [sys.executable, "-c", "from optuna_dsat.cli import main; main()", "random", "train.py", "ds.json", "--quiet"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes)),
        capture_output=True,
        text=True,
    )
    assert ended.returncode in (2, 5)
    assert ended.stderr.count("\n") == 1
    assert f"(ulimit -f) lets no file grow beyond {limit_bytes} bytes." in ended.stderr
