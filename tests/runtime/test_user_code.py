from __future__ import annotations

import sys
from pathlib import Path

import pytest

from optuna_dsat.runtime import user_code
from optuna_dsat.runtime.user_code import is_installed, parsed_source, places_of


def test_places_are_those_of_the_users_code_innermost_first() -> None:
    def inner() -> list[tuple[str, int]]:
        return places_of(sys._getframe())

    places = inner()
    assert [Path(file).name for file, _ in places[:2]] == [Path(__file__).name] * 2
    assert places[0][1] < places[1][1]
    assert not any(is_installed(file) for file, _ in places)


def test_a_file_is_read_once_though_it_is_no_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The interpreter would read the wrong line from the file again, which blocks for a kernel log."""
    file = tmp_path / "train.py"
    file.write_text("what\nthe file\nholds by now\n")
    monkeypatch.setattr(user_code, "read_regular", lambda _: b"import torch\n[ 0.0] no Python\n")
    with pytest.raises(SyntaxError) as caught:
        parsed_source(file)
    assert (caught.value.lineno, caught.value.text) == (2, "[ 0.0] no Python\n")


def test_warnings_on_the_text_of_a_script_are_its_own(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    file = tmp_path / "train.py"
    file.write_text('PATTERN = "\\d"\n')
    assert parsed_source(file).body
    assert not recwarn.list
