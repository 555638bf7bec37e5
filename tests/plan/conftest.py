from __future__ import annotations

from tests.study.conftest import bench, migrated

__all__ = ["bench", "migrated"]
