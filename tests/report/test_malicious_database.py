"""A database whose every text is hostile: shown as it is, obeyed nowhere, and followed to no foreign file."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

from optuna_dsat.report.dashboard.live import LiveStudy
from optuna_dsat.report.dashboard.notes import study_note, trial_note
from optuna_dsat.report.page import render
from optuna_dsat.report.view import read_view
from optuna_dsat.report.write import render_comparison
from optuna_dsat.store import Store
from tests.harness.entry_points import Run, run_here

__all__ = ["run_here"]

HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(2)> [/usr/lib] list[int] [rank0] \x1b[31m\x1b]0;title\x07 \x9b2J"
    " ![a](http://evil.invalid/a.png) [b](http://evil.invalid) ``c`d\n\n![e](http://evil.invalid/e.png)\n```\n"
    "# f\n| g | h\r\u202e ../../../etc/passwd $(touch here) \ud800 \x00 end"
)
IN_A_SPEC = HOSTILE.replace("\ud800", "")
"""A spec with what is no UTF-8 cannot be stored, so it cannot be read."""
PATH = HOSTILE.replace("\ud800", "").replace("\x00", "")
NAME = "<img src=x onerror=alert(3)> [bold] ![a](x.png) ``b` $(touch there) "
"""A study's name is also that of a folder, without slashes and control characters."""
LONG = 2_000_000
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]")

Alter = Callable[[Path], None]


def texts(value: Any, hostile: str = HOSTILE) -> Any:
    """Return JSON data with every text replaced."""
    if isinstance(value, str):
        return hostile
    if isinstance(value, dict):
        return {key: texts(item, hostile) for key, item in value.items()}
    if isinstance(value, list):
        return [texts(item, hostile) for item in value]
    return value


def altered_spec(text: str, folder: Path) -> str:
    spec = json.loads(text)
    script = {**spec["script"], "script": PATH, "args": [IN_A_SPEC, "--name", IN_A_SPEC], "cwd": PATH}
    script |= {"config_path": PATH, "environment": {IN_A_SPEC: IN_A_SPEC}}
    config = {**spec["ds_config"], "comment": IN_A_SPEC, IN_A_SPEC: {IN_A_SPEC: [IN_A_SPEC]}}
    kept = {"name": NAME, "output_dir": str(folder), "script": script, "ds_config": config}
    return json.dumps({**spec, **kept})


def altered_rounds(text: str) -> str:
    rounds = json.loads(text)
    for item in rounds["launches"]:
        item["message"] = HOSTILE
        item["conditions"] |= {"gpu_processes": [HOSTILE], "throttle_reasons": [HOSTILE]}
    return json.dumps(rounds)


def altered_profile(text: str) -> str:
    profile = json.loads(text)
    profile["profile"] = texts(profile["profile"])
    return json.dumps({**profile, "measured_with": HOSTILE, "config_option": HOSTILE})


TEXT = json.dumps(HOSTILE)


def make_hostile(database: Path, folder: Path) -> None:
    """Write hostile text to all that holds text; names of launches and outcomes are checked elsewhere."""
    plain = HOSTILE.replace("\ud800", "\ufffd")
    with sqlite3.connect(database) as connection:
        connection.create_function("spec", 1, lambda text: altered_spec(text, folder))
        connection.create_function("rounds", 1, altered_rounds)
        connection.create_function("profile", 1, altered_profile)
        for query, *values in (
            ("UPDATE studies SET study_name = ?", NAME),
            ("UPDATE dsat_studies SET name = ?, spec = spec(spec)", NAME),
            ("UPDATE dsat_studies SET versions = ?", json.dumps({HOSTILE: HOSTILE, "optuna-dsat": HOSTILE})),
            ("UPDATE dsat_profiles SET profile = profile(profile)",),
            ("UPDATE study_user_attributes SET value_json = rounds(value_json) WHERE key = 'confirmation'",),
            ("UPDATE study_user_attributes SET value_json = ? WHERE key IN ('end_reason', 'result')", TEXT),
            (
                "UPDATE trial_user_attributes SET value_json = ? WHERE key IN ('message', 'configuration', 'error')",
                json.dumps(HOSTILE),
            ),
            (
                "UPDATE dsat_launches SET message = ?, host = ?, error_excerpt = ?, log_path = ?, command = ?",
                plain, plain, plain, plain, json.dumps([HOSTILE]),
            ),
        ):  # fmt: skip
            assert connection.execute(query, values).rowcount > 0, query
    connection.close()


@pytest.fixture
def hostile(template: Path, tmp_path: Path) -> Path:
    """The folder of a database made hostile, beside a foreign folder with a secret."""
    folder = tmp_path / "here"
    shutil.copytree(template, folder)
    (folder / "out" / "s").rename(folder / "out" / NAME)
    make_hostile(folder / "study.db", folder / "out")
    (tmp_path / "secret.log").write_text("secret")
    return folder


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


