from __future__ import annotations

import sys
from pathlib import Path

import pytest

from optuna_dsat.runtime import user_code
from optuna_dsat.runtime.user_code import constants, is_installed, parsed_source, places_of

SOURCE = """\
import torch
BATCH = 8
class Config:
    batch_size: int = 8
def train(data, *, size=8):
    for i in range(0, 24, 8):
        step(data[i:i + 8], shuffle=True)
        step(torch.randn(8, 16))
        Loader(data, batch_size=4 * 8)
options = {"batch": 8, "lr": 0.8, "flag": True, "other": 16}
"""


def test_constants_are_named_by_what_they_are_given_to(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(SOURCE)
    found = [(one["line"], one["name"]) for one in constants(str(file), {8})]
    assert found == [
        (2, "BATCH"), (4, "batch_size"), (5, "size"), (6, ""), (7, ""), (8, ""), (9, "batch_size"), (10, "batch")
    ]  # fmt: skip
    assert [one["value"] for one in constants(str(file), {16})] == [16, 16]
    assert constants(str(file), {1}) == [], "True is no number"


@pytest.mark.parametrize("text", ["def broken(", "\0"])
def test_what_cannot_be_parsed_has_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "train.py").write_text(text)
    assert constants(str(tmp_path / "train.py"), {8}) == []
    assert constants(str(tmp_path / "none.py"), {8}) == []


def test_constants_of_a_sum_of_a_thousand_terms_are_found(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(f"total = {' + '.join(['8'] * 1500)}\n")
    assert [found["name"] for found in constants(str(file), {8})] == ["total"] * 1500


def test_places_are_those_of_the_users_code_innermost_first() -> None:
    def inner() -> list[tuple[str, int]]:
        return places_of(sys._getframe())

    places = inner()
    assert [Path(file).name for file, _ in places[:2]] == [Path(__file__).name] * 2
    assert places[0][1] < places[1][1]
    assert not any(is_installed(file) for file, _ in places)


def test_a_file_is_read_once_though_it_is_no_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The interpreter would look for the line that is wrong in the file, and a log of the kernel has no more."""
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
