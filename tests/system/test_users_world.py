"""A search leaves the user's files and shared memory as they were, whatever the script does and whoever dies."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from optuna_dsat.runtime.isolation.mounts import why_no_overlay
from tests.harness.commands import OPTIONS, Command
from tests.harness.users_world import shared, state, world
from tests.harness.waits import wait_until

__all__ = ["shared", "world"]

pytestmark = pytest.mark.torchrun


def search(folder: Path, shared: Path, *more: str) -> Command:
    return Command(
        folder,
        *("guided", "train.py", "ds_config.json", "--max-trials", "1", "--study", "s", *OPTIONS, *more),
        *("--storage", f"sqlite:///{folder.parent}/study.db", "--output-dir", str(folder.parent / "output")),
        *("--", str(shared), "--subprocess"),
    )


@pytest.mark.skipif(bool(why_no_overlay(Path("/tmp"))), reason="overlays cannot be mounted here")
def test_only_what_is_writable_is_written_though_the_search_was_killed_once(world: Path, shared: Path) -> None:
    before = state(world, shared)
    killed = search(world, shared)
    output = world.parent / "output" / "s"
    try:
        wait_until(lambda: any(output.glob("*/events/rank0.jsonl")), what="a rank is alive")
    finally:
        killed.kill()
    assert state(world, shared) == before
    writable = ("--writable", str(world / "log.txt"))
    shown, _ = search(world, shared, *writable).finish()  # removes what the killed one left
    after = state(world, shared)
    assert {name for name in before | after if before.get(name) != after.get(name)} == {str(world / "log.txt")}
    assert "overlays" not in shown, "the first launch shows it, unless --quiet"
    launches = [path for path in output.iterdir() if path.is_dir()]
    assert len(launches) >= 3
    assert not any((launch / "world").exists() for launch in launches), "what trials wrote is removed"


def test_writers_are_redirected_and_a_subprocess_that_writes_past_that_ends_the_search(
    world: Path, shared: Path
) -> None:
    """The database, the output and a log in the working directory; without overlays, as in a container."""
    before = state(world, shared)
    options = ("--isolation", "python", "--max-trials", "1", "--study", "s", *OPTIONS[:-1])  # not --quiet
    program = (sys.executable, "-c", "from optuna_dsat.cli import main; main()")
    script = ("train.py", "ds_config.json", *options, "--", str(shared), "--subprocess")
    words = shlex.join([*program, "random", *script])
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {words} 2> errors.log | tee out.log"],
        cwd=world,
        env=environ,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    errors = (world / "errors.log").read_text()
    assert done.returncode == 4, errors
    assert f"A launch changed {world}/copied.txt and 2 more: a subprocess" in errors
    assert "--writable" in errors
    assert "Trials run without overlays: what Python writes is redirected" in (world / "out.log").read_text() + errors
    after = state(world, shared)
    assert {Path(name).name for name in before if before[name] != after.get(name)} == {"log.txt", "users.txt"}
    made = {path.name.removesuffix("-lock") for path in world.iterdir() if str(path) not in before}
    assert made == {"optuna-dsat.db", "optuna-dsat-output", "errors.log", "out.log", "copied.txt"}
