"""Owners of torch's build locks: processes that have the lock open or compile in its folder."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import util
from pathlib import Path
from types import ModuleType

import pytest

from optuna_dsat.launch.machine.operators import remove_stale_locks
from optuna_dsat.runtime.adapt import journal
from optuna_dsat.runtime.adapt.journal import guard_builds, is_held, remove_if_abandoned
from optuna_dsat.runtime.process_identity import process_space, start_ticks
from tests.harness.waits import wait_until

BUILDER = """
import os, sys, time
os.open(sys.argv[1], os.O_CREAT | os.O_EXCL)  # as torch's FileBaton does
print("building", flush=True)
time.sleep(600)
"""


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    folder = tmp_path / "py311_cpu" / "op"
    folder.mkdir(parents=True)
    return folder / "lock"


@pytest.fixture
def build(lock: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a build with plain torch, which writes nothing into its lock."""
    with subprocess.Popen([sys.executable, "-c", BUILDER, str(lock)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "building\n"
        yield process
        process.kill()


def file_baton() -> ModuleType:
    """Return torch's module ``file_baton``, patched, without importing torch."""
    torch = util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    result = util.spec_from_file_location("file_baton", Path(torch.origin).parent / "utils" / "file_baton.py")
    assert result is not None
    assert result.loader is not None
    module = util.module_from_spec(result)
    result.loader.exec_module(module)
    guard_builds(module)
    return module


def test_the_lock_of_a_killed_build_is_removed_at_once(
    lock: Path, build: subprocess.Popen[str], tmp_path: Path
) -> None:
    environ = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    assert remove_stale_locks(environ) == ()
    build.kill()
    build.wait()
    assert remove_stale_locks(environ) == (lock,)
    assert not lock.exists()


@pytest.mark.parametrize(
    ("command", "within"),
    [(["ninja", "-v"], True), (["x86_64-linux-gnu-g++-12", "-o", "{folder}/op.o"], False)],
    ids=["by-its-folder", "by-its-command"],
)
def test_compilers_at_work_hold_the_lock(lock: Path, tmp_path: Path, command: list[str], within: bool) -> None:
    lock.touch()
    arguments = [word.format(folder=lock.parent) for word in command]
    script = "import time; print('at work', flush=True); time.sleep(600)"
    with subprocess.Popen(
        [arguments[0], "-c", script, *arguments[1:]],
        executable=sys.executable,
        cwd=lock.parent if within else tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    ) as tool:
        assert tool.stdout is not None
        tool.stdout.readline()
        assert is_held(lock)
        tool.kill()
    assert not is_held(lock)


def test_who_only_looks_into_the_folder_holds_nothing(lock: Path) -> None:
    lock.touch()
    with subprocess.Popen(["sleep", "600"], cwd=lock.parent) as visitor:
        assert remove_if_abandoned(lock)
        visitor.kill()


def own(**changes: str) -> str:
    maker = {"node": platform.node(), "space": process_space(), "pid": str(os.getpid())}
    return " ".join({**maker, "start": str(start_ticks(os.getpid())), **changes}.values())


@pytest.mark.parametrize(
    ("text", "held_young", "held_old"),
    [
        (lambda: own(), True, True),
        (lambda: own(start="1"), False, False),
        (lambda: own(pid="4194305"), False, False),
        (lambda: own(node="another-machine"), True, False),
        (lambda: own(space="another-boot:1"), True, False),
        (lambda: "unreadable", True, False),
        (lambda: "", False, False),
    ],
    ids=["alive", "number-used-again", "gone", "machine", "namespace", "other-text", "unsigned"],
)
def test_age_decides_only_where_its_maker_cannot_be_seen(
    lock: Path, text: Callable[[], str], held_young: bool, held_old: bool
) -> None:
    lock.write_text(text())
    assert is_held(lock) is held_young
    os.utime(lock, (time.time() - 3600,) * 2)
    assert is_held(lock) is held_old


def test_an_unsigned_lock_on_a_shared_file_system_is_young_first(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock.touch()
    monkeypatch.setattr(journal, "file_system", lambda _: "nfs4")
    assert is_held(lock)


def test_nobody_waits_for_a_builder_that_is_gone(lock: Path) -> None:
    lock.touch()
    baton = file_baton()
    mine = baton.FileBaton(str(lock))
    assert mine.try_acquire()
    assert lock.read_text().split()[2] == str(os.getpid())
    assert not baton.FileBaton(str(lock)).try_acquire()
    mine.release()
    assert not lock.exists()


@pytest.mark.parametrize("removed", [False, True])
def test_who_waits_goes_on_with_the_build_of_a_builder_that_is_killed(
    lock: Path, build: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: bool
) -> None:
    """Another tuner may have removed the lock: the library was then loaded, though nobody had built it."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "ninja").write_text("#!/bin/sh\n[ -e lock ] && echo built > op.so\n")
    (tools / "ninja").chmod(0o755)
    (lock.parent / "build.ninja").touch()
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    code = (
        "import sys\n"
        "from tests.runtime.test_build_locks import file_baton\n"
        "baton = file_baton().FileBaton(sys.argv[1])\n"
        "assert not baton.try_acquire()\n"
        "print('waiting', flush=True)\n"
        "baton.wait()\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, "-c", code, str(lock)], env=environ, stdout=subprocess.PIPE, text=True
    ) as waiting:
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == "waiting\n"
        time.sleep(0.3)
        assert waiting.poll() is None, "its builder lives"
        build.kill()
        if removed:
            build.wait()
            lock.unlink()
        wait_until(lambda: waiting.poll() is not None, what="the wait ends")
        assert waiting.returncode == 0
    assert (lock.parent / "op.so").read_text() == "built\n"
    assert not lock.exists()
