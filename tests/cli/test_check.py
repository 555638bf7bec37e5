"""``check``: the config alone, and with the command that trains with it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from optuna_dsat.doctor import config_check
from optuna_dsat.errors import ConfigError
from tests.harness.entry_points import leave
from tests.harness.interceptor import intercept_here

PLAIN = "import deepspeed\nimport argparse\ndeepspeed.initialize()\n"


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Mapping[str, Any]]:
    """Return what the probe is given: a stand-in for it refuses nothing."""
    given: list[Mapping[str, Any]] = []

    def run_probe(
        _module: str, *, python: str, environ: Mapping[str, str], given: Any, _all: Any = given
    ) -> dict[str, Any]:
        assert Path(python).parent == Path(sys.executable).parent
        assert environ["DS_ACCELERATOR"] == "cpu"
        _all.append(given)
        return {"version": "1", "refused": [], "asked": {}, "quoted": [], "models": {}, "choices": {}}

    monkeypatch.setattr(config_check, "run_probe", run_probe)
    monkeypatch.setattr("optuna_dsat.script.command.launch_command.intercept", intercept_here)
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(PLAIN, encoding="utf-8")
    return given


def exit_code(*arguments: str) -> int:
    return leave("check", *arguments)


def write(**config: Any) -> str:
    Path("ds.json").write_text(json.dumps(config), encoding="utf-8")
    return "ds.json"


def test_the_ranks_of_the_command_count(probes: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    path = write(train_batch_size=8, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=1)
    assert exit_code(path) == 0
    assert exit_code(path, "torchrun", "--nproc_per_node", "4", "train.py", "--deepspeed_config", path) == 0
    assert probes[-1]["ranks"] == 4
    assert exit_code(path, "torchrun", "--nproc_per_node", "2", "train.py") == ConfigError.exit_code
    assert "train_batch_size to 4" in " ".join(capsys.readouterr().out.split())


def test_json_has_all_findings_and_stands_before_or_behind_the_config(
    probes: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(train_batch_size="8", fp16=[])
    for arguments in (("--json", path), (path, "--json")):
        assert exit_code(*arguments) == ConfigError.exit_code
        result = json.loads(capsys.readouterr().out)
        assert not result["usable"]
        assert {finding["name"] for finding in result["findings"]} >= {"train_batch_size", "fp16"}
    assert len(probes) == 2


def test_auto_is_an_error_for_a_script_that_nobody_fills_it_in_for(probes: list[Any]) -> None:
    path = write(train_batch_size="auto")
    assert exit_code(path) == 0
    assert exit_code(path, "train.py", "--deepspeed_config", path) == ConfigError.exit_code
    Path("train.py").write_text(f"import transformers\n{PLAIN}", encoding="utf-8")
    assert exit_code(path, "train.py", "--deepspeed_config", path) == 0
    assert probes


def test_options_of_the_hugging_face_trainer_are_compared(
    probes: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(train_batch_size="auto", optimizer={"type": "AdamW", "params": {"lr": 1e-4}})
    assert exit_code(path, "train.py", "--deepspeed", path, "--learning_rate", "1e-4") == 0
    assert exit_code(path, "train.py", "--deepspeed", path, "--learning_rate=5e-5") == ConfigError.exit_code
    assert "optimizer.params.lr is 0.0001" in " ".join(capsys.readouterr().out.split())
    assert probes


def test_a_config_that_is_not_there_is_refused_before_anything_is_loaded(
    probes: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("nothing.json") == ConfigError.exit_code
    assert "nothing.json" in capsys.readouterr().err
    assert not probes
