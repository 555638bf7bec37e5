from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest

from optuna_dsat.launch.agent.command import launch_environment, prepare_launch, torchrun_command
from optuna_dsat.launch.machine.devices import Device, cpu_devices
from optuna_dsat.launch.machine.slots import SlotPool
from optuna_dsat.launch.protocol import LaunchRequest, ScriptCommand
from optuna_dsat.launch.run_directory import RANK_VARIABLES, RunDirectory
from optuna_dsat.runtime.overlay import BIND_CORES, MODEL
from optuna_dsat.runtime.rank import CORES_ENV, names_rank, set_rank_variables
from optuna_dsat.script.command.interception import OF_LAUNCHERS
from optuna_dsat.script.interpreter import with_package
from tests.harness.launches import request

GOLDEN = Path(__file__).parent / "golden"
DIRECTORY = RunDirectory(Path("/out/trial-0007"))
GPUS = tuple(Device(index=i, visible_id=str(i), name="GPU", memory_bytes=1) for i in (2, 3))


def golden_request(**changes: Any) -> LaunchRequest:
    command = ScriptCommand(
        script="train.py",
        args=("--epochs", "3"),
        cwd="/project",
        config_path="/project/ds_config.json",
        python="python",
    )
    return replace(request(Path("/project"), launch_id="trial-0007"), command=replace(command, **changes))


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_allocator_of_gpus_has_growing_segments_unless_the_user_sets_it(name: str) -> None:
    assert environment({}, kind="cuda")["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in environment({}, kind="cpu")
    own = environment({name: "max_split_size_mb:128"}, kind="cuda")
    assert {key: value for key, value in own.items() if key.endswith("ALLOC_CONF")} == {name: "max_split_size_mb:128"}


@pytest.mark.parametrize(
    ("name", "changes"),
    [("torchrun_script.txt", {}), ("torchrun_module.txt", {"script": "package.train", "is_module": True})],
)
def test_the_command_is_the_golden_one(name: str, changes: dict[str, Any]) -> None:
    command = torchrun_command(golden_request(**changes), directory=DIRECTORY)
    assert "\n".join(command) + "\n" == (GOLDEN / name).read_text(encoding="utf-8")


def test_an_option_of_the_script_is_no_abbreviation_of_torchrun_s() -> None:
    from torch.distributed.run import parse_args

    command = torchrun_command(golden_request(args=("--run", "a", "--log=b", "--", "c")), directory=DIRECTORY)
    parsed = cast(Any, parse_args)(list(command[3:]))
    script = ["train.py", "--run", "a", "--log=b", "--", "c"]
    assert (parsed.training_script, parsed.training_script_args) == ("optuna_dsat.runtime", script)


def test_the_agent_gets_the_arguments_of_torchrun(tmp_path: Path) -> None:
    pool, directory = SlotPool(cpu_devices(2)), RunDirectory.create(tmp_path, "trial-0007")
    asked = golden_request(python=sys.executable)
    prepared = prepare_launch(asked, directory, pool.take(2), pool=pool, base_env={}, mark="mark")
    agent = prepared.argv(17)
    module = [sys.executable, "-P", "-m", "optuna_dsat.runtime.agent.torchrun"]
    assert agent[:6] == [*module, str(directory.agent_record), "17"]
    assert tuple(agent[6:]) == torchrun_command(asked, directory=directory)[3:]


def environment(
    base: dict[str, str],
    *,
    kind: str = "cpu",
    purpose: str = "trial",
    env: dict[str, str] = {"MINE": "1"},  # noqa: B006 - read only
    **options: Any,
) -> dict[str, str]:
    devices = GPUS if kind == "cuda" else cpu_devices(2).devices
    launch = request(Path("/project"))
    launch = replace(launch, command=replace(launch.command, python="/venv/bin/python"))
    with patch("optuna_dsat.launch.agent.command.usable_cores", return_value=16):
        return launch_environment(
            base,
            request=replace(launch, purpose=purpose, env=env),
            directory=RunDirectory(Path("/out/trial-0000")),
            devices=devices,
            kind=kind,
            mark="mark",
            **{"total_slots": 4, **options},
        )


def test_ranks_that_have_their_own_cores_share_the_physical_ones_and_launches_side_by_side_have_others(
    tmp_path: Path,
) -> None:
    pool, asked, seen = SlotPool(cpu_devices(2)), replace(golden_request(), overlay={MODEL: {BIND_CORES: True}}), []
    for slots in (1, 1):
        directory = RunDirectory.create(tmp_path, "trial-0007")
        with patch("os.sched_getaffinity", return_value=set(range(2, 10))), patch("psutil.cpu_count", return_value=8):
            made = prepare_launch(asked, directory, pool.take(slots), pool=pool, base_env={}, mark="mark")
        seen += json.loads(made.environ[CORES_ENV])
    assert seen == [[2, 3, 4], [5, 6, 7]]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_environment_is_the_golden_one(kind: str) -> None:
    made = environment({"PATH": "/bin", "MASTER_PORT": "29500", "PET_NNODES": "3"}, kind=kind)
    assert made.pop("PYTHONPATH") == with_package(None)
    golden = (GOLDEN / f"environment_{kind}.json").read_text(encoding="utf-8")
    assert json.dumps(made, indent=2, sort_keys=True) + "\n" == golden


@pytest.mark.parametrize(
    "name",
    [
        *("MASTER_PORT", "RANK", "PET_NNODES", "TORCHELASTIC_RUN_ID"),
        *("OPTUNA_DSAT_STORAGE", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MPI_LOCALRANKID", "SLURM_PROCID"),
    ],
)
def test_what_belongs_to_another_job_or_to_the_tuner_is_not_inherited(name: str) -> None:
    assert name not in environment({name: "1"})


def test_ranks_get_the_variables_of_another_launcher_and_those_of_a_job_only_outside_of_one() -> None:
    given = {"SLURM_PROCID": "$RANK", "SLURM_JOB_ID": "$MASTER_PORT"}
    assert environment({"SLURM_PROCID": "0"}, env=given).items() >= given.items()
    assert environment({"SLURM_JOB_ID": "7"}, env=given).items() >= {**given, "SLURM_JOB_ID": "7"}.items()
    environ = {**given, "RANK": "3", "MASTER_PORT": "4711", "SLURM_NODEID": "$GROUP_RANK"}
    set_rank_variables(environ)
    assert (environ["SLURM_PROCID"], environ["SLURM_JOB_ID"], environ["SLURM_NODEID"]) == ("3", "4711", "$GROUP_RANK")
    assert set(OF_LAUNCHERS.values()) <= {f"${name}" for name in RANK_VARIABLES}
    assert all(map(names_rank, OF_LAUNCHERS.values()))


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("base", "slots", "threads"), [({}, 4, "4"), ({}, 100, "1"), ({"OMP_NUM_THREADS": "7"}, 4, "7")]
)
def test_the_cores_are_shared_out(base: dict[str, str], slots: int, threads: str, kind: str) -> None:
    assert environment(base, total_slots=slots, kind=kind)["OMP_NUM_THREADS"] == threads


def test_trackers_stay_offline_in_trials_and_are_the_user_s_in_a_full_run() -> None:
    assert environment({"WANDB_MODE": "online"})["WANDB_MODE"] == "offline"
    assert environment({"WANDB_MODE": "disabled"})["WANDB_MODE"] == "disabled"
    assert environment({})["MLFLOW_TRACKING_URI"] == "file:///out/trial-0000/trackers/mlflow"
    full = environment({"WANDB_MODE": "online"}, purpose="full")
    assert full["WANDB_MODE"] == "online"
    assert "MLFLOW_TRACKING_URI" not in full


def test_a_breakpoint_that_was_left_in_the_script_ends_no_trial() -> None:
    assert environment({})["PYTHONBREAKPOINT"] == "0"
    assert environment({"PYTHONBREAKPOINT": "ipdb.set_trace"})["PYTHONBREAKPOINT"] == "ipdb.set_trace"
    assert "PYTHONBREAKPOINT" not in environment({}, purpose="full")


def test_the_interpreter_s_folder_is_on_the_path_once() -> None:
    assert environment({"PATH": "/usr/bin"})["PATH"] == "/usr/bin:/venv/bin"
    assert environment({"PATH": "/venv/bin:/usr/bin"})["PATH"] == "/venv/bin:/usr/bin"


def test_the_package_is_importable_and_nothing_else_is(tmp_path: Path) -> None:
    link = Path(with_package(None))
    assert [path.name for path in link.iterdir()] == ["optuna_dsat"]
    code = "import optuna_dsat.runtime.rank as plan; print(plan.__file__)"
    done = subprocess.run(
        [sys.executable, "-P", "-S", "-c", code],
        env={**os.environ, "PYTHONPATH": str(link)},
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert Path(done.stdout.strip()) == link.parent / "runtime" / "rank.py"
