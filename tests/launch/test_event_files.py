"""Event files, as appended to by ranks."""

from __future__ import annotations

import os
from pathlib import Path

from optuna_dsat.launch.event_log import EventTail
from optuna_dsat.runtime.events import RankFinished, encode_event

DONE = RankFinished(rank=0, time=3.0, reason="profile_done", steps=3)


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_a_script_may_put_anything_in_the_place_of_a_file_of_events(tmp_path: Path) -> None:
    folder, pipe, none = tmp_path / "folder", tmp_path / "pipe", tmp_path / "none"
    folder.mkdir()
    (folder / "file").touch()
    os.mkfifo(pipe)
    for path in (folder, pipe, none):
        assert EventTail(path).read() == []


def test_long_files_of_events_are_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    line = encode_event(DONE).encode() + b"\n"
    append(path, line * (3 * 2**20 // len(line)) + line[:20])
    tail = EventTail(path)
    assert len(tail.read()) == 3 * 2**20 // len(line)
    append(path, line[20:] + b"\n" * 2**20)
    assert tail.read() == [DONE]
    assert tail.dropped == 0
