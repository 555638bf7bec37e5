"""Inputs that a person hardly types: huge, endless, self-referring, or not there. One line and exit code 2 each."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from optuna_dsat.store import Store
from tests.cli.test_bad_input import GOOD
from tests.harness.entry_points import Run, bench, run_here

__all__ = ["bench", "run_here"]

DIGITS = "9" * 5000
BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10)
)
TEXTS = {
    "huge.json": f'{{"train_batch_size": {DIGITS}}}',
    "deep.json": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "nul.json": '{"wandb": {"api_key": "ab\\u0000cd12"}}',
    "bomb.yaml": BOMB,
    "cycle.yaml": "fix: &x {a: *x}\n",
    "deep.yaml": "a: " + "[" * 5000,
    "digits.toml": f"max-trials = {DIGITS}\n",
}
OF_FILES = [
    *(["random", "train.py", name] for name in TEXTS if name.endswith(".json")),
    *(["--options", name, "random", "train.py", "ds.json"] for name in TEXTS if name.endswith("toml")),
    *(["random", "def:MyTrial", "ds.json", "--hparams", name] for name in TEXTS if name.endswith("yaml")),
]
OF_OPTIONS = [
    ["--timeout", "inf"],
    ["--cpu-ranks", "100000000"],
    ["--random-seed", "1" + "0" * 30],
    ["--device-memory", f"{DIGITS}GiB"],
    ["--fix", "reduce_bucket_size=" + "[" * 5000],
    ["--output-dir", "x" * 5000],
    ["--nvme-path", "gone"],
    ["--storage", "sqlite:///pipe"],
]


@pytest.fixture
def refused(run_here: Run, tmp_path: Path) -> Run:
    (tmp_path / "train.py").write_text("raise SystemExit('never run')\n")
    (tmp_path / "def.py").write_text("class MyTrial:\n    pass\n")
    (tmp_path / "ds.json").write_text(json.dumps(GOOD))
    for name, text in TEXTS.items():
        (tmp_path / name).write_text(text)
    os.mkfifo(tmp_path / "pipe")

    def run(*arguments: str) -> object:
        begun = time.process_time()
        done = run_here(*arguments)
        assert done.returncode == 2, done.stderr
        [line] = done.stderr.strip().split("\n")
        assert len(line) <= 1000
        assert time.process_time() - begun < 5
        return done

    return run  # type: ignore[return-value]


@pytest.mark.parametrize("arguments", OF_FILES, ids=" ".join)
def test_files_are_read_within_bounds(refused: Run, arguments: list[str]) -> None:
    refused(*arguments, "--dry-run")


@pytest.mark.parametrize("options", OF_OPTIONS, ids=lambda words: words[0] + words[1][:20])
def test_options_are_checked(refused: Run, options: list[str]) -> None:
    ranks = [] if "--cpu-ranks" in options else ["--cpu-ranks", "2"]
    refused("random", "train.py", "ds.json", "--dry-run", *ranks, *options)


@pytest.mark.parametrize(
    "arguments",
    [
        ["random", "train.py", "/dev/zero", "--dry-run"],
        ["random", "pipe", "ds.json", "--dry-run"],
        ["studies", "--storage", "postgresql://me@127.0.0.1:1/db?port=abc"],
    ],
    ids=" ".join,
)
def test_nothing_is_waited_for(refused: Run, arguments: list[str]) -> None:
    refused(*arguments)


@pytest.mark.usefixtures("refused")
def test_a_pipe_is_read_once_and_used_all_the_same(run_here: Run, tmp_path: Path) -> None:
    config = {**GOOD, "train_micro_batch_size_per_gpu": 7}
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=(json.dumps(config),))
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
        (f"{command} --nonsense 2>/dev/full", 2, ""),
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
    ["plan", "--hf-config", "{shut}/config.json"],
]


@pytest.mark.parametrize("arguments", OF_SHUT_FOLDERS, ids=" ".join)
def test_what_this_user_may_not_look_at_is_named_in_one_line(
    refused: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    """As the system refuses it; who runs the tests may be root, to whom nothing is shut."""
    shut, look = tmp_path / "shut", os.stat
    shut.mkdir()

    def refuse(path: Any, **options: Any) -> os.stat_result:
        if isinstance(path, str | os.PathLike) and shut in Path(path).parents:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return look(path, **options)

    monkeypatch.setattr(os, "stat", refuse)
    done = refused(*(word.format(shut=shut) for word in arguments))
    assert "Permission denied" in done.stderr


@pytest.mark.parametrize(
    "error", [MemoryError(), ImportError("libx.so: failed to map segment from shared object")], ids=["heap", "library"]
)
def test_no_memory_is_told_in_one_line(run_here: Run, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def exhausted(*_: object, **_options: object) -> None:
        raise error

    monkeypatch.setattr("optuna_dsat.cli.file_of", exhausted)
    done = run_here("studies")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "no memory left" in done.stderr


@pytest.mark.parametrize("command", ["show", "resume"])
@pytest.mark.usefixtures("bench")
def test_a_name_that_no_database_can_hold_is_no_studys(run_here: Run, command: str) -> None:
    with Store.open("sqlite:///optuna-dsat.db") as store:
        store.create_study("one", {})
    done = run_here(command, os.fsdecode(b"\xff\xfe"))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "There is no study" in done.stderr
