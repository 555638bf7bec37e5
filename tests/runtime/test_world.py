"""Folders covered by a launch's world, and their content in it."""

from __future__ import annotations

import glob
import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from optuna_dsat.runtime.files import mount_points
from optuna_dsat.runtime.isolation.mounts import why_no_overlay
from optuna_dsat.runtime.isolation.prepared import REMOVED
from optuna_dsat.runtime.isolation.world import World, WorldPlan, _unmappable, covered_folders, named_folders

needs_overlays = pytest.mark.skipif(bool(why_no_overlay(Path("/tmp"))), reason="overlays cannot be mounted here")

ENTER = """
import json, os, sys
from optuna_dsat.runtime.isolation.world import World, WorldPlan, enter_world
plan = WorldPlan.from_record(json.loads(sys.argv[1]))
enter_world(plan, cwd=os.getcwd(), arguments=[], environ=os.environ)
world = World.load(plan.record)
exec(sys.argv[2])
"""


def inside(
    folder: Path,
    code: str,
    *,
    isolation: str = "auto",
    passed: tuple[str, ...] = (),
    prepared: str = "",
    **variables: str,
) -> str:
    """Run code in a new world with the working directory ``folder/users``; return its output."""
    (folder / "users").mkdir(exist_ok=True)
    launch = folder / "out" / "trial-0000"
    launch.mkdir(parents=True, exist_ok=True)
    plan = {
        "isolation": isolation,
        "folder": str(launch / "world"),
        "passed": [str(launch), *passed],
        "prepared": prepared,
    }
    ended = subprocess.run(
        [sys.executable, "-c", ENTER, json.dumps(plan), code],
        cwd=folder / "users",
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@needs_overlays
def test_changes_are_seen_inside_alone(tmp_path: Path) -> None:
    (tmp_path / "users" / "old").mkdir(parents=True)
    (tmp_path / "users" / "file").write_text("before")
    code = "open('file', 'w').write('after'); os.rename('old', 'new'); print(open('file').read(), os.listdir('.'))"
    assert inside(tmp_path, code) == "after ['file', 'new']\n"
    assert (tmp_path / "users" / "file").read_text() == "before"
    assert [path.name for path in sorted((tmp_path / "users").iterdir())] == ["file", "old"]


@needs_overlays
def test_passed_folders_and_the_launchs_own_are_written_for_real(tmp_path: Path) -> None:
    (tmp_path / "users" / "cache").mkdir(parents=True)
    code = "open('cache/a', 'w').write('a'); open('../out/trial-0000/b', 'w').write('b')"
    inside(tmp_path, code, passed=(str(tmp_path / "users" / "cache"),))
    assert (tmp_path / "users" / "cache" / "a").read_text() == "a"
    assert (tmp_path / "out" / "trial-0000" / "b").read_text() == "b"


def test_a_folder_that_the_command_names_below_a_passed_one_is_passed(tmp_path: Path) -> None:
    record = json.loads(inside(tmp_path, "print(open(plan.record).read())", passed=("/dev/shm", str(tmp_path))))
    assert not {"/dev/shm", str(tmp_path / "users")} & {*record["mounted"], *record["redirected"]}


@needs_overlays
def test_the_script_does_not_meet_its_changes_a_second_time(tmp_path: Path) -> None:
    code = "open('mine', 'w'); print(sum('mine' in names for _, _, names in os.walk('..')))"
    assert inside(tmp_path, code) == "1\n"


@needs_overlays
def test_a_cache_that_did_not_exist_is_kept_for_the_next_launch(tmp_path: Path) -> None:
    cache = tmp_path / "users" / "hub"
    assert inside(tmp_path, "open('hub/model', 'w').write('m')", HF_HOME=str(cache)) == ""
    assert inside(tmp_path, "print(open('hub/model').read())", HF_HOME=str(cache)) == "m\n"
    assert not cache.exists()


@pytest.mark.parametrize("isolation", [pytest.param("auto", marks=needs_overlays), "python"])
def test_prepared_files_are_restored_in_the_world_alone(tmp_path: Path, isolation: str) -> None:
    prepared, users = tmp_path / "prepared", tmp_path / "users"
    copies = Path(f"{prepared}{users}")
    for path in (users / "runs", users / "kept", copies / "new" / "empty", copies / "kept"):
        path.mkdir(parents=True)
    for path in (users / "list", users / "runs" / "a", users / "kept" / "a"):
        path.write_text("before")
    for path in (copies / "list", copies / "kept" / "b"):
        path.write_text("prepared")
    (copies / "large").write_bytes(bytes(2**21))
    (copies / "runs").symlink_to(REMOVED)
    (copies / "latest").symlink_to("kept")
    redirect = "from optuna_dsat.runtime.isolation.redirection import redirect_writes\n"
    redirect += "redirect_writes(plan.redirected_files, folders=world.redirected, passed=world.passed)\n"
    code = (redirect if isolation == "python" else "") + (
        "print(sorted(os.listdir('.')), sorted(os.listdir('latest')), open('list').read(), os.listdir('new'))\n"
        "with open('large', 'r+b') as file: file.write(b'x')"
    )
    seen = inside(tmp_path, code, isolation=isolation, prepared=str(prepared))
    assert seen == "['kept', 'large', 'latest', 'list', 'new'] ['a', 'b'] prepared ['empty']\n"
    assert sorted(path.name for path in users.iterdir()) == ["kept", "list", "runs"]
    assert (users / "list").read_text() == "before"
    assert not (copies / "large").read_bytes().strip(b"\0")


@needs_overlays
def test_servers_are_reached_through_their_sockets(tmp_path: Path) -> None:
    (tmp_path / "users").mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "users" / "s"))
        server.listen()
        code = "import socket; socket.socket(socket.AF_UNIX).connect('s'); print('connected')"
        assert inside(tmp_path, code) == "connected\n"


