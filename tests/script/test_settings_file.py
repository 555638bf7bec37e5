"""A copy of a settings file differs in one number, and is made only where it means what the original means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from optuna_dsat.config.ds_config import MICRO_BATCH
from optuna_dsat.script.settings_file import SettingsCopy, settings_copy

KEY = "data.0.batch"


def copied(
    folder: Path, text: str, *, name: str = "run.yaml", micro_batch: int = 6, **source: Any
) -> SettingsCopy | None:
    file = folder / "conf" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    return settings_copy(
        {"kind": "setting", "file": str(file), "key": KEY, "own": 3, "scale": 1, **source},
        {MICRO_BATCH: micro_batch},
        args=("train", f"--settings=conf/{name}"),
        cwd=str(folder),
        folder=folder / "out",
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.yaml", "# mine\nlr: 1e-4  # a string to some\ndata:\n  - {batch: 3, é: '3'}\n  - {batch: 3}\n"),
        ("run.json", '{\n\t"lr": 1e-4,\n\t"data": [{"batch": 3, "name": "a"}]\n}\n'),
    ],
)
def test_a_copy_differs_in_the_number_alone_and_stands_in_the_command(tmp_path: Path, name: str, text: str) -> None:
    copy = copied(tmp_path, text, name=name)
    assert copy is not None
    assert copy.text == text.replace("batch: 3", "batch: 6", 1).replace('"batch": 3', '"batch": 6')
    assert copy.pointed(("train", f"--settings=conf/{name}", "a=b"), cwd=str(tmp_path)) == [
        "train",
        f"--settings={tmp_path}/out/best_{name}",
        "a=b",
    ]


@pytest.mark.parametrize(
    ("name", "text", "changed"),
    [
        (
            "run.yaml",
            "deepspeed: conf/ds.json  # mine\ndata: [{batch: 3}]\n",
            'deepspeed: "/best/ds.json"  # mine\ndata: [{batch: 6}]\n',
        ),
        (
            "run.json",
            '{"data": [{"batch": 3}], "train": {"deepspeed": "ds.json"}}',
            '{"data": [{"batch": 6}], "train": {"deepspeed": "/best/ds.json"}}',
        ),
    ],
    ids=["from the working directory", "from its own folder"],
)
def test_a_copy_names_the_best_config_where_its_file_names_the_users(
    tmp_path: Path, name: str, text: str, changed: str
) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "ds.json").write_text("{}")
    (tmp_path / "conf" / name).write_text(text)
    own = {"kind": "setting", "file": str(tmp_path / "conf" / name), "key": KEY, "own": 3}

    def copy(source: dict[str, Any], *, micro_batch: int, user_config: str = "conf/ds.json") -> SettingsCopy | None:
        return settings_copy(
            source,
            {MICRO_BATCH: micro_batch},
            args=("data.csv", "--deepspeed=conf/ds.json", f"conf/{name}"),
            cwd=str(tmp_path),
            folder=tmp_path / "out",
            user_config=str(tmp_path / user_config),
            best_config="/best/ds.json",
        )

    both = copy(own, micro_batch=6)
    assert both is not None
    assert (both.text, both.sets_batch, both.names_config) == (changed, True, True)
    for source, micro_batch in ((own, 3), ({"kind": "loader"}, 6), ({}, 6)):
        path_alone = copy(source, micro_batch=micro_batch)
        assert path_alone is not None
        assert (path_alone.text, path_alone.sets_batch) == (changed.replace("6", "3"), False)
    assert copy({}, micro_batch=6, user_config="conf/other.json") is None


def test_a_config_that_stands_in_two_places_by_an_alias_is_left_to_the_user(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text("{}")
    (tmp_path / "run.yaml").write_text("one: &config ds.json\ntwo: *config\n")
    result = settings_copy(
        {},
        {MICRO_BATCH: 6},
        args=("run.yaml",),
        cwd=str(tmp_path),
        folder=tmp_path,
        user_config=str(tmp_path / "ds.json"),
        best_config="/best/ds.json",
    )
    assert result is None


def test_a_folder_that_an_earlier_run_wrote_is_no_file_to_read(tmp_path: Path) -> None:
    assert copied(tmp_path, "data: [{batch: 3}]\noutput_dir: ../conf\n") is not None
    assert copied(tmp_path, "data: [{batch: 3}]\ndataset: ../conf\n") is None


def test_a_number_that_counts_the_samples_of_all_ranks_stays_one(tmp_path: Path) -> None:
    copy = copied(tmp_path, "data: [{batch: 12}]\n", scale=4)
    assert copy is not None
    assert copy.text == "data: [{batch: 24}]\n"


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("data: [{batch: 3}]\n", {"micro_batch": 3}),
        ("data: [{batch: 3}]\n", {"kind": "loader"}),
        ("data: [{batch: 3}]\n", {"file": "/elsewhere/run.yaml"}),
        ("data: [{batch: 3}]\n", {"name": "run.toml"}),
        ("data: [{batch: 0x3}]\n", {}),
        ("data: [&one {batch: 3}, *one]\n", {}),
        ("data: [{batch: 3}]\nbase: run.yaml\n", {}),
        ("data: [{batch: 3}]\nbase: ../conf/run.yaml\n", {}),
        ("data: [{batch: 3}]\nbase: !include other.yaml\n", {}),
        ("data: [{size: 3}]\n", {}),
        ("", {}),
        ("data: [\n", {}),
    ],
    ids=["as it is", "no setting", "not named", "format", "spelling", "alias", "beside", "above", "tag", "gone",
         "empty", "broken"],
)  # fmt: skip
def test_nothing_is_copied_where_that_may_mean_something_else(
    tmp_path: Path, text: str, changes: dict[str, Any]
) -> None:
    assert copied(tmp_path, text, **changes) is None
