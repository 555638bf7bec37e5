from __future__ import annotations

import json
import zipfile
from pathlib import Path
from unittest.mock import Mock

import pytest

from optuna_dsat.launch.machine.journal import LeftoverWatch
from tests.harness.entry_points import Run, run_here

__all__ = ["run_here"]

GOOD = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("print('never run')\n")
    (tmp_path / "ds.json").write_text(json.dumps(GOOD))
    (tmp_path / "broken.py").write_text("def oops(:\n")
    (tmp_path / "text.json").write_text("stage 2, offload")
    (tmp_path / "twice.json").write_text('{"bf16": {}, "bf16": {}}')
    (tmp_path / "triangle.json").write_text(
        json.dumps({"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2})
    )
    (tmp_path / "bucket.json").write_text('{"zero_optimization": {"stage": 2, "reduce_bucket_size": "large"}}')
    (tmp_path / "plain-file").write_text("")
    zipfile.ZipFile(tmp_path / "app.pyz", "w").close()
    (tmp_path / "train.ipynb").write_text('{"cells": [], "metadata": {}, "nbformat": 4}')
    (tmp_path / "definition.py").write_text("class MyTrial:\n    raise SystemExit('never run')\n")
    (tmp_path / "runs" / "batches-00000004").mkdir(parents=True)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text("raise SystemExit('never run')\n")
    return tmp_path


CASES = {
    "study-is-an-argument": (["best", "--study", "a"], "No such option: --study. The study is an argument: "),
    "name-is-study": (["random", "--name", "a", "python", "train.py"], "No such option: --name"),
    "no-command": (["train.py", "ds.json"], "To tune it: optuna-dsat tune train.py ds.json."),
    "option-of-the-script": (["random", "train.py", "--lr", "1"], "Options of the script follow --."),
    "command-in-quotes": (["random", "python -m package.train"], "Write a command without quotes around it."),
    "script-in-quotes": (["random", "train.py --lr 1"], "Write a command without quotes around it."),
    "unknown-option-with-a-value": (["random", "-o", "x.json", "--study", "a", "torchrun", "t.py"], "such option: -o"),
    "script-missing": (["random", "gone.py", "ds.json"], "gone.py does not exist"),
    "script-not-python": (["random", "broken.py", "ds.json"], "not Python (line 1)"),
    "script-is-zipped": (["random", "app.pyz"], "The script app.pyz is a zip archive: unpack it, and name the folder."),
    "script-is-a-notebook": (["random", "train.ipynb"], "The script train.ipynb is a notebook: export it, by jupyter"),
    "script-is-a-config": (["random", "ds.json"], "The script ds.json is a config. Name the training script first"),
    "config-is-a-script": (["random", "ds.json", "train.py"], "train.py is Python, no config. Name the training scrip"),
    "script-is-a-module": (["random", "package.train", "ds.json"], "To run a module, say so with -m."),
    "module-missing": (["random", "-m", "package.gone", "ds.json"], "there is no package/gone.py and no package/gone/"),
    "module-is-a-package": (["random", "-m", "package", "ds.json"], "package/__main__.py"),
    "config-missing": (["random", "train.py", "gone.json"], "gone.json"),
    "config-not-json": (["random", "train.py", "text.json"], "text.json"),
    "config-duplicate-key": (["random", "train.py", "twice.json"], "bf16"),
    "stage": (["random", "train.py", "ds.json", "--zero-stages", "1", "5"], "'5'; ZeRO stages are 0, 1, 2 and 3"),
    "metric": (["random", "train.py", "ds.json", "--metric", "speed"], "--metric is 'speed'"),
    "triangle": (["random", "train.py", "triangle.json"], "triangle.json: train_batch_size is 7, but must be 2 (train"),
    "size-is-a-word": (
        ["random", "train.py", "bucket.json"],
        "bucket.json: zero_optimization.reduce_bucket_size is 'large'; it must be a whole number",
    ),
    "fix-is-a-word": (["random", "train.py", "ds.json", "--fix", "stage=two"], "--fix zero_stage is 'two'; it must be"),
    "gpus": (["random", "train.py", "ds.json", "--gpus-per-trial", "9"], "--gpus-per-trial is 9, but this machine"),
    "output-dir": (["random", "train.py", "ds.json", "--output-dir", "plain-file/out"], "cannot be written to"),
    "storage-not-sqlite": (
        ["random", "train.py", "ds.json", "--storage", "sqlite:///ds.json"],
        "is not an SQLite",
    ),
    "trial-class-missing": (
        ["asha", "package.train:MyTrial", "ds.json"],
        "train.py has no class MyTrial; it has none.",
    ),
    "train-a-script": (["train", "train.py", "ds.json"], "train takes a stored study, or a model definition"),
    "train-length": (
        ["train", "definition:MyTrial", "ds.json", "--max-length", "10steps"],
        "--max-length: '10steps' is not a length: write 100batches",
    ),
    "trial-module-missing": (["asha", "gone:MyTrial", "ds.json", "--launcher", "torchrun"], "there is no gone.py in"),
    "trial-not-python": (["asha", "broken:MyTrial", "ds.json"], "The module broken is not Python (line 1)"),
    "module-is-a-path": (
        ["asha", "--module", "package/train.py", "ds.json"],
        "such as package.module; got 'package/tr",
    ),
    "trial-hparams-missing": (
        ["train", "definition:MyTrial", "ds.json", "--hparams", "gone.yaml"],
        "The hyperparameters gone.yaml cannot be read",
    ),
    "hparams-of-a-script": (
        ["random", "train.py", "ds.json", "--hparams", "ds.json"],
        "--hparams is for a DeepSpeedTr",
    ),
    "train-resume-from-nowhere": (
        ["train", "definition:MyTrial", "ds.json", "--resume"],
        "--resume needs the --checkpoint-dir",
    ),
    "train-over-checkpoints": (
        ["train", "definition:MyTrial", "ds.json", "--checkpoint-dir", "runs"],
        "runs holds checkpoints: give --resume",
    ),
    "train-gpus": (["train", "definition:MyTrial", "ds.json", "--gpus", "9"], "--gpus is 9, but this machine"),
    "no-database": (["db", "upgrade"], "There is no database"),
    "storage-kind": (["random", "train.py", "ds.json", "--storage", "mysql://u:geheim@h/db"], "unsupported kind"),
    "memory": (["random", "train.py", "ds.json", "--device-memory", "lots"], "--device-memory: 'lots' is not a size"),
    "fix-without-value": (["random", "train.py", "ds.json", "--fix", "overlap_comm"], "KEY=VALUE"),
}


@pytest.mark.parametrize(("args", "message"), CASES.values(), ids=CASES.keys())
def test_bad_input_is_one_clear_line_and_leaves_nothing(
    folder: Path, run_here: Run, args: list[str], message: str
) -> None:
    before = {path.name for path in folder.iterdir()}
    done = run_here(*args)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "geheim" not in done.stderr
    assert done.stdout == ""
    assert {path.name for path in folder.iterdir()} == before


@pytest.mark.usefixtures("folder")
def test_a_search_that_is_refused_looks_for_no_leftovers(run_here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its notices named leftovers of other tests."""
    monkeypatch.setattr(LeftoverWatch, "begin", Mock(side_effect=AssertionError))
    assert run_here(*CASES["gpus"][0]).returncode == 2


@pytest.mark.usefixtures("folder")
def test_a_dry_run_prints_its_search_as_json(run_here: Run) -> None:
    """``--dry-run --json`` printed the tables for people."""
    done = run_here("random", "train.py", "ds.json", "--dry-run", "--json", "--price", "2.5", "--zero-stages", "1", "2")
    (search,) = json.loads(done.stdout)["searches"]
    assert search["options"] == {
        "zero-stages": {"value": "1 2", "from": "command line"},
        "price": {"value": "2.5", "from": "command line"},  # an option of the command line alone
    }
    assert "reduce_bucket_size" in " ".join(row["knob"] for row in search["space"])
    (stages,) = [row["choices"] for row in search["space"] if row["knob"] == "zero_stage"]
    assert stages == [1, 2]
    assert search["profile_launch"]["attempts"]


def test_a_script_whose_name_no_folder_may_have_gets_a_study_all_the_same(folder: Path, run_here: Run) -> None:
    (folder / "fine\ntune.py").write_text("print('never run')\n")
    done = run_here("random", "fine\ntune.py", "ds.json", "--dry-run")
    assert done.returncode == 0, done.stderr
    refused = run_here("random", "train.py", "ds.json", "--study", "fine\ntune", "--dry-run")
    assert refused.returncode == 2, "a name that was chosen is not changed"


def test_a_dry_run_shows_the_space_and_launches_nothing(folder: Path, run_here: Run) -> None:
    before = {path.name for path in folder.iterdir()}
    shown = []
    for stages in (("--zero-stages", "1", "2"), ("--zero-stages", "1", "--zero-stages", "2")):
        done = run_here("random", "train.py", "ds.json", "--dry-run", *stages)
        assert done.returncode == 0, done.stderr
        shown.append(done.stdout)
    assert shown[0] == shown[1]
    assert "reduce_bucket_size" in shown[0]
    assert "stage3_prefetch_bucket_size" not in shown[0]
    assert "Profile launch" in shown[0]
    assert {path.name for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, "what your script passes to DeepSpeed"),
        ({"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"}, "ZeRO 2, at the micro-batch"),
        ({"zero_optimization": {"stage": 2}, "train_batch_size": 6}, "ZeRO 2, micro-batch 3."),
    ],
)
def test_a_dry_run_claims_no_batch_size_that_only_the_script_knows(
    folder: Path, run_here: Run, config: dict[str, object] | None, said: str
) -> None:
    (folder / "own.json").write_text(json.dumps(config or {}))
    done = run_here("random", "train.py", "own.json" if config else "-", "--dry-run", "--cpu-ranks", "2")
    assert f"Your config: {said}" in " ".join(done.stdout.split())


def test_a_module_is_found_without_being_imported(folder: Path, run_here: Run) -> None:
    done = run_here("random", "-m", "package.train", "ds.json", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "Profile launch" in done.stdout
    assert not (folder / "package" / "__pycache__").exists()


@pytest.mark.usefixtures("folder")
def test_arguments_after_two_dashes_are_the_scripts(run_here: Run) -> None:
    done = run_here("random", "train.py", "ds.json", "--dry-run", "--", "--zero-stages", "1", "2")
    assert done.returncode == 0, done.stderr
    assert "zero-stages" not in done.stdout
    assert done.stdout.endswith("Every option is left at its default.\n"), "instead of a table without rows"


def test_the_autotuning_section_gives_options_and_what_is_not_honoured_is_named(folder: Path, run_here: Run) -> None:
    section = {"enabled": True, "tuner_type": "random", "fast": True, "results_dir": "r", "metric": "latency"}
    (folder / "auto.json").write_text(json.dumps({**GOOD, "autotuning": section}))
    done = run_here("tune", "train.py", "auto.json", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "autotuning.results_dir is not used" in done.stderr
    kept = next(line for line in done.stdout.splitlines() if "reduce_bucket_size" in line)
    assert "kept" in kept
    plain = run_here("random", "train.py", "auto.json", "--dry-run", "--metric", "speed")
    assert plain.returncode == 2
    assert "--metric is 'speed'" in plain.stderr


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--max-trials", "x"), "Invalid value for '--max-trials': it must be a whole number."),
        (("--max-trials", "0"), "--max-trials is 0; it must be at least 1."),
        (("--timeout", "1h"), "Invalid value for '--timeout': it must be a number."),
        (("--timeout", "0"), "--timeout is 0.0; it must be above 0."),
        (("--launcher", "foo"), "Invalid value for '--launcher': 'foo' is not one of 'warm', 'torchrun'."),
        (("--memory-margin", "200%"), "--memory-margin is 2.0; it must be below 1."),
        (("--min-gain", "much"), "--min-gain is 'much'; write a share such as 1% or 0.01."),
    ],
)
def test_a_librarys_words_on_a_value_are_said_as_a_rule(run_here: Run, options: tuple[str, str], said: str) -> None:
    done = run_here("guided", "train.py", "ds.json", *options)
    assert done.returncode == 2
    assert done.stderr.startswith(f"optuna-dsat: {said}")


@pytest.mark.usefixtures("folder")
def test_every_share_may_be_written_as_one_reads_it(run_here: Run) -> None:
    """``--tie 1%`` was one, ``--min-gain 1%`` and ``--memory-margin 5%`` were refused."""
    shares = ("--tie", "2%", "--min-gain", "0.5%", "--memory-margin", "5%")
    done = run_here("guided", "train.py", "ds.json", "--dry-run", *shares)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    shown = {row[0]: row[2] for row in rows if row and row[0] in ("tie", "min-gain", "memory-margin")}
    assert shown == {"tie": "0.02", "min-gain": "0.005", "memory-margin": "0.05"}
