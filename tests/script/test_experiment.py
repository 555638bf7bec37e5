"""Experiment configurations of Determined, as far as a search takes them over."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from optuna_dsat.errors import UsageError
from optuna_dsat.script.experiment import read_experiment, training_options

TEXT = """
name: sums
entrypoint: python3 -m determined.launch.deepspeed --trial model_def:MyTrial
hyperparameters:
  deepspeed_config: ds_config.json
searcher:
  name: adaptive_asha
  metric: accuracy
  smaller_is_better: false
  max_trials: 7
  divisor: 4
  max_length: {epochs: 2}
resources: {slots_per_trial: 2, priority: 3, max_slots: 4}
reproducibility: {experiment_seed: 5}
environment:
  image: {gpu: determined/environments}
  environment_variables: [NCCL_DEBUG=INFO]
min_validation_period: {batches: 0}
min_checkpoint_period: {records: 64}
scheduling_unit: 20
max_restarts: 0
bind_mounts: [{host_path: /tmp, container_path: /data}]
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "experiment.yaml"
    path.write_text(text)
    return path


def test_what_has_a_meaning_is_taken_over_and_the_rest_is_named(tmp_path: Path) -> None:
    experiment = read_experiment(written(tmp_path, TEXT))
    assert experiment.entry == ("model_def:MyTrial",)
    assert experiment.is_trial
    assert experiment.config == "ds_config.json"
    assert experiment.options == {
        "--max-trials": "7", "--divisor": "4", "--max-slots": "4", "--random-seed": "5",
    }  # fmt: skip
    assert (experiment.slots, experiment.environment) == (2, {"NCCL_DEBUG": "INFO"})
    assert experiment.without_meaning == (
        *("searcher.metric", "resources.priority", "environment.image", "max_restarts", "bind_mounts"),
    )


def test_lengths_and_seed_are_those_of_the_training() -> None:
    assert training_options(yaml.safe_load(TEXT)) == {
        "--max-length": "2epochs", "--checkpoint-period": "64records", "--report-period": "20batches", "--seed": "5",
    }  # fmt: skip
    assert training_options({}) == {}
    assert training_options({"searcher": {"max_length": 100}}) == {"--max-length": "100batches"}
    with pytest.raises(UsageError, match=r"searcher\.max_length is 'long'; it is a number of batches"):
        training_options({"searcher": {"max_length": "long"}})


@pytest.mark.parametrize(
    ("entrypoint", "expected"),
    [
        ("model_def:MyTrial", ("model_def:MyTrial",)),
        ("[python3, -m, determined.launch.deepspeed, --trial=a.b:T]", ("a.b:T",)),
        (
            "python3 -m determined.launch.torch_distributed python3 train.py --lr 1",
            ("python3", "train.py", "--lr", "1"),
        ),
        ("python3 -m determined.launch.torch_distributed --nproc 2 -- train.py", ("train.py",)),
        ("python3 train.py", ("python3", "train.py")),
    ],
)
def test_an_entry_point_is_found_behind_the_launch_layer(
    tmp_path: Path, entrypoint: str, expected: tuple[str, ...]
) -> None:
    assert read_experiment(written(tmp_path, f"entrypoint: {entrypoint}")).entry == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hyperparameters: {a: 1}", "has no entrypoint"),
        ("entrypoint: python3 -m determined.launch.deepspeed --trial", "names nothing to run"),
        ("{entrypoint: 'm:T', hyperparameters: {deepspeed_config: {a: 1}}}", "write it to a JSON file"),
        ("{entrypoint: 'm:T', resources: {slots_per_trial: all}}", "it is a number of GPUs"),
        ("{entrypoint: 'm:T', environment: {environment_variables: [A]}}", "has 'A'; write NAME=VALUE"),
        ("{entrypoint: 'm:T', environment: {environment_variables: {cuda: 1}}}", "is 1; it is a list of texts"),
        ("{entrypoint: 'm:T', environment: {environment_variables: A=1}}", "is 'A=1'; it is a list of texts"),
        ("{entrypoint: 'm:T', resources: {slots_per_trial: true}}", "is true; it is a number of GPUs"),
        ("entrypoint: 1", "entrypoint is 1; it is a list of texts"),
        ("entrypoint: {m: 2000-01-01}", "it is a list of texts"),
        ('entrypoint: "python3 train.py \'x"', "is not a command: No closing quotation"),
    ],
)
def test_what_cannot_be_used_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_experiment(written(tmp_path, text))
