from __future__ import annotations

import os
from pathlib import Path

import pytest

from optuna_dsat.runtime.measure.memory import host_memory_bytes, memory_limits

MIB = 2**20


def group(folder: Path, *, limit: str, usage: int, cache: int, v2: bool = True) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if v2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for name, text in zip(names, (limit, str(usage)), strict=True):
        (folder / name).write_text(f"{text}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{'' if v2 else 'total_'}inactive_file {cache}\n")


def limits(folder: Path, membership: str) -> tuple[int, int | None]:
    """Return the host's memory by its groups, and the bytes left below the tightest limit; None without one."""
    (folder / "cgroup").write_text(membership)
    result = memory_limits(membership=folder / "cgroup", root=folder)
    total = host_memory_bytes(membership=folder / "cgroup", root=folder)
    return total, min((left for _, left in result), default=None)


def test_without_a_limit_it_is_what_the_machine_offers(tmp_path: Path) -> None:
    group(tmp_path / "a", limit="max", usage=5, cache=1)
    assert limits(tmp_path, "0::/a\n") == (os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), None)


def test_the_tightest_group_counts_and_read_files_are_free(tmp_path: Path) -> None:
    group(tmp_path / "a", limit=str(16 * MIB), usage=14 * MIB, cache=4 * MIB)
    group(tmp_path / "a" / "b", limit=str(8 * MIB), usage=MIB, cache=0)
    assert limits(tmp_path, "0::/a/b\n") == (8 * MIB, 6 * MIB)


@pytest.mark.parametrize("below", ["", "/b"])
def test_a_parent_s_limit_counts_for_the_groups_below_it(tmp_path: Path, below: str) -> None:
    group(tmp_path / "a", limit=str(4 * MIB), usage=MIB, cache=0)
    group(tmp_path / "a" / "b", limit="max", usage=MIB, cache=0)
    assert limits(tmp_path, f"0::/a{below}\n") == (4 * MIB, 3 * MIB)


def test_the_first_version_of_control_groups_is_read_too(tmp_path: Path) -> None:
    group(tmp_path / "memory" / "a", limit=str(8 * MIB), usage=9 * MIB, cache=2 * MIB, v2=False)
    assert limits(tmp_path, "5:cpu:/\n4:cpuset,memory:/a\n") == (8 * MIB, MIB)


def test_the_root_groups_of_both_versions_count_and_their_use_may_be_unknown(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{9 * MIB}\n")
    group(tmp_path / "memory", limit=str(7 * MIB), usage=MIB, cache=0, v2=False)
    assert limits(tmp_path, "") == (7 * MIB, 6 * MIB)
