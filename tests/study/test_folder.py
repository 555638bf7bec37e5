"""The folder of a study is that of one study at a time."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from optuna_dsat.errors import UsageError
from optuna_dsat.store import Store
from optuna_dsat.study.folder import MARK, held_folder
from tests.harness.landscapes import Hill
from tests.harness.simulated import SimulatedLauncher
from tests.harness.studies import StudyBench


def owner(folder: Path) -> str:
    return str(json.loads((folder / MARK).read_text())["study_uuid"])


def test_tuners_of_one_study_share_its_folder_and_those_of_another_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "out" / "s"
    with held_folder(folder, "one"), held_folder(folder, "one"):
        with pytest.raises(UsageError, match="--output-dir"), held_folder(folder, "another"):
            pass
        assert owner(folder) == "one"
    with held_folder(folder, "another"), pytest.raises(UsageError), held_folder(folder, "one"):
        pass
    assert owner(folder) == "another"


def test_a_folder_that_cannot_be_made_is_left_to_whoever_writes_there(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with held_folder(tmp_path / "file" / "s", "one"):
        pass


def test_a_study_of_the_same_name_in_another_database_launches_nothing_there_meanwhile(
    bench: StudyBench, tmp_path: Path
) -> None:
    spec = bench.spec(max_trials=2, confirm=0)
    with ExitStack() as stack:
        other = StudyBench(bench.folder, stack.enter_context(Store.open(f"sqlite:///{tmp_path}/other.db")))
        stack.enter_context(held_folder(spec.study_dir, "that of the first"))
        with pytest.raises(UsageError, match="Another study writes to"):
            other.run(spec, Hill())
    launcher = SimulatedLauncher(Hill(), total_slots=2)
    assert bench.session(spec, launcher).run() is not None
