"""The limit on the size of logs, on real files."""

from __future__ import annotations

from pathlib import Path

import pytest

from optuna_dsat.launch.event_log import END_BYTES, START_BYTES, LogLimit, dropped_in_words

LIMIT = START_BYTES + END_BYTES
LINE = b"x" * 63 + b"\n"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "rank0.stdout.log"


def write_lines(path: Path, size: int) -> None:
    with path.open("ab") as file:
        file.write(LINE * (size // len(LINE)))


def test_a_growing_log_keeps_its_beginning_and_end_within_the_limit(log: Path) -> None:
    limit = LogLimit([log])
    log.write_bytes(b"first line\n")
    for second in range(8):
        write_lines(log, 16 * 2**20)
        limit.check(float(second))
        allocated = log.stat().st_blocks * 512
        assert allocated <= LIMIT + 2**20
    size = log.stat().st_size
    with log.open("ab") as file:  # the writer's offset is unchanged
        file.write(b"last line\n")
    limit.close()
    text = log.read_bytes()
    assert text.startswith(b"first line\n" + LINE)
    assert text.endswith(LINE + b"last line\n")
    assert dropped_in_words(size + len(b"last line\n") - LIMIT).encode() in text
    assert b"\x00" not in text
    assert len(text) < LIMIT + 200


def test_a_log_within_the_limit_is_left_as_it_is(log: Path) -> None:
    write_lines(log, LIMIT)
    before = log.read_bytes()
    limit = LogLimit([log, log.with_name("absent.log")])
    limit.check(0.0)
    limit.close()
    assert log.read_bytes() == before
