"""Ranks forked from a process that has also imported the libraries of these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.ranks import WarmRanks, warm_ranks_with

LIBRARIES = ("accelerate", "transformers.trainer")


@pytest.fixture(scope="session")
def warm_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmRanks]:
    yield from warm_ranks_with(tmp_path_factory.mktemp("warm-ranks"), *LIBRARIES)
