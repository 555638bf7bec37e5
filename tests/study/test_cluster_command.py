"""The printed command that trains on a cluster."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from optuna_dsat.study.command import cluster_training_command
from tests.harness.studies import spec_of


def test_the_command_for_ray_names_the_interpreter_that_has_the_package(tmp_path: Path) -> None:
    command = cluster_training_command(spec_of(tmp_path, on="ray"), settings=["A=1"], words=["train.py"])
    assert shlex.split(command)[3:7] == ["A=1", sys.executable, "-m", "optuna_dsat.launch.places.ray_train"]