@needs_overlays
def test_shared_memory_is_the_launchs_own(tmp_path: Path) -> None:
    name = f"/dev/shm/world-{os.getpid()}"
    assert inside(tmp_path, f"open({name!r}, 'w'); print(os.path.exists({name!r}))") == "True\n"
    assert not Path(name).exists()


def test_without_mounts_the_folders_are_redirected(tmp_path: Path) -> None:
    record = json.loads(inside(tmp_path, "print(open(plan.record).read())", isolation="python"))
    assert record["mode"] == "python"
    assert any(str(tmp_path).startswith(folder) for folder in record["redirected"])
    assert str(tmp_path / "out" / "trial-0000") in record["passed"]


def test_a_world_survives_its_file(tmp_path: Path) -> None:
    world = World(mode="mount", mounted=("/a",), passed=("/b", "/c"), reason="none", unprivileged=True)
    (tmp_path / "world.json").write_text(json.dumps(asdict(world)))
    assert World.load(tmp_path / "world.json") == world
    assert World.load(tmp_path / "missing.json") == World()
    (tmp_path / "other.json").write_text("[1]")
    assert World.load(tmp_path / "other.json") == World()
    assert WorldPlan(folder="/x/world").record == Path("/x/world.json")


def covered(cwd: Path, arguments: list[str], **more: Any) -> list[str]:
    return covered_folders(str(cwd), arguments, {"HOME": str(cwd)}, more.get("points", mount_points()))


def test_no_covered_folder_is_below_another_of_its_file_system(tmp_path: Path) -> None:
    result = covered(tmp_path, [])
    assert any(str(tmp_path).startswith(f"{folder}/") or str(tmp_path) == folder for folder in result)
    assert not {"/", "/proc", "/sys", "/dev", "/run", "/usr", "/etc"} & {*result}
    assert "/dev/shm" in result


def test_a_project_beside_the_system_is_covered_with_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(glob, "glob", lambda pattern: [pattern.replace("*", name) for name in ("lib", "src", "share")])
    real = os.path.isdir
    monkeypatch.setattr(os.path, "isdir", lambda path: path in ("/usr/src", "/var/src") or real(path))
    monkeypatch.setattr(os, "access", lambda *_: True)
    result = covered(Path("/usr/src/app"), [])
    assert {"/usr/src", "/var/src"} <= {*result}
    assert not {"/usr/lib", "/usr/share", "/var/lib"} & {*result}


def test_folders_of_other_users_which_a_user_namespace_cannot_copy_are_no_part_of_an_overlay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: users + 1)
    assert str(tmp_path) in covered(tmp_path, [])
    (mine := tmp_path / "colleagues" / "mine").mkdir(parents=True)
    lstat: Any = os.lstat

    def owned(path: str) -> os.stat_result:
        state = lstat(path)
        return os.stat_result((*state[:4], users + 1, *state[5:])) if path == str(mine) else state

    monkeypatch.setattr(os, "lstat", owned)
    assert str(tmp_path / "colleagues") in covered(mine, [])
    monkeypatch.setattr(os, "lstat", lstat)
    assert _unmappable(str(tmp_path), [str(tmp_path)]) == str(tmp_path / "colleagues")
    tmp_path.chmod(0o1777)
    assert _unmappable(str(tmp_path), [str(tmp_path)]) == ""
    monkeypatch.setattr(os, "geteuid", lambda: users)
    tmp_path.chmod(0o755)
    assert _unmappable(str(tmp_path), [str(tmp_path)]) == ""


def test_a_mount_below_a_covered_folder_is_covered_by_itself(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    result = covered(tmp_path, [], points={"/": "ext4", str(disk): "nfs4", str(tmp_path / "proc"): "proc"})
    assert str(disk) in result
    assert str(tmp_path / "proc") not in result


def test_mount_points_may_have_any_name(tmp_path: Path) -> None:
    names = ["/", "/mnt/a\\040b\\134c", "/media/Donn\u00e9es\u00a0\u2003", "/mnt/\udcff\r"]
    lines = (f"36 35 98:0 / {name} rw shared:1 - ext4 /dev/sda rw\n" for name in names)
    (tmp_path / "mountinfo").write_bytes(os.fsencode("".join(lines)))
    expected = ["/", "/mnt/a b\\c", *names[2:]]
    assert mount_points(str(tmp_path / "mountinfo")) == dict.fromkeys(expected, "ext4")


def test_paths_among_the_arguments_name_folders(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x.bin").touch()
    words = ["--lr=0.1", "--data=data/x.bin", "--out", "runs/new/deep", "plain", "/proc/self"]
    assert named_folders(str(tmp_path), words, {}) == [str(tmp_path), str(tmp_path / "data")]
