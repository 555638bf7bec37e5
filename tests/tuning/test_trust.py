"""What a database names is run where this user ran just that before, and else shown and asked about."""

from __future__ import annotations

import json
import shlex
import shutil
import sqlite3
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import entry_points
from tests.harness.entry_points import EntryPointBench, searching_in

SEARCH = shlex.split(
    "random train.py ds.json --cpu-ranks 2 --metric throughput --max-trials 2 --confirm 0 --quiet --study s"
)
RESUME = ("resume", "s", "--max-trials", "3", "--confirm-time", "0")

Leave = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the folder of a search, with this user's notes in ``state``, and a copy of what it holds."""
    folder, copy = tmp_path_factory.mktemp("searched"), tmp_path_factory.mktemp("copy") / "copy"
    with pytest.MonkeyPatch.context() as patch, searching_in(folder, patch):
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        assert entry_points.leave(*SEARCH, "--", "--epochs", "3") == 0
    shutil.copytree(folder, copy)
    return folder, copy


@pytest.fixture
def bench(searched: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[EntryPointBench]:
    """Return the bench of the search, whose folder is as the search left it."""
    folder, copy = searched
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(copy, folder, dirs_exist_ok=True)
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    with searching_in(folder, monkeypatch) as made:
        yield made


@pytest.fixture
def state(bench: EntryPointBench) -> Path:
    return bench.folder / "state"


@pytest.fixture
def leave(bench: EntryPointBench, capsys: pytest.CaptureFixture[str]) -> Leave:  # noqa: ARG001 - the folder it runs in
    def shown(*arguments: str) -> tuple[int, str]:
        capsys.readouterr()
        code = entry_points.leave(*arguments)
        return code, capsys.readouterr().err

    return shown


def alter(**changes: Any) -> None:
    """Change the spec that the database holds."""
    with sqlite3.connect("optuna-dsat.db") as connection:
        (text,) = connection.execute("SELECT spec FROM dsat_studies").fetchone()
        spec = json.loads(text)
        script = {**spec["script"], **changes.pop("script", {})}
        connection.execute("UPDATE dsat_studies SET spec = ?", (json.dumps({**spec, **changes, "script": script}),))
    connection.close()


def test_what_ran_here_goes_on_and_is_shown(leave: Leave) -> None:
    code, shown = leave(*RESUME)
    assert code == 0
    assert "The study runs:" in shown
    for text in ("train.py", "--epochs 3", "  imports      3 packages (", "works in", "writes to"):
        assert text in shown
    Path("train.py").write_text("print('mended')\n")
    code, shown = leave(*RESUME[:2], "--max-trials", "4", "--quiet")
    assert (code, shown) == (0, ""), "its owner may edit the script"


def test_the_note_is_the_users_own(state: Path) -> None:
    notes = [path for path in state.rglob("*") if path.is_file()]
    assert len(notes) == 1
    assert stat.S_IMODE(notes[0].stat().st_mode) == 0o600
    folders = [path for path in state.rglob("*") if path.is_dir()]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o700 for path in folders)
    assert "epochs" not in notes[0].read_text()


def test_what_the_database_names_anew_is_not_run(leave: Leave, bench: EntryPointBench) -> None:
    database = Path("optuna-dsat.db")
    stored, launchers = database.read_bytes(), len(bench.arguments)
    changes: dict[str, dict[str, Any]] = {
        "/bin/true": {"script": {"script": "/bin/true"}},
        "--epochs 4": {"script": {"args": ["--epochs", "4"]}},
        "LD_PRELOAD": {"script": {"environment": {"LD_PRELOAD": "/tmp/x.so"}}},
        "/elsewhere": {"output_dir": "/elsewhere"},
    }
    for word, change in changes.items():
        database.write_bytes(stored)
        alter(**change)
        before = database.read_bytes()
        for command in (RESUME, ("worker", "s")):
            code, shown = leave(*command)
            assert code == 2, word
            assert "give --trust" in shown
            assert word in shown
        assert database.read_bytes() == before, "nothing was stored"
    assert len(bench.arguments) == launchers, "nothing was launched"


def test_the_user_may_agree_and_is_not_asked_again(leave: Leave, state: Path) -> None:
    shutil.rmtree(state)
    code, shown = leave(*RESUME)
    assert code == 2
    assert "  imports      numpy, torch, deepspeed (" in shown
    assert leave(*RESUME, "--trust")[0] == 0
    assert leave(*RESUME[:2], "--max-trials", "4")[0] == 0


@pytest.mark.parametrize(("answer", "code"), [(True, 0), (False, 2)])
def test_on_a_terminal_the_user_is_asked(
    leave: Leave, state: Path, monkeypatch: pytest.MonkeyPatch, answer: bool, code: int
) -> None:
    shutil.rmtree(state)
    asked: list[str] = []

    def confirm(text: str, **_: Any) -> bool:
        asked.append(text)
        return answer

    monkeypatch.setattr("optuna_dsat.cli.resume._has_terminal", lambda: True)
    monkeypatch.setattr("typer.confirm", confirm)
    assert leave(*RESUME)[0] == code
    assert len(asked) == 1


def test_a_script_of_another_owner_at_the_same_place_is_not_the_same(leave: Leave, state: Path) -> None:
    (note,) = (path for path in state.rglob("*") if path.is_file())
    kept = json.loads(note.read_text())
    Path("train.py").write_text("print('another')\n")
    note.write_text(json.dumps({**kept, "owner": kept["owner"] + 1}))
    assert leave(*RESUME)[0] == 2


def test_a_script_of_the_same_content_elsewhere_is_the_same(leave: Leave, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("train.py", "ds.json"):
        shutil.copy(name, moved / name)
    same = (moved / "train.py").read_text()
    (moved / "train.py").write_text("print('another')\n")
    assert leave(*RESUME, "--workdir", str(moved))[0] == 2
    (moved / "train.py").write_text(same)
    assert leave(*RESUME, "--workdir", str(moved))[0] == 0


def test_a_folder_that_cannot_be_written_ends_no_search(
    leave: Leave, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert leave(*SEARCH[:-1], "t")[0] == 0
    assert leave("resume", "t")[0] == 2