COMMANDS = [
    ("studies",), ("trials", NAME), ("show", NAME), ("explain", NAME), ("best", NAME), ("export", NAME),
    ("export", NAME, "--format", "csv"), ("studies", "--json"), ("trials", NAME, "--json"), ("show", NAME, "--json"),
    ("explain", NAME, "--json"), ("resume", NAME), ("worker", NAME),
]  # fmt: skip


def test_commands_show_it_and_obey_nothing(hostile: Path, run_here: Run, tmp_path: Path) -> None:
    before = files(tmp_path)
    for command in COMMANDS:
        ended = run_here(*command, "--storage", f"sqlite:///{hostile / 'study.db'}")
        assert ended.returncode == (2 if command[0] in ("resume", "worker") else 0), (command, ended.stderr)
        assert "Traceback" not in ended.stderr
        assert not CONTROL.search(ended.stdout.replace("\r\n", "\n")), command
        assert not CONTROL.search(ended.stderr), command
        if command in (("studies",), ("trials", NAME)):
            assert all(literal in ended.stdout for literal in ("[/usr/lib]", "list[int]", "[rank0]")), command
    left = {name for name in files(tmp_path) - before if "study.db" not in name}
    assert left == set()


class Tags(HTMLParser):
    """Elements of a page, with attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[str, ...]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, tuple(name for name, _ in attrs)))


def elements(page: str) -> set[str]:
    parser = Tags()
    parser.feed(page)
    assert not any(name.startswith("on") for _, names in parser.found for name in names)
    return {tag for tag, _ in parser.found}


def test_pages_have_no_element_of_its_own(hostile: Path, template: Path) -> None:
    result: list[set[str]] = []
    for folder, name in ((hostile, NAME), (template, "s")):
        with Store.open(f"sqlite:///{folder / 'study.db'}") as store:
            view = read_view(store, name)
            pages = (render(view), LiveStudy(store, name).page(), render_comparison((view, view)))
        for page in pages:
            assert "<script>alert" not in page
            assert not CONTROL.search(page.partition("<script>")[0].replace("\r\n", "\n"))
        result.append(set().union(*map(elements, pages)))
        if name == NAME:
            assert "&lt;script&gt;alert(1)" in pages[0]
            assert "http://evil.invalid" in pages[0], "as text"
    assert result[0] == result[1]


def tokens(note: str) -> set[str]:
    """Return the kinds of tokens of a note, as GitHub's Markdown reads it."""
    parser = MarkdownIt("commonmark").enable("table")
    return {child.type for block in parser.parse(note) for child in (block, *(block.children or ()))}


def test_notes_hold_no_image_link_or_html(hostile: Path) -> None:
    with Store.open(f"sqlite:///{hostile / 'study.db'}") as store:
        view = read_view(store, NAME)
    notes = [study_note(view), *(trial_note(view, trial) for trial in view.launched)]
    for note in notes:
        assert not tokens(note) & {"image", "link_open", "html_block", "html_inline"}, note
        assert not CONTROL.search(note)
        note.encode()
    assert any("evil.invalid" in note for note in notes), "as text"


def test_a_folder_that_is_not_the_studys_is_neither_read_nor_written(
    hostile: Path, run_here: Run, tmp_path: Path
) -> None:
    foreign = tmp_path / "foreign" / NAME
    (foreign / "trial-0000" / "logs").mkdir(parents=True)
    (foreign / "trial-0000" / "logs" / "rank0.stderr.log").write_text("secret")
    (foreign / "report.html").write_text("mine")
    with sqlite3.connect(hostile / "study.db") as connection:
        connection.create_function("spec", 1, lambda text: altered_spec(text, foreign.parent))
        connection.execute("UPDATE dsat_studies SET spec = spec(spec)")
    connection.close()
    with Store.open(f"sqlite:///{hostile / 'study.db'}") as store:
        view = read_view(store, NAME)
    assert view.folder is None
    ended = run_here("report", NAME, "--storage", f"sqlite:///{hostile / 'study.db'}")
    assert ended.returncode == 0, ended.stderr
    assert (foreign / "report.html").read_text() == "mine"
    assert (tmp_path / f"{NAME}-report.html").is_file(), "in the working directory"


def test_long_texts_are_cut(hostile: Path, run_here: Run) -> None:
    long = "x" * LONG
    with sqlite3.connect(hostile / "study.db") as connection:
        connection.execute("UPDATE dsat_launches SET message = ?, error_excerpt = ?", (long, long))
        connection.execute(
            "UPDATE trial_user_attributes SET value_json = ? WHERE key = 'message' AND trial_id = 1", [json.dumps(long)]
        )
    connection.close()
    with Store.open(f"sqlite:///{hostile / 'study.db'}") as store:
        view = read_view(store, NAME)
        assert max(len(trial_note(view, trial)) for trial in view.launched) < 40_000
    shown = run_here("trials", NAME, "--storage", f"sqlite:///{hostile / 'study.db'}").stdout
    assert len(shown) < 100_000
