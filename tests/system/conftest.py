from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.workers import WorkerBench


@pytest.fixture
def bench(tmp_path: Path, forks: None) -> Iterator[WorkerBench]:  # noqa: ARG001 - the workers need it
    made = WorkerBench(tmp_path)
    (tmp_path / "train.py").write_text("")
    yield made
    made.end()
