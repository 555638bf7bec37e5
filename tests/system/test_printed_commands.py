"""Commands as a search prints them train to their end, as they stand, with the configuration that was found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from optuna_dsat.script.trial_class import RUNNER
from optuna_dsat.study.result import training_command, write_best
from optuna_dsat.study.spec import make_spec
from tests.harness.commands import ROOT

SCRIPTS = ROOT / "tests" / "scripts" / "printed"
BEST = {
    "train_batch_size": 3,
    "train_micro_batch_size_per_gpu": 3,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 10_000, "allgather_bucket_size": 10_000},
}
WITHOUT_OPTIMIZER = {key: value for key, value in BEST.items() if key != "optimizer"}
ACCELERATE = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"}

pytestmark = pytest.mark.torchrun


def printed(folder: Path, script: dict[str, Any], best: dict[str, Any], **launch: Any) -> str:
    """Return the command that a study of this script prints, its best config written."""
    folder.joinpath("ds.json").write_text(json.dumps({**BEST, "zero_optimization": {"stage": 1}}))
    spec = make_spec(
        name="s",
        method="random",
        script={"cwd": str(folder), "config_path": str(folder / "ds.json"), "is_module": False, **script},
        ds_config={},
        device="cpu",
        slots_per_trial=1,
        output_dir=str(folder / "o"),
    )
    path, _ = write_best(folder / "o", best, {})
    command, names_config = training_command(spec, best, path, host_threads=1, **launch)
    assert names_config
    return command


def run(folder: Path, command: str) -> str:
    """Run a command in a shell, as its user would, and return its output."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize(
    ("script", "launch", "words"),
    [
        pytest.param(
            {"script": "plain.py", "args": ()},
            {"config_option": "--deepspeed_config"},
            ("torchrun", "--deepspeed_config"),
            id="torchrun, the script's option for its config",
        ),
        pytest.param(
            {"script": "plain.py", "args": ("--deepspeed_config", "ds.json")},
            {"deepspeed_launcher": True},
            ("deepspeed", "--num_gpus"),
            id="deepspeed, which passes --local_rank",
        ),
        pytest.param(
            {
                "script": "plain", "is_module": True, "args": ("--deepspeed_config=ds.json", "--batch", "1"),
                "arg_mappings": {"train_micro_batch_size_per_gpu": "--batch"},
            },
            {},
            ("-m", "--batch"),
            id="a module, an option that follows the batch size",
        ),
        pytest.param(
            {
                "script": "plain.py", "args": ("--deepspeed_config=ds.json", "--stage=1"),
                "arg_mappings": {"zero_optimization.stage": "--stage"},
            },
            {},
            ("--stage=2",),
            id="an option that sets the stage",
        ),
        pytest.param(
            {"script": "prepared.py", "args": (), "environment": ACCELERATE},
            {},
            ("ACCELERATE_USE_DEEPSPEED=true", "torchrun"),
            id="accelerate's environment",
        ),
    ],
)  # fmt: skip
def test_a_printed_command_trains_with_what_was_found(
    tmp_path: Path, script: dict[str, Any], launch: dict[str, Any], words: tuple[str, ...]
) -> None:
    for source in SCRIPTS.iterdir():
        if source.suffix == ".py":
            tmp_path.joinpath(source.name).write_text(source.read_text())
    best = WITHOUT_OPTIMIZER if "environment" in script else BEST  # accelerate is given the script's optimizer
    command = printed(tmp_path, script, best, **launch)
    assert set(words) <= set(command.split())
    run(tmp_path, command)
    got = json.loads(tmp_path.joinpath("got.json").read_text())
    assert (got["stage"], got["batch"]) == (2, 3)
    assert got["local_rank"] == (0 if launch.get("deepspeed_launcher") else -1)


def test_the_printed_command_of_a_deepspeed_trial_trains_it(tmp_path: Path) -> None:
    example = ROOT / "examples" / "deepspeed_trial"
    for name in ("model_def.py", "hparams.yaml"):
        tmp_path.joinpath(name).write_text(example.joinpath(name).read_text())
    args = (
        "model_def:MyTrial",
        "--deepspeed_config",
        "ds.json",
        "--hparams",
        "hparams.yaml",
        "--max-length",
        "2batches",
    )
    command = printed(tmp_path, {"script": RUNNER, "is_module": True, "args": args}, BEST)
    assert "optuna-dsat train model_def:MyTrial" in command
    run(tmp_path, command)
    assert list(tmp_path.rglob("*zero_pp_rank_0*")), "a checkpoint of ZeRO 2 is left"
