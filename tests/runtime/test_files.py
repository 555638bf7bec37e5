"""Atomic writes, which clean up after killed writers only, and bounded reads of regular files."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from optuna_dsat.runtime.files import read_regular, set_aside, write_output, write_text_atomic


def test_what_a_killed_writer_left_goes_with_the_next_write_of_that_file(tmp_path: Path) -> None:
    others = {".b.json.123", ".a.json.x", ".a.json", "a.json.123"}
    for name in (".a.json.123", f".a.json.5.{os.getpid()}", *others):
        (tmp_path / name).write_text("half")
    write_text_atomic(tmp_path / "a.json", "whole")
    assert {path.name for path in tmp_path.iterdir()} == {"a.json", *others}
    assert (tmp_path / "a.json").read_text() == "whole"


@pytest.mark.parametrize("number", ["123", "5.123", str(os.getpid())], ids=["before", "now", "other container"])
def test_what_a_living_writer_has_begun_stays(tmp_path: Path, number: str) -> None:
    begun = tmp_path / f".a.json.{number}"
    with begun.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        write_text_atomic(tmp_path / "a.json", "whole")
        assert begun.exists()
    write_text_atomic(tmp_path / "a.json", "again")
    assert not begun.exists()


def test_a_file_that_was_taken_for_an_abandoned_one_is_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = fcntl.flock
    taken: list[str] = []

    def taken_just_before(file: Any, operation: int) -> None:
        if not taken:
            taken.append(next(tmp_path.iterdir()).name)
            (tmp_path / taken[0]).unlink()
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", taken_just_before)
    write_text_atomic(tmp_path / "a.json", "whole")
    assert taken
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_text() == "whole"


def test_a_link_in_the_place_of_a_partial_file_leads_nowhere(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("mine")
    (tmp_path / ".a.json.123").symlink_to(target)
    write_text_atomic(tmp_path / "a.json", "whole", mode=0o600, durable=True)
    assert target.read_text() == "mine"
    assert (tmp_path / "a.json").stat().st_mode & 0o777 == 0o600


def test_output_goes_through_links_and_keeps_permissions_and_other_names(tmp_path: Path) -> None:
    target = tmp_path / "folder" / "target.json"
    target.parent.mkdir()
    link = tmp_path / "link.json"
    link.symlink_to(target)
    write_output(link, "first")
    assert link.is_symlink()
    assert target.read_text() == "first"
    target.chmod(0o640)
    write_output(link, "second")
    assert target.stat().st_mode & 0o777 == 0o640
    other = tmp_path / "other.json"
    os.link(target, other)
    write_output(target, "third")
    assert other.read_text() == "third"


def test_output_goes_into_pipes_devices_and_standard_streams(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_output(pipe, "through the pipe")
    assert os.read(reader, 100) == b"through the pipe"
    os.close(reader)
    assert pipe.is_fifo()
    write_output(Path(os.devnull), "nothing")
    assert Path(os.devnull).is_char_device()
    write_output(Path("/dev/stdout"), "to standard output")
    assert "to standard output" in capfd.readouterr().out


def test_files_are_set_aside_under_the_first_free_name(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    (tmp_path / "a.json.old-1").symlink_to("nowhere")
    file.write_text("mine")
    assert set_aside(file) == tmp_path / "a.json.old-2"
    assert (tmp_path / "a.json.old-2").read_text() == "mine"


KERNEL_LOG = Path("/proc/kmsg")
"""File with the mode of a regular file whose reads block."""


def test_a_file_is_read_up_to_a_bound(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert read_regular(tmp_path / "file") == read_regular(tmp_path / "file", most_bytes=5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_regular(tmp_path / "file", most_bytes=4)


def test_what_is_no_file_blocks_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path(os.devnull), tmp_path, tmp_path / "none"):
        with pytest.raises(OSError):  # noqa: PT011 - of one kind each
            read_regular(path)


def _read_until_empty() -> None:
    """Read the kernel's messages, each of which is returned once, until none are left."""
    while True:
        read_regular(KERNEL_LOG, most_bytes=2**30)


@pytest.mark.skipif(not os.access(KERNEL_LOG, os.R_OK), reason="only root reads the kernel's log")
def test_a_file_that_has_nothing_yet_blocks_nobody() -> None:
    with pytest.raises(BlockingIOError, match="nothing yet"):
        _read_until_empty()
