from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import optuna
import pytest

from optuna_dsat.config.space_builder import SpaceRequest, build_space
from optuna_dsat.script.settings_file import SettingsCopy
from optuna_dsat.study.result import learning_rate_advice, training_command, write_settings
from optuna_dsat.study.spec import StudySpec, make_spec
from optuna_dsat.study.trainable import complete_config

BEST = Path("/out/best_ds_config.json")


def spec(*, is_module: bool = False, device: str = "cuda") -> StudySpec:
    script = {
        "script": "package.train" if is_module else "/project/train.py",
        "is_module": is_module,
        "args": ("--deepspeed_config", "ds.json"),
        "cwd": "/project",
        "config_path": "/project/ds.json",
    }
    return make_spec(
        name="s", method="random", script=script, ds_config={}, device=device, slots_per_trial=4, output_dir="/out"
    )


@pytest.mark.parametrize(
    ("option", "end"),
    [
        ("batch_size=", f"run.yaml batch_size=8 trainer.deepspeed={BEST}"),
        ("--batch_size", "run.yaml --batch_size 8"),
    ],
)
def test_a_settings_file_whose_keys_arguments_override_is_told_the_config(
    tmp_path: Path, option: str, end: str
) -> None:
    own = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}
    (tmp_path / "ds.json").write_text(json.dumps(own))
    (tmp_path / "run.yaml").write_text("batch_size: 2\ndata: inputs\ntrainer: {deepspeed: ds.json}\n")
    (tmp_path / "inputs").mkdir()  # a copy of the file elsewhere may not find it
    script = spec().script.model_copy(
        update={
            "args": ("run.yaml",),
            "cwd": str(tmp_path),
            "config_path": str(tmp_path / "ds.json"),
            "arg_mappings": {"train_micro_batch_size_per_gpu": option},
        }
    )
    found = spec().model_copy(update={"script": script})
    command, names_config = training_command(found, {**own, "train_micro_batch_size_per_gpu": 8}, BEST)
    assert names_config == option.endswith("=")
    assert set(command.partition("train.py ")[2].split()) == set(end.split())


@pytest.mark.parametrize(
    ("is_module", "deepspeed_launcher", "start"),
    [
        (False, False, "torchrun --nproc_per_node 4 /project/train.py"),
        (True, False, "torchrun --nproc_per_node 4 -m package.train"),
        (False, True, "deepspeed --num_gpus 4 /project/train.py"),
        (True, True, "deepspeed --num_gpus 4 --module package.train"),
    ],
)
def test_the_command_starts_the_script_as_its_options_expect(
    is_module: bool, deepspeed_launcher: bool, start: str
) -> None:
    command, names_config = training_command(spec(is_module=is_module), {}, BEST, deepspeed_launcher=deepspeed_launcher)
    assert names_config
    assert command == f"{start} --deepspeed_config {BEST}"


@pytest.mark.parametrize(
    ("source", "start"),
    [
        ("import torch.multiprocessing as mp\nmp.spawn(print, nprocs=4)\n", "torchrun --nproc_per_node 4"),  # or may
        ("import os\nos.environ['MASTER_PORT'] = '29500'\n", "deepspeed --num_gpus 4 --no_local_rank"),
        ("import os\nprint(os.environ['MASTER_PORT'])\n", "torchrun --nproc_per_node 4"),
    ],
)
def test_a_script_that_says_where_its_ranks_meet_is_started_so_that_it_trains(
    tmp_path: Path, source: str, start: str
) -> None:
    (tmp_path / "train.py").write_text("import setup_ranks\n")
    (tmp_path / "setup_ranks.py").write_text(source)
    found = spec()
    script = found.script.model_copy(update={"script": str(tmp_path / "train.py"), "cwd": str(tmp_path)})
    command, _ = training_command(found.model_copy(update={"script": script}), {}, BEST)
    assert command.startswith(f"{start} {tmp_path}/train.py ")


@pytest.mark.parametrize(
    ("is_module", "start"), [(False, "python /project/train.py"), (True, "python -m package.train")]
)
def test_a_script_that_started_its_ranks_is_started_without_a_launcher(is_module: bool, start: str) -> None:
    command, _ = training_command(spec(is_module=is_module), {}, BEST, deepspeed_launcher=True, starts_ranks=True)
    assert command == f"{start} --deepspeed_config {BEST}"


def test_an_argument_that_the_script_does_not_read_names_no_config() -> None:
    command, names_config = training_command(spec(), {}, BEST, config_in_code=True, config_option="--deepspeed_config")
    assert command.endswith(f"--deepspeed_config {BEST}")
    assert not names_config


