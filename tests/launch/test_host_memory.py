from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from optuna_dsat.launch.machine.host import available_memory_bytes

MIB = 2**20


def group(folder: Path, *, limit: str, usage: int, cache: int, v2: bool = True) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if v2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for name, text in zip(names, (limit, str(usage)), strict=True):
        (folder / name).write_text(f"{text}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{'' if v2 else 'total_'}inactive_file {cache}\n")


def available(folder: Path, membership: str) -> int:
    (folder / "cgroup").write_text(membership)
    return available_memory_bytes(membership=folder / "cgroup", root=folder)


def test_without_a_limit_it_is_what_the_machine_offers(tmp_path: Path) -> None:
    group(tmp_path / "a", limit="max", usage=5, cache=1)
    offered = psutil.virtual_memory().available
    assert available(tmp_path, "0::/a\n") == pytest.approx(offered, rel=0.5)


def test_the_tightest_group_counts_and_read_files_are_free(tmp_path: Path) -> None:
    group(tmp_path / "a", limit=str(16 * MIB), usage=14 * MIB, cache=4 * MIB)
    group(tmp_path / "a" / "b", limit=str(8 * MIB), usage=MIB, cache=0)
    assert available(tmp_path, "0::/a/b\n") == 6 * MIB


def test_the_first_version_of_control_groups_is_read_too(tmp_path: Path) -> None:
    group(tmp_path / "memory" / "a", limit=str(8 * MIB), usage=9 * MIB, cache=2 * MIB, v2=False)
    assert available(tmp_path, "5:cpu:/\n4:cpuset,memory:/a\n") == MIB
