from __future__ import annotations

import errno
import json
import os
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from optuna_dsat.errors import DsatError, ScriptFailedError
from optuna_dsat.launch import isolation
from optuna_dsat.launch.agent.command import write_run_directory
from optuna_dsat.launch.isolation import FolderWatch, changed_paths, snapshot
from optuna_dsat.launch.protocol import Conditions
from optuna_dsat.launch.run_directory import OutputError, RunDirectory, recorded_environment
from tests.harness.events import report_of
from tests.harness.launches import request


def test_a_failure_in_words_ends_with_the_last_line_of_its_error() -> None:
    failed = report_of(message="rank 3: the script left with sys.exit(1)")
    assert failed.failure_in_words == "the script left with sys.exit(1)"
    text = replace(failed, error_excerpt="Traceback\nOSError: no disk\n")
    assert text.failure_in_words == "the script left with sys.exit(1) (OSError: no disk)"
    logs = "WARNING: All log messages before absl::InitializeLog()\nI0000 00:00:17.5 cpu.cc:2] on\n"
    logs += "W1129 20:13:26.1 7 x.py:8] x\n[2026-11-29 20:52:53,410] [INFO] [logging.py:96] x\n"
    logs += "2026-11-29 20:52:53 - INFO - x\n[INFO] x\n"
    assert replace(text, error_excerpt=f"{text.error_excerpt}\n{logs}").failure_in_words == text.failure_in_words
    assert replace(failed, error_excerpt=logs).failure_in_words == failed.failure_in_words
    for line in ("E0000 00:00:17.5 dso.cc:2] x", "INFORMATION lost", "12 WARNINGS", "ValueError: INFO "):
        assert replace(failed, error_excerpt=f"{line}\n{logs}").failure_in_words.endswith(f"({line.strip()})")
    assert replace(failed, error_excerpt="sys.exit(1)").failure_in_words == failed.failure_in_words
    shown = replace(failed, message="OSError in backward: no disk", error_excerpt="Traceback\nOSError: no disk")
    assert shown.failure_in_words == "OSError in backward: no disk"


def test_the_directory_of_an_earlier_launch_is_moved_aside(tmp_path: Path) -> None:
    for content in ("first", "second"):
        RunDirectory.create(tmp_path, "profile").events(0).write_text(content)
    fresh = RunDirectory.create(tmp_path, "profile")
    assert not fresh.events(0).exists()
    assert (tmp_path / "profile.old-1/events/rank0.jsonl").read_text() == "first"
    assert (tmp_path / "profile.old-2/events/rank0.jsonl").read_text() == "second"


def test_files_are_replaced_whole_and_leave_no_temporary_ones(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "one")
    directory.write_json(directory.config, {"a": 1})
    directory.write_json(directory.config, {"a": 2})
    assert json.loads(directory.config.read_text()) == {"a": 2}
    assert sorted(path.name for path in directory.root.iterdir() if path.is_file()) == ["ds_config.json"]


def test_batch_sizes_that_are_left_open_are_so_in_the_file_that_the_script_reads(tmp_path: Path) -> None:
    size = "train_micro_batch_size_per_gpu"
    launched = request(tmp_path, ds_config={size: 4, "steps_per_print": 9}, in_file={size: "auto"})
    directory = write_run_directory(launched, tmp_path)
    assert json.loads(directory.config.read_text()) == {size: "auto", "steps_per_print": 9}


def test_a_report_is_written_in_plain_values(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "one")
    directory.write_report(report_of())
    written = json.loads(directory.report.read_text())
    assert written["outcome"] == "out_of_memory"
    assert written["devices"] == [0, 1]


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.ENOSPC, "No space left"), (errno.EDQUOT, "No space left"), (errno.EACCES, "Cannot write")],
)
def test_a_disk_that_refuses_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    directory = RunDirectory.create(tmp_path, "one")
    directory.write_json(directory.config, {"a": 1})

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, "refused")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", refuse)
        with pytest.raises(OutputError, match=words) as caught:
            directory.write_json(directory.config, {"a": 2})
    assert isinstance(caught.value, DsatError)
    assert caught.value.exit_code == 5
    assert "--output-dir" in str(caught.value)
    assert json.loads(directory.config.read_text()) == {"a": 1}
    assert not list(tmp_path.glob("one/.*"))