def test_a_name_in_the_place_of_a_config_gives_way_to_the_best() -> None:
    script = spec().script.model_copy(update={"args": ("--deepspeed", "zero2", "--lr", "1"), "config_path": ""})
    found = spec().model_copy(update={"script": script})
    command, names_config = training_command(found, {}, BEST, config_option="--deepspeed")
    assert names_config
    assert command.endswith(f"train.py --deepspeed {BEST} --lr 1")


def test_on_the_cpu_deepspeed_is_told_so() -> None:
    command, _ = training_command(spec(device="cpu"), {}, BEST)
    assert shlex.split(command)[:3] == ["env", "DS_ACCELERATOR=cpu", "LOCAL_SIZE=4"]


@pytest.mark.parametrize(("device", "start"), [("cuda", "env OMP_NUM_THREADS=6 torchrun"), ("cpu", "env DS_")])
def test_training_computes_with_the_threads_that_were_measured(device: str, start: str) -> None:
    command, _ = training_command(spec(device=device), {}, BEST, host_threads=6)
    assert command.startswith(start)
    assert "OMP_NUM_THREADS=6" in shlex.split(command)


@pytest.mark.parametrize(
    ("optimizer", "factor"),
    [
        ({"type": "AdamW", "params": {"lr": 1e-3}}, "of 0.001 by 2 (the square root"),
        ({"type": "SGD", "params": {"lr": 0.1}}, "of 0.1 by 4 (the ratio"),
        ({"type": "AdamW", "params": {"lr": "auto"}}, "rate by 2 (the square root"),
        ({}, "or by 4 (the ratio"),
    ],
)
def test_a_changed_global_batch_suggests_a_learning_rate(optimizer: dict[str, Any], factor: str) -> None:
    advice = learning_rate_advice({"optimizer": optimizer}, batch=64, user_batch=16)
    assert advice is not None
    assert factor in advice
    assert "from 16 to 64" in advice
    assert advice.endswith("Keep the batch with --train-batch-size 16.")
    chosen = learning_rate_advice({"optimizer": optimizer}, batch=64, user_batch=16, is_chosen=True)
    assert chosen == advice.removesuffix(" Keep the batch with --train-batch-size 16.")
    assert learning_rate_advice({"optimizer": optimizer}, batch=16, user_batch=16) is None


def test_a_deepspeed_config_in_yaml_that_the_script_reads_is_in_the_command(tmp_path: Path) -> None:
    file = tmp_path / "ds.yml"
    file.write_text("train_micro_batch_size_per_gpu: 4\nzero_optimization: {stage: 1}\n")
    own = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}}
    source = {"kind": "setting", "file": str(file), "key": "train_micro_batch_size_per_gpu", "own": 4, "scale": 1}
    found = make_spec(
        name="s", method="random", ds_config=own, device="cuda", slots_per_trial=4, output_dir=str(tmp_path),
        script={
            "script": "/project/train.py", "args": (f"--config={file}",), "cwd": "/project", "config_path": "",
            "batch_source": source,
        },
    )  # fmt: skip
    command, names_config = training_command(found, {**own, "train_micro_batch_size_per_gpu": 8}, tmp_path / BEST.name)
    assert names_config
    assert command.endswith(f"/project/train.py --config={tmp_path}/best_ds.yml")


@pytest.mark.parametrize(
    ("optimizer", "device", "allowed"), [(None, "cpu", False), (None, None, None), ({"type": "AdamW"}, "cpu", None)]
)
def test_the_best_config_allows_the_scripts_own_optimizer_under_offload_as_its_launch_did(
    optimizer: dict[str, Any] | None, device: str | None, allowed: bool | None
) -> None:
    own: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4} | ({"optimizer": optimizer} if optimizer else {})
    zero = {"stage": 1, **({"offload_optimizer": {"device": device}} if device else {})}
    trial = optuna.trial.create_trial(value=1.0, user_attrs={"config": {**own, "zero_optimization": zero}})
    space = build_space(SpaceRequest(ds_config=own, zero_stages=(1, 2)))
    assert complete_config(trial, slots=2, space=space).get("zero_force_ds_cpu_optimizer") is allowed


@pytest.mark.parametrize(("key", "mode"), [("${OPTUNA_DSAT_SECRET_TRACKER_KEY}", 0o600), ("none", 0o644)])
def test_a_copy_with_the_value_of_a_reference_is_read_by_nobody_else(tmp_path: Path, key: str, mode: int) -> None:
    copy = SettingsCopy(original=Path("ds.yml"), path=tmp_path / "best_ds.yml", text="tracker: {team: blue}\n")
    write_settings(copy, {"tracker": {"key": key}})
    assert copy.path.read_text() == copy.text
    assert copy.path.stat().st_mode & 0o777 == mode
