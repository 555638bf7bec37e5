from __future__ import annotations

import builtins
import io
import os
from pathlib import Path

import pytest

from optuna_dsat.runtime.adapt.config import reads_redirected


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "ds.json").write_text("user")
    (tmp_path / "trial.json").write_text("trial")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "ds.json").write_text("other")
    (tmp_path / "link.ds.json").symlink_to("ds.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_way_of_reading_the_users_config_gives_the_launchs(files: Path) -> None:
    with reads_redirected(user_config=str(files / "ds.json"), config=str(files / "trial.json")):
        with open("ds.json") as stream:  # noqa: PTH123 - tests the builtin
            assert stream.read() == "trial"
        assert Path("ds.json").read_text() == "trial"
        assert (files / "ds.json").read_bytes() == b"trial"
        assert Path("link.ds.json").read_text() == "trial"
        with io.open(files / "other" / ".." / "ds.json", encoding="utf-8") as stream:  # noqa: UP020 - likewise
            assert stream.read() == "trial"


def test_a_config_that_is_gone_is_the_launchs(files: Path) -> None:
    (files / "ds.json").unlink()
    with reads_redirected(user_config=str(files / "ds.json"), config=str(files / "trial.json")):
        assert Path("ds.json").read_text() == "trial"
        assert Path("other/ds.json").read_text() == "other"
        with pytest.raises(FileNotFoundError):
            Path("other/gone/ds.json").read_text()


def test_other_files_descriptors_and_writing_are_left_alone(files: Path) -> None:
    with reads_redirected(user_config=str(files / "ds.json"), config=str(files / "trial.json")):
        assert Path("other/ds.json").read_text() == "other"
        with open(os.open("ds.json", os.O_RDONLY)) as stream:  # noqa: PTH123 - likewise
            assert stream.read() == "user"
        with pytest.raises(FileNotFoundError):
            Path("missing/ds.json").read_text()
        Path("ds.json").write_text("changed")
    assert Path("ds.json").read_text() == "changed"
    assert Path("trial.json").read_text() == "trial"


@pytest.mark.usefixtures("files")
def test_open_is_itself_again_afterwards() -> None:
    before = builtins.open
    with pytest.raises(ZeroDivisionError), reads_redirected(user_config="ds.json", config="trial.json"):
        raise ZeroDivisionError
    assert builtins.open is before
    assert io.open is before


def test_who_names_the_file_that_is_read_is_told(files: Path) -> None:
    words: list[bool] = []
    with reads_redirected(user_config=str(files / "ds.json"), config=str(files / "trial.json"), on_read=words.append):
        Path("ds.json").read_text()
        Path("trial.json").read_text()
        (files / "other" / "ds.json").read_text()
    assert words == [False, True]
