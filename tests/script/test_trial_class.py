from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import optuna_dsat.integrations.deepspeed_trial as package
from optuna_dsat.errors import UsageError
from optuna_dsat.integrations.deepspeed_trial import DeepSpeedTrialContext
from optuna_dsat.script.trial_class import (
    ATTRIBUTES,
    PROVIDED,
    REFUSED,
    Hparams,
    Length,
    complete_training,
    find_trial_class,
    is_trial_class,
    overwrites_of,
    runner_arguments,
    train_command,
)


def test_lengths_are_counted_in_batches_and_what_is_none_is_refused() -> None:
    lengths = {"100batches": 100, "7": 7, "1 batch": 1, "3epochs": 30, "1epoch": 10, "33records": 5, "32records": 4}
    for text, batches in lengths.items():
        assert Length.parse(text).batches(per_epoch=10, train_batch_size=8) == batches
    for text in ("", "0batches", "3 parsecs", "-1", "1.5epochs", "batches"):
        with pytest.raises(ValueError, match="is not a length: write 100batches, 3epochs or 5000records"):
            Length.parse(text)


def test_a_class_is_told_from_a_script() -> None:
    for text in ("model_def:MyTrial", "a.b:C"):
        assert is_trial_class(text)
    for text in ("train.py", "a:b:c", "dir/a:C", "a:"):
        assert not is_trial_class(text)


def test_a_class_is_found_without_running_its_module(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("from pkg.inner import Trial as Mine\nraise SystemExit\n")
    (tmp_path / "star.py").write_text("from pkg import *\n")
    assert find_trial_class("pkg:Mine", tmp_path) == tmp_path / "pkg" / "__init__.py"
    assert find_trial_class("star:Anything", tmp_path) == tmp_path / "star.py"
    with pytest.raises(UsageError, match=r"__init__\.py has no class Trial"):
        find_trial_class("pkg:Trial", tmp_path)


def load(folder: Path, text: str) -> Hparams:
    path = folder / "hparams.yaml"
    path.write_text(text, encoding="utf-8")
    return Hparams.load(path)


def test_an_experiment_configuration_gives_hyperparameters_and_data(tmp_path: Path) -> None:
    hparams = load(
        tmp_path,
        "name: x\ndata: {folder: d}\nhyperparameters:\n  width: {type: const, val: 3}\n"
        "  optimizer: {type: Adam, lr: 1e-3, eps: 1.0e-08}\n",
    )
    assert hparams.hyperparameters == {"width": 3, "optimizer": {"type": "Adam", "lr": 1e-3, "eps": 1e-8}}
    assert hparams.experiment is not None
    assert hparams.experiment["data"] == {"folder": "d"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr: {type: log, minval: -4, maxval: -2, base: 10}", "lr is a range to search .log.*give lr one value"),
        ("a: {b: {type: categorical, vals: [1, 2]}}", "a.b is a range to search"),
        ("- 1", "contains no hyperparameters"),
        ("a: [", "is neither YAML nor JSON"),
    ],
)
def test_hyperparameters_that_cannot_be_used_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load(tmp_path, text)


def settled(folder: Path, text: str, config: dict[str, Any], *, keep: bool = False) -> dict[str, Any]:
    path = folder / "launch.json"
    path.write_text(json.dumps(config))
    return load(folder, text).with_config(path, keep_overwrites=keep)


def test_a_named_config_becomes_the_launchs_file_and_loses_its_overwrites(tmp_path: Path) -> None:
    text = "deepspeed_config: ds.json\nwidth: 3\noverwrite_deepspeed_args: {train_batch_size: 8}\n"
    launch = str(tmp_path / "launch.json")
    assert settled(tmp_path, text, {}) == {"deepspeed_config": launch, "width": 3, "overwrite_deepspeed_args": {}}
    assert settled(tmp_path, text, {}, keep=True)["overwrite_deepspeed_args"] == {"train_batch_size": 8}


def test_a_config_in_the_hyperparameters_follows_the_launchs_file(tmp_path: Path) -> None:
    launch = {"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": 2}}
    beside = "width: 3\ntrain_batch_size: 16\nzero_optimization: {stage: 0, cpu_offload: false}\n"
    assert settled(tmp_path, beside, launch) == {"width": 3, **launch}
    within = "deepspeed_config: {train_batch_size: 16, gradient_clipping: 1}\n"
    assert settled(tmp_path, within, launch) == {"deepspeed_config": {"gradient_clipping": 1, **launch}}


