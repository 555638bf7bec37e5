"""A whole study from a head without slots: killed, resumed, and trained with, on a real SLURM of four nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState

from optuna_dsat.runtime.isolation.mounts import why_no_overlay
from optuna_dsat.study.command import training_command
from optuna_dsat.study.result import write_config
from optuna_dsat.study.spec import make_spec
from tests.harness.commands import OPTIONS, Command
from tests.harness.slurm import SlurmCluster
from tests.harness.users_world import shared, state, world
from tests.harness.waits import assert_within, wait_until
from tests.harness.workers import StoredStudy

__all__ = ["shared", "world"]

pytestmark = pytest.mark.torchrun

ON_TWO_NODES = ("--on", "slurm", "--nodes-per-trial", "2", "--gpus-per-node", "1", "--slurm-arg=--partition=main")
WHERE = """import os
import sys
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} on {os.environ['SLURMD_NODENAME']}", sys.argv[1:])
"""


def reports(folder: Path) -> dict[str, dict[str, Any]]:
    """Return name of a launch -> its report, for all that have one."""
    return {path.parent.name: json.loads(path.read_text()) for path in folder.glob("*/report.json")}


def test_a_killed_search_leaves_nothing_on_the_nodes_and_goes_on_and_the_users_files_are_as_before(
    slurm: SlurmCluster, world: Path, shared: Path
) -> None:
    before, outside = state(world, shared), world.parent
    storage, folder = f"sqlite:///{outside / 'study.db'}", outside / "output" / "s"
    environ = {"DS_ACCELERATOR": "cpu", **slurm.environ}  # the nodes' GPUs are none
    overlays = not why_no_overlay(Path("/tmp"))
    begun = Command(
        world,
        *("binary", "train.py", "ds_config.json", "--study", "s", "--storage", storage, "--max-trials", "3"),
        *("--output-dir", str(outside / "output"), *ON_TWO_NODES, *OPTIONS[2:-1]),  # not on this machine, not quiet
        *("--", str(shared), *(("--subprocess",) if overlays else ())),
        environ=environ,
    )
    try:
        wait_until(
            lambda: (folder / "trial-0001" / "events" / "rank1.jsonl").exists() or begun.process.poll() is not None,
            what="the second trial runs",
        )
    finally:
        begun.kill()
        killed_at = time.monotonic()
    assert begun.process.returncode == -9, "it ended before it was killed"
    wait_until(lambda: not slurm.tasks(), what="no agent and no rank of it is left")
    assert_within(time.monotonic() - killed_at, 5.0)
    wait_until(lambda: not slurm.jobs, what="no job of it is left")
    first = StoredStudy.read(storage, "s").trials[0]

    output, errors = Command(world, "resume", "s", "--storage", storage, environ=environ).finish()
    assert json.loads((folder / "best_ds_config.json").read_text())["zero_optimization"]["stage"] == 1
    stored = StoredStudy.read(storage, "s")
    stored.check_whole(budget=3)
    assert stored.trials[0] == first
    assert first.state is TrialState.COMPLETE
    ended = reports(folder)
    measured = {name for name, report in ended.items() if report["outcome"] == "measured"}
    assert {name for name in measured if name.startswith("trial-")}, (ended, errors)
    assert all(len(str(ended[name]["host"]).split(", ")) == 2 for name in measured)
    events = [path.read_text() for name in measured for path in (folder / name / "events").iterdir()]
    assert len(events) == 2 * len(measured)
    started = [json.loads(text.partition("\n")[0]) for text in events]
    assert {(event["rank"], event["local_rank"]) for event in started} == {(0, 0), (1, 0)}
    assert all({"--nnodes", "2"} <= set(ended[name]["command"]) for name in measured)
    assert any('"forked":true' in text for text in events)
    assert ("Trials write to overlays: your files stay as they are." in output + errors) is overlays
    assert not slurm.jobs
    assert state(world, shared) == before


def test_the_printed_command_trains_on_two_nodes(slurm: SlurmCluster, tmp_path: Path) -> None:
    tmp_path.joinpath("train.py").write_text(WHERE)
    tmp_path.joinpath("ds.json").write_text("{}")
    spec = make_spec(
        name="s",
        method="random",
        script={
            "script": str(tmp_path / "train.py"), "cwd": str(tmp_path), "config_path": str(tmp_path / "ds.json"),
            "args": ("ds.json", "it's two words"), "is_module": False,
        },
        ds_config={},
        device="cpu",
        slots_per_trial=2,
        nodes_per_trial=2,
        on="slurm",
        slurm_arg=("--partition=main",),
        output_dir=str(tmp_path / "o"),
    )  # fmt: skip
    path = tmp_path / "o" / "best.json"
    write_config(path, {"train_batch_size": 2})
    command, names_config = training_command(spec, {}, path, host_threads=1)
    assert names_config
    environ = {**os.environ, **slurm.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    assert [line.split()[1] for line in lines] == ["0", "1"]
    assert {line.split()[5] for line in lines} == {"n1", "n2"}
    assert all(line.endswith(f"['{path}', \"it's two words\"]") for line in lines)
