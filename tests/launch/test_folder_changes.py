"""Changes by a launch that bypass the redirection are found by comparing folders."""

from __future__ import annotations

import os
from pathlib import Path

from optuna_dsat.launch.isolation import changed_paths, snapshot


def test_changes_are_found_and_nothing_else(tmp_path: Path) -> None:
    for name in ("same", "changed", "removed", "mode", "below/deep", "output/log", "__pycache__/x.pyc"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)

    def look() -> object:
        return snapshot([str(tmp_path)], without=[str(tmp_path / "output")])

    before = snapshot([str(tmp_path)], without=[str(tmp_path / "output")])
    assert look() == before
    (tmp_path / "changed").write_text("longer than before")
    (tmp_path / "removed").unlink()
    (tmp_path / "mode").chmod(0o700)
    (tmp_path / "made").touch()
    os.utime(tmp_path / "below" / "deep", (0, 0))
    for name in ("output/log", "__pycache__/x.pyc"):
        (tmp_path / name).write_text("changed, too")
    after = snapshot([str(tmp_path)], without=[str(tmp_path / "output")])
    names = ["below/deep", "changed", "made", "mode", "removed"]
    assert changed_paths(before, after) == [str(tmp_path / name) for name in names]