def test_a_directory_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="Cannot write"):
        RunDirectory.create(tmp_path / "file", "one")


def test_only_listed_variables_are_recorded(tmp_path: Path) -> None:
    environ = {
        "HF_TOKEN": "s3cret",
        "AWS_SECRET_ACCESS_KEY": "s3cret",
        "OPTUNA_DSAT_STORAGE": "postgresql://me:s3cret@host/db",
        "NCCL_DEBUG": "INFO",
        "NCCL_SECRET": "s3cret",
        "OMP_NUM_THREADS": "1",
    }
    assert recorded_environment(environ) == {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "1"}
    directory = RunDirectory.create(tmp_path, "one")
    directory.write_command(["python", "--token", "s3cret"], cwd="/x y", devices=(0,), environ=environ)
    texts = [path.read_text() for path in directory.root.rglob("*") if path.is_file()]
    assert len(texts) == 3
    assert not any("s3cret" in text for text in texts)
    assert directory.command_text.read_text() == (
        "cd '/x y'\nenv NCCL_DEBUG=INFO OMP_NUM_THREADS=1 python --token '***'\n"
    )


def test_variables_may_have_bytes_that_are_no_utf_8(tmp_path: Path) -> None:
    first, second = (RunDirectory.create(tmp_path, name) for name in ("one", "two"))
    first.write_command(["python"], cwd="/", devices=(0,), environ={"LD_LIBRARY_PATH": os.fsdecode(b"/a\xff")})
    second.copy_command(first)
    assert second.command_text.read_bytes() == b"cd /\nenv LD_LIBRARY_PATH='/a\xff' python\n"


def test_changes_are_found_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("same", "changed", "removed", "mode", "below/deep", "output/log", "__pycache__/x.pyc"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)

    look = partial(snapshot, [str(tmp_path)], without=[str(tmp_path / "output")])
    before = look()
    assert look() == before
    (tmp_path / "changed").write_text("longer than before")
    (tmp_path / "removed").unlink()
    (tmp_path / "mode").chmod(0o700)
    (tmp_path / "made").touch()
    os.utime(tmp_path / "below" / "deep", (0, 0))
    for name in ("output/log", "__pycache__/x.pyc"):
        (tmp_path / name).write_text("changed, too")
    names = ["below/deep", "changed", "made", "mode", "removed"]
    assert changed_paths(before, look()) == [str(tmp_path / name) for name in names]
    watch, launched = FolderWatch(tmp_path / "output" / "study"), request(tmp_path, isolation="auto")
    conditions = Conditions(isolation="mount", isolation_note=f"{tmp_path}: it belongs to another user")
    launch: Any = SimpleNamespace(
        conditions=conditions, request=launched, directory=RunDirectory.create(tmp_path / "output", "one")
    )
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    watch.begin(launched, here=tmp_path)
    (tmp_path / "same").unlink()
    with pytest.raises(ScriptFailedError, match=f"A launch changed {tmp_path}/same.* yourself, run the"):
        watch.check(launch)
    in_python = request(tmp_path, isolation="python")
    for purpose, is_shown, is_watched in (("profile", True, True), ("trial", False, True), ("trial", False, False)):
        launched = replace(in_python, purpose=purpose)
        assert bool(watch.begin(launched, here=tmp_path)) == is_shown
        (tmp_path / "made").write_text(f"{purpose} {is_watched}")
        with pytest.raises(ScriptFailedError, match="/made: ") if is_watched else nullcontext():
            watch.check(launch)
    monkeypatch.setattr(isolation, "_LIMIT_S", 0.0)  # as on a slow disk, which is faster the second time
    assert not changed_paths(look(), before)
