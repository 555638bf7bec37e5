"""Tests remove only unused shared memory: a launch without its buffer would wait until the end of its test."""

from __future__ import annotations

import mmap
from pathlib import Path

from tests.conftest import _is_in_use


def test_a_buffer_is_in_use_from_its_creation_to_the_end_of_its_process(tmp_path: Path) -> None:
    file = tmp_path / "buffer"
    with file.open("w+b") as opened:
        assert _is_in_use(file), "before it is mapped"
        opened.truncate(mmap.PAGESIZE)
        mapped = mmap.mmap(opened.fileno(), mmap.PAGESIZE)
    assert _is_in_use(file), "mapped"
    mapped.close()
    assert not _is_in_use(file)
