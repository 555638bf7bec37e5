"""One place a medium: what comes from elsewhere is shown as it is."""

from __future__ import annotations

import io
import os
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from optuna_dsat.cli.tables import console_of, print_table
from optuna_dsat.escape.html import figure_text, safe_figure
from optuna_dsat.escape.markdown import Markdown, code, fenced, literal, table
from optuna_dsat.escape.paths import OutsideError, held_inside, page_address
from optuna_dsat.escape.shell import folded, install_command, shell_line
from optuna_dsat.escape.terminal import CELL_CHARS, cell, one_line, plain, say, say_prose

TEXTS = [
    "plain words, 0.95 x (yes)",
    "`", "``", "a`b``c```d", " `edge` ", "two\n\nlines", "# heading", "- item", "1. item", "1) item", "+ item",
    "> quote", "===", "---", "***", "| a | b |", "\\", "\\`", "[a](http://b.invalid)", "![a](http://b.invalid/c.png)",
    "<img src=x>", "<!-- c -->", "&amp;", "*a* _b_ ~~c~~", "```\ncode\n```", "    indented", "http\t\ttabs",
]  # fmt: skip


def rendered(note: str) -> str:
    """Return the text that a reader sees of a note."""
    parser = MarkdownIt("commonmark").enable("table").enable("strikethrough")
    shown = []
    for block in parser.parse(note):
        assert block.type not in ("html_block", "heading_open", "bullet_list_open", "blockquote_open", "hr"), note
        for child in block.children or ():
            assert child.type in ("text", "code_inline", "softbreak", "text_special"), (note, child)
            shown.append(child.content)
        if block.type == "fence":
            shown.append(block.content.removesuffix("\n"))
    return "".join(shown)


@pytest.mark.parametrize("text", TEXTS)
def test_text_in_markdown_reads_as_it_is(text: str) -> None:
    for make in (literal, code):
        assert rendered(make(text)).split() == text.split(), make
    assert rendered(fenced(text)) == text.rstrip()
    row = rendered(table(("a", "b"), [(text, code(text))]))
    assert row.split() == ("ab" + " ".join(text.split()) * 2).split() or text.split()[0] in row


def test_what_is_markdown_already_stays_in_a_table() -> None:
    shown = table(("a",), [(Markdown("**b|c**"),), (None,), ("**d**",)])
    assert shown == "| a |\n| --- |\n| **b\\|c** |\n|  |\n| \\*\\*d\\*\\* |"


def test_control_characters_are_written_out() -> None:
    assert plain("a\x1b[31mb\x07\rc\u202ed\ud800\ttab\nline") == "a\\x1b[31mb\\x07\\x0dc\\u202ed\\ud800\ttab\nline"
    assert plain("Grüße, 你好 \U0001f600") == "Grüße, 你好 \U0001f600"
    assert one_line("a\n  b\tc") == "a b c"
    assert len(one_line("x" * 10**6)) < CELL_CHARS + 60
    assert cell("[bold]x[/usr/lib] list[int]").plain == "[bold]x[/usr/lib] list[int]"
    assert cell(None).plain == ""


def test_a_stream_that_lacks_characters_gets_them_written_out() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    say("a \u20ac \x1b[0m \ud800", file=stream)
    assert raw.getvalue() == b"a \\u20ac \\x1b[0m \\ud800\n"


def test_a_table_shows_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("list[int]",), [("[rank0] [/usr/lib]\x1b[2J",)])
    shown = capsys.readouterr().out
    assert "list[int]" in shown
    assert "[rank0] [/usr/lib]\\x1b[2J" in shown


def test_a_figure_has_no_tags_of_others() -> None:
    assert figure_text("<b>a</b> & c") == "&lt;b&gt;a&lt;/b&gt; &amp; c"
    figure = {"data": [{"text": ["<b>x</b><br><a href='http://e.invalid'>y</a>", 1]}], "layout": {"title": "<img>"}}
    assert safe_figure(figure) == {
        "data": [{"text": ["<b>x</b><br>&lt;a href='http://e.invalid'>y&lt;/a>", 1]}],
        "layout": {"title": "&lt;img>"},
    }


def test_a_command_line_gives_the_words_back() -> None:
    words = ["a b", "$(touch x)", "it's", "", "`x`", "--a=b"]
    assert shlex.split(shell_line(words)) == words
    hostile = ["a\x1b[0mb", "two\nlines", "tab\there", "it's \x07 \\n"]
    line = shell_line(hostile)
    assert plain(line) == line
    assert "\n" not in line
    shown = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True).stdout
    assert shown.decode().split("\0")[:-1] == hostile


def test_a_folded_command_line_gives_the_words_back() -> None:
    words = [
        "env",
        "A=it's",
        "python",
        "/a/long/path" * 10,
        "--name",
        'say "it" \\ twice',
        "",
        "$(x)",
        "a b" * 9,
        "--end",
    ]
    lines = folded(shell_line(words), width=40)
    assert all(len(line) <= 40 or len(line.split(" ")) <= 4 for line in lines.splitlines())
    assert len(lines.splitlines()) > 3
    read = subprocess.run(["bash", "-c", f"printf '%s\\0' {lines}"], capture_output=True, text=True, check=True).stdout
    assert read.split("\0")[:-1] == words
    for line in ("", "optuna-dsat show s", "it's no line that was made here, of more than forty characters"):
        assert folded(line, width=40) == line


