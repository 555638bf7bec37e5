"""Fixtures of the runtime's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from .starting import Starter


@pytest.fixture
def start(tmp_path: Path) -> Starter:
    return Starter(tmp_path)
