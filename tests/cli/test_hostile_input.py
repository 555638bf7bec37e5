"""Files, folders, disks and streams that cannot be used: one line each."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from optuna_dsat.study import conclusion
from tests.cli.test_bad_input import GOOD
from tests.harness.entry_points import EntryPointBench, Run, bench, run_here

__all__ = ["bench", "run_here"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("raise SystemExit('never run')\n")
    (tmp_path / "ds.json").write_text(json.dumps(GOOD))
    return tmp_path


def test_a_pipe_is_read_once_and_used_all_the_same(run_here: Run, folder: Path) -> None:
    config = {**GOOD, "train_micro_batch_size_per_gpu": 7}
    os.mkfifo(folder / "pipe")
    writer = threading.Thread(target=(folder / "pipe").write_text, args=(json.dumps(config),))
    writer.start()
    done = run_here("random", "train.py", "pipe", "--dry-run", "--cpu-ranks", "2")
    writer.join()
    assert done.returncode == 0, done.stderr
    assert "micro-batch 7" in done.stdout


def test_a_folder_that_is_gone_and_streams_that_are_closed_or_full(tmp_path: Path) -> None:
    command = f"{sys.executable} -c 'from optuna_dsat.cli import main; main()'"
    gone = tmp_path / "gone"
    gone.mkdir()
    for shell, code, text in (
        (f"cd {gone} && rmdir {gone} && {command} studies", 2, "working directory was deleted"),
        (f"{command} --version >/dev/full", 5, "No space left"),
        (f"{command} --version >&-", 0, ""),
        (f"{command} studies --storage nonsense >/dev/full 2>&1", 2, ""),
    ):
        done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode == code, done.stderr
        assert text in done.stderr
        assert len(done.stderr.splitlines()) == bool(text)


OF_SHUT_FOLDERS = [
    ["random", "{shut}/train.py", "ds.json", "--dry-run"],
    ["random", "train.py", "ds.json", "--dry-run", "--output-dir", "{shut}/out"],
    ["random", "train.py", "ds.json", "--dry-run", "--nvme-path", "{shut}/nvme"],
    ["show", "one", "--storage", "sqlite:///{shut}/study.db"],
    ["plan", "--model", "{shut}/config.json"],
]


@pytest.mark.parametrize("arguments", OF_SHUT_FOLDERS, ids=" ".join)
def test_what_this_user_may_not_look_at_is_named_in_one_line(
    run_here: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    """As the system refuses it; who runs the tests may be root, to whom nothing is shut."""
    shut, look = folder / "shut", os.stat
    shut.mkdir()

    def refuse(path: Any, **options: Any) -> os.stat_result:
        if isinstance(path, str | os.PathLike) and shut in Path(path).parents:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return look(path, **options)

    monkeypatch.setattr(os, "stat", refuse)
    done = run_here(*(word.format(shut=shut) for word in arguments))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "Permission denied" in done.stderr


def test_no_memory_is_told_in_one_line(run_here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: object, **_options: object) -> None:
        raise MemoryError

    monkeypatch.setattr("optuna_dsat.cli.file_of", exhausted)
    done = run_here("studies")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "no memory left" in done.stderr


def test_a_file_that_cannot_be_written_is_named_in_one_line_with_the_code_of_storage(
    bench: EntryPointBench, run_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, number = str(bench.folder / "best_ds_config.json"), errno.EIO

    def fails(*_: object) -> None:
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(conclusion, "write_config", fails)
    options = ("--cpu-ranks", "2", "--max-trials", "2", "--confirm", "0", "--metric", "throughput", "--quiet")
    ended = run_here("random", "train.py", "ds.json", *options)
    assert ended.returncode == 5
    assert ended.stderr.count("\n") == 1
    assert f"{path}: {os.strerror(number)}" in ended.stderr
