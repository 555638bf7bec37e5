from __future__ import annotations

from tests.study.conftest import bench

__all__ = ["bench"]