def test_addresses() -> None:
    assert page_address("::1", 80, "a b", "../c") == "http://[::1]:80/a%20b/..%2Fc"
    assert page_address("localhost", 8080, 1) == "http://localhost:8080/1"


def test_paths_are_held_inside_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    (folder / "trial").mkdir(parents=True)
    (tmp_path / "link").symlink_to(folder, target_is_directory=True)
    assert held_inside(tmp_path / "link", "trial", "log") == folder / "trial" / "log"
    (folder / "out").symlink_to(tmp_path, target_is_directory=True)
    (folder / "circle").symlink_to(folder / "circle")
    for names in (
        ("..",),
        ("trial", "..", "..", "x"),
        ("/etc",),
        ("out", "x"),
        ("a\x00b",),
        (".",),
        ("x" * 300, "y", "..", "..", ".."),
    ):
        with pytest.raises(OutsideError):
            held_inside(folder, *names)


class Screen(io.StringIO):
    """A terminal of 60 columns."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    monkeypatch.setenv("COLUMNS", "60")
    return Screen()


def test_sentences_are_folded_between_words_and_commands_are_not(screen: Screen) -> None:
    command = "`optuna-dsat resume llama --storage postgresql+psycopg://somebody@some.host/studies`"
    with redirect_stdout(screen):
        say_prose(f"Nothing is lost, and everything that was measured stays in the database: {command} goes on.")
    lines = screen.getvalue().splitlines()
    assert command in lines
    assert all(len(line) < 60 for line in lines if line != command)
    assert "everything that was" in " ".join(lines)


def test_a_table_that_is_too_wide_is_a_paragraph_for_each_row(screen: Screen) -> None:
    headings = ("number", "outcome", "configuration", "", "message", "micro-batch")
    words = "stage3_max_live_parameters=5e8, stage3_param_persistence_threshold=1e5"
    with redirect_stdout(screen):
        print_table(headings, [(3, "measured", words, "best", None, 8), (4, "out of memory", "ZeRO 1", "", "", 9)])
    lines = screen.getvalue().splitlines()
    assert lines[:2] == ["number: 3", "  outcome: measured"]
    assert "  best" in lines
    assert max(map(len, lines)) < 60
    assert {"stage3_max_live_parameters=5e8,", "stage3_param_persistence_threshold=1e5"} <= set(" ".join(lines).split())


def test_a_table_is_as_wide_as_a_terminal_that_cannot_move_its_cursor(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with redirect_stdout(screen):
        print_table(("GPUs", "with"), [(1, "ZeRO 3 + parameter offload and optimizer offload, micro-batch 18")])
        console_of().print("one two three four " * 5)
    lines = [line.rstrip() for line in screen.getvalue().splitlines()]
    assert "micro-batch" in screen.getvalue()
    assert max(map(len, lines)) <= 60


def test_no_word_of_a_table_is_cut(screen: Screen) -> None:
    rows = [("contiguous_gradients", "searched", "ZeRO 1 and 2 without optimizer offload, ZeRO 3")]
    with redirect_stdout(screen):
        print_table(("knob", "role", "where it applies"), rows)
    assert {"contiguous_gradients", "searched", "optimizer"} <= set(screen.getvalue().replace("\u2502", " ").split())
    long = [(1, "ZeRO 1", 8, "tests zero_optimization.use_multi_rank_bucket_allreduce")]
    with redirect_stdout(screen):
        print_table(("number", "structure", "micro-batch", "reason"), long)
    parts = set(screen.getvalue().replace("\u2502", " ").split())
    assert {"zero_optimization.use_", "multi_rank_bucket_", "allreduce"} <= parts, "in parts where it is too long"


@pytest.mark.parametrize(
    ("prefix", "command"),
    [
        ("/home/me/.venv", "pip install 'plotly>=6'"),
        ("/home/me/.local/share/pipx/venvs/optuna-dsat", "pipx runpip optuna-dsat install 'plotly>=6'"),
        ("/home/me/.local/share/uv/tools/optuna-dsat", "uv pip install --python /bin/python 'plotly>=6'"),
    ],
)
def test_a_package_is_installed_where_the_tuner_is(monkeypatch: pytest.MonkeyPatch, prefix: str, command: str) -> None:
    monkeypatch.setattr(sys, "prefix", prefix)
    monkeypatch.setattr(sys, "executable", "/bin/python")
    assert install_command("plotly>=6") == command


def test_messages_to_a_pipe_without_a_reader_are_dropped() -> None:
    """Ctrl-C ended ``tee``, and with it a search that was about to write its result."""
    reader, writer = os.pipe()
    os.close(reader)
    program = "import sys; from optuna_dsat.escape.terminal import say; say('x', file=sys.stderr); print('on')"
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=writer, check=True)
    os.close(writer)
    assert done.stdout == b"on\n"
