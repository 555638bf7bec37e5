"""The first losses under another ZeRO stage with offload are those under the user's config."""

from __future__ import annotations

from pathlib import Path

import pytest

from optuna_dsat.config import ds_config, user_file
from optuna_dsat.launch.follow import follow
from optuna_dsat.launch.launcher import TorchrunLauncher
from optuna_dsat.launch.measurement import LaunchRecord
from optuna_dsat.launch.protocol import LaunchReport, LaunchRequest
from optuna_dsat.study.confirm.loss_check import check_loss
from optuna_dsat.study.spec import make_spec

from .conftest import CONFIG, RANKS

pytestmark = pytest.mark.torchrun
EXAMPLE = "plain"


def test_zero_3_with_offload_trains_as_zero_1_does(
    example: Path, tmp_path: Path, warm_launcher: TorchrunLauncher
) -> None:
    parts = example / "parts.py"
    seeded = parts.read_text(encoding="utf-8") + "\n\ntorch.manual_seed(0)\n"
    parts.write_text(seeded, encoding="utf-8")
    user = user_file.load(example / CONFIG).raw
    spec = make_spec(
        name="losses",
        method="random",
        script={
            "script": str(example / "by_flag.py"),
            "args": ("--deepspeed", "--deepspeed_config", CONFIG),
            "cwd": str(example),
            "config_path": str(example / CONFIG),
        },
        ds_config=user,
        device="cpu",
        slots_per_trial=RANKS,
        output_dir=str(tmp_path / "out"),
    )
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "stage3_param_persistence_threshold": 0}
    best = ds_config.merge(user, {"zero_optimization": zero, "train_micro_batch_size_per_gpu": 16})
    reports: list[LaunchReport] = []

    def launch(request: LaunchRequest) -> tuple[LaunchRecord, LaunchReport]:
        record, report = follow(warm_launcher, request)
        reports.append(report)
        return record, report

    check = check_loss(
        spec,
        best,
        data_parallel_size=RANKS,
        launch=launch,
    )
    assert check.agrees, check.message
    assert [report.launch_id for report in reports] == ["loss-user", "loss-user-again", "loss-best"]
    assert len(set(check.losses["best"])) == 5  # it did learn
    laid_over = user_file.load(warm_launcher.run_directory("loss-best").config).raw
    assert laid_over["zero_optimization"]["stage"] == 3
    assert laid_over["train_micro_batch_size_per_gpu"] == user["train_micro_batch_size_per_gpu"]
