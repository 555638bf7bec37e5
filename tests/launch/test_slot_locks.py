from __future__ import annotations

from pathlib import Path

import pytest

from optuna_dsat.errors import UsageError
from optuna_dsat.launch.machine.owners import lock, lock_owner, unlock


def test_a_lock_is_the_users_own(tmp_path: Path) -> None:
    path = tmp_path / "gpu.lock"
    held = lock(path)
    assert held is not None
    assert path.stat().st_mode & 0o777 == 0o600
    unlock([held])
    assert lock_owner(path) is None


def test_a_link_in_the_place_of_a_lock_is_refused_and_its_target_stays(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("content")
    (tmp_path / "gpu.lock").symlink_to(target)
    with pytest.raises(UsageError, match="is a link"):
        lock(tmp_path / "gpu.lock")
    assert target.read_text() == "content"
