from __future__ import annotations

import os
from pathlib import Path

import pytest

from optuna_dsat.runtime.files import read_regular

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
