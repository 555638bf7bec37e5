from __future__ import annotations

import base64
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import optuna_dsat
from optuna_dsat.integrations.huggingface import DsatCallback, get_hf_args_with_overwrites
from optuna_dsat.runtime.rank import LAUNCH_ENV
from tests.harness.ranks import plan_of

CONFIG = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1}}


@pytest.fixture
def config_path(tmp_path: Path) -> str:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(CONFIG), encoding="utf-8")
    return str(path)


def decoded(text: str) -> Any:
    return json.loads(base64.urlsafe_b64decode(text))


def test_options_are_overridden_in_either_spelling_and_added_where_they_are_missing(config_path: str) -> None:
    args = ["--lr", "1", "--per-device-train-batch-size", "9", "--deepspeed=other.json", "--bf16"]
    assert get_hf_args_with_overwrites(args, {"deepspeed_config": config_path}) == [
        *("--lr", "1", "--per-device-train-batch-size", "4", f"--deepspeed={config_path}", "--bf16"),
        *("--gradient_accumulation_steps", "2"),
    ]


def test_overwrites_are_laid_over_the_config(config_path: str) -> None:
    hparams = {
        "deepspeed_config": config_path,
        "overwrite_deepspeed_args": {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 3}},
    }
    args = get_hf_args_with_overwrites([], hparams)
    assert args[:2] == ["--per_device_train_batch_size", "8"]
    assert decoded(args[-1]) == {**CONFIG, "train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 3}}


def test_without_hyperparameters_the_launch_says_what_runs(
    tmp_path: Path, config_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert get_hf_args_with_overwrites(["--bf16"]) == ["--bf16"]
    overlay = {"train_micro_batch_size_per_gpu": 6, "zero_optimization": {"stage": 3}}
    plan = plan_of(config_path=config_path, overlay=overlay)
    (tmp_path / "launch.json").write_text(json.dumps(asdict(plan)), encoding="utf-8")
    monkeypatch.setenv(LAUNCH_ENV, str(tmp_path / "launch.json"))
    args = get_hf_args_with_overwrites(["--bf16"])
    assert args[:2] == ["--bf16", "--deepspeed"], "the runtime sets the batch sizes"
    assert decoded(args[-1])["zero_optimization"] == {"stage": 3}


def test_hyperparameters_without_a_config_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'deepspeed_config'; it has \['lr'\]"):
        get_hf_args_with_overwrites([], {"lr": 1})
    with pytest.raises(ValueError, match=r"missing\.json"):
        get_hf_args_with_overwrites([], {"deepspeed_config": str(tmp_path / "missing.json")})


def test_the_names_are_public() -> None:
    assert optuna_dsat.DsatCallback is DsatCallback
    assert optuna_dsat.get_hf_args_with_overwrites is get_hf_args_with_overwrites
