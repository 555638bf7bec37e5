"""A search leaves the user's files and shared memory as they were, whatever the script does and whoever dies."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from optuna_dsat.launch.isolation import why_no_overlay
from tests.harness.commands import OPTIONS, Command
from tests.harness.users_world import shared, state, world
from tests.harness.workers import wait_until

__all__ = ["shared", "world"]

pytestmark = pytest.mark.torchrun


def search(folder: Path, shared: Path, method: str, *more: str, trials: int = 2) -> Command:
    return Command(
        folder,
        *(method, "train.py", "ds_config.json", "--max-trials", str(trials), "--study", "s", *OPTIONS, *more),
        *("--storage", f"sqlite:///{folder.parent}/study.db", "--output-dir", str(folder.parent / "output")),
        *("--", str(shared), "--subprocess"),
    )


@pytest.mark.skipif(bool(why_no_overlay(Path("/tmp"))), reason="overlays cannot be mounted here")
def test_only_what_is_writable_is_written_though_the_search_was_killed_once(world: Path, shared: Path) -> None:
    before = state(world, shared)
    killed = search(world, shared, "guided")
    output = world.parent / "output" / "s"
    try:
        wait_until(lambda: any(output.glob("*/events/rank0.jsonl")), what="a rank is alive")
    finally:
        killed.kill()
    assert state(world, shared) == before
    writable = ("--writable", str(world / "log.txt"))
    shown, _ = search(world, shared, "guided", *writable).finish()  # removes what the killed one left
    after = state(world, shared)
    assert {name for name in before | after if before.get(name) != after.get(name)} == {str(world / "log.txt")}
    assert "overlays" not in shown, "the first launch shows it, unless --quiet"
    launches = [path for path in output.iterdir() if path.is_dir()]
    assert len(launches) >= 3
    assert not any((launch / "world").exists() for launch in launches), "what trials wrote is removed"


def test_redirected_writers_leave_the_users_files_and_what_the_tuner_writes_beside_is_not_blamed_on_them(
    world: Path, shared: Path
) -> None:
    """The database, the output and a log in the working directory; without overlays, as in a container."""
    before = state(world, shared)
    options = ("--isolation", "python", "--max-trials", "1", "--confirm", "0", "--study", "s", *OPTIONS)
    program = (sys.executable, "-c", "from optuna_dsat.cli import main; main()")
    words = shlex.join([*program, "random", "train.py", "ds_config.json", *options, "--", str(shared)])
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {words} 2> errors.log | tee out.log"],
        cwd=world,
        env=environ,
        stdin=subprocess.DEVNULL,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, (world / "errors.log").read_text()
    assert state(world, shared).items() >= before.items()
    made = {path.name.removesuffix("-lock") for path in world.iterdir() if str(path) not in before}
    assert made == {"optuna-dsat.db", "optuna-dsat-output", "errors.log", "out.log"}
    output = (world / "out.log").read_text() + (world / "errors.log").read_text()
    assert "Trials run without overlays: what Python writes is redirected" in output
    assert "Train with it" in output


def test_a_subprocess_that_writes_past_the_redirection_ends_the_search(world: Path, shared: Path) -> None:
    _, errors = search(world, shared, "random", "--isolation", "python").finish(code=4)
    assert f"The first launch changed {world}/copied.txt" in errors
    assert "--writable" in errors
