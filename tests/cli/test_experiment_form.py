"""``optuna-dsat asha experiment.yaml model_dir/``: Determined's own form."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from optuna_dsat.cli.parsing.launch_prefix import is_experiment, unfold_experiment
from optuna_dsat.errors import UsageError
from optuna_dsat.launch.machine import devices

KNOWN = frozenset({"--max-trials", "--random-seed"})
TEXT = """
entrypoint: model_def:MyTrial
hyperparameters: {deepspeed_config: ds_config.json}
searcher: {max_trials: 7, divisor: 3}
resources: {slots_per_trial: 2}
environment: {environment_variables: [A=b c], image: x}
"""


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "exp.yaml").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPTUNA_DSAT_STORAGE", raising=False)
    monkeypatch.delenv("OPTUNA_DSAT_OUTPUT_DIR", raising=False)
    monkeypatch.setattr(devices, "detect_devices", lambda: devices.cpu_devices(2))
    return tmp_path


def unfolded(folder: Path, *words: str, own: tuple[str, ...] = ()) -> list[str]:
    return list(unfold_experiment(words, options=own, known=KNOWN, cwd=folder).arguments)


def test_the_form_is_told_from_a_script(places: Path) -> None:
    assert is_experiment(["exp.yaml", "model"], cwd=places)
    assert not is_experiment(["exp.yaml", "none"], cwd=places)
    assert not is_experiment(["none.yaml", "model"], cwd=places)
    assert not is_experiment(["train.py", "model"], cwd=places)
    assert not is_experiment(["exp.yaml"], cwd=places)


def test_a_search_in_another_folder_leaves_its_output_here(places: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert unfolded(places, "exp.yaml", "model/", "--confirm", "0", own=("--study", "x")) == [
        *("--max-trials", "7", "--cpu-ranks", "2", "--env", "A=b c"),
        *("--study", "x", "--confirm", "0"),
        *("--output-dir", f"{places}/optuna-dsat-output", "--storage", f"sqlite:///{places}/optuna-dsat.db"),
        *("model_def:MyTrial", "ds_config.json", "--hparams", "../exp.yaml", "--"),
    ]
    assert Path.cwd() == places
    assert capsys.readouterr().err.splitlines() == [
        "../exp.yaml: environment.image: without meaning here.",
        "../exp.yaml: divisor: no option of this search.",
    ]


def test_what_is_given_wins(places: Path) -> None:
    words = unfolded(places, "exp.yaml", ".", "--gpus-per-trial=1", "--max-trials", "3", "--", "--max-length", "5")
    assert words == [
        *("--max-trials", "7", "--env", "A=b c", "--gpus-per-trial=1", "--max-trials", "3"),
        *("model_def:MyTrial", "ds_config.json", "--hparams", "exp.yaml", "--", "--max-length", "5"),
    ]


def test_a_script_is_run_with_its_arguments(places: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (places / "train.py").write_text("")
    text = "entrypoint: python3 -m determined.launch.deepspeed python3 train.py --lr 1"
    (places / "exp.yaml").write_text(text)
    python = ["--python", str(shutil.which("python3"))]
    assert unfolded(places, "exp.yaml", ".") == [*python, "train.py", "-", "--", "--lr", "1"]
    assert "hyperparameters reach it as its own arguments" in capsys.readouterr().err


def test_a_definition_needs_a_config_and_a_command_a_script(places: Path) -> None:
    (places / "exp.yaml").write_text("entrypoint: model_def:MyTrial")
    with pytest.raises(UsageError, match=r"add deepspeed_config: ds_config\.json"):
        unfolded(places, "exp.yaml", ".")
    (places / "exp.yaml").write_text("entrypoint: ./run.sh")
    with pytest.raises(UsageError, match=r"`\./run\.sh` runs no Python script or module"):
        unfolded(places, "exp.yaml", ".")