def test_overwrites_are_laid_over_their_own_config_alone(tmp_path: Path) -> None:
    text = "overwrite_deepspeed_args: {gradient_clipping: 1}\n"
    named = load(tmp_path, f"deepspeed_config: ds.json\n{text}")
    assert overwrites_of(named, "./ds.json", tmp_path) == {"gradient_clipping": 1}
    assert overwrites_of(named, tmp_path / "best_ds_config.json", tmp_path) == {}
    assert overwrites_of(load(tmp_path, text), "any.json", tmp_path) == {"gradient_clipping": 1}
    with pytest.raises(UsageError, match="is a mapping of DeepSpeed settings; got 3"):
        overwrites_of(load(tmp_path, "overwrite_deepspeed_args: 3"), "ds.json", tmp_path)


def test_arguments_lead_to_the_command_that_trains() -> None:
    arguments = runner_arguments("m:T", config="ds.json", hparams="h.yaml", rest=("--max-length", "3epochs"))
    assert train_command(arguments, config="best.json", device="cuda", slots=4) == [
        *("optuna-dsat", "train", "m:T", "best.json", "--hparams", "h.yaml", "--max-length", "3epochs", "--gpus", "4")
    ]
    assert complete_training(arguments, "runs") == [*arguments, "--checkpoint-dir", "runs"]
    own = [*arguments, "--checkpoint-dir=x"]
    assert complete_training(own, "runs") == own


def test_dotted_keys_of_the_overwrites_are_nested(tmp_path: Path) -> None:
    text = (
        "overwrite_deepspeed_args: {zero_optimization.stage: 2, zero_optimization: {overlap_comm: true}, "
        "fp16.enabled: 1}"
    )
    assert load(tmp_path, text).hyperparameters["overwrite_deepspeed_args"] == {
        "zero_optimization": {"stage": 2, "overlap_comm": True},
        "fp16": {"enabled": 1},
    }


CLASS = "\nclass MyTrial:\n    def __init__(self, context):\n        self.context = context\n"


def refusal(folder: Path, text: str) -> str:
    (folder / "model_def.py").write_text(text + CLASS)
    with pytest.raises(UsageError) as raised:
        find_trial_class("model_def:MyTrial", folder)
    return str(raised.value)


def test_every_name_that_is_promised_is_there() -> None:
    assert set(package.__all__) >= PROVIDED
    assert all(hasattr(package, name) for name in PROVIDED)
    assert not PROVIDED & REFUSED.keys()
    assert not [name for name in ATTRIBUTES if hasattr(DeepSpeedTrialContext, name)]


def test_what_only_determined_has_is_refused_with_the_line_to_write(tmp_path: Path) -> None:
    words = refusal(
        tmp_path,
        "import determined as det\nfrom determined.pytorch import DataLoader, PyTorchTrial\n"
        "from determined.pytorch import deepspeed as det_ds\n",
    )
    assert "line 1: `import determined`" in words
    assert "line 2: from optuna_dsat.integrations.deepspeed_trial import DataLoader" in words
    assert "line 2: PyTorchTrial of Determined is not here: derive from DeepSpeedTrial" in words
    assert "line 3: import the names that you use of deepspeed" in words
    words = refusal(tmp_path, "def seed(self):\n    return self.context.env.trial_seed\n")
    assert "line 2: context.env of Determined is not here" in words
    assert "get_trial_seed()" in words
    words = refusal(tmp_path, "from optuna_dsat.integrations.deepspeed_trial import LRScheduler\n")
    assert "line 1: LRScheduler of Determined is not here: give the scheduler to" in words


def test_an_import_for_either_library_is_left_alone(tmp_path: Path) -> None:
    text = "try:\n    from determined.pytorch import DataLoader\nexcept ImportError:\n    pass\n"
    (tmp_path / "model_def.py").write_text(text + CLASS)
    assert find_trial_class("model_def:MyTrial", tmp_path) == tmp_path / "model_def.py"
