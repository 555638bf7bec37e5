"""The help of the commands: what comes first, in which words, at which width, and what is imported to show it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup, TyperOption

from optuna_dsat.cli import app
from optuna_dsat.cli.parsing.catalogue import COMMANDS, SEARCHES
from tests.harness.entry_points import EntryPointBench, Run, bench, leave, run_here

__all__ = ["bench", "run_here"]

OPTION = re.compile(r"^  (?:-\w, )?(--[\w-]+)", re.MULTILINE)


def shown(run: Run, *arguments: str) -> str:
    done = run(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def options(command: str) -> list[TyperOption]:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    params: list[object] = list(group.commands[command].params)
    return [param for param in params if isinstance(param, TyperOption)]


@pytest.mark.parametrize("command", ["asha", "tune", "run"])
def test_the_help_of_a_search_shows_ten_options_and_where_the_others_are(run_here: Run, command: str) -> None:
    text = shown(run_here, command, "--help")
    assert text == shown(run_here, command, "-h")
    first = OPTION.findall(text.partition("Options that matter most:")[2])
    assert {"--max-trials", "--zero-stages", "--storage", "--dry-run"} <= set(first)
    assert len(first) == (10 if command == "asha" else 11), "the method comes beside the ten where none is named"
    assert ("else guided" in " ".join(text.split())) == ("--method" in first) == (command != "asha")
    assert len(text.splitlines()) < 60
    others = len(options(command)) - len(first)
    assert re.search(rf"{others} more options: .* {command} --help-all", text)


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"db"}))
def test_help_all_shows_every_option_in_words_and_every_command_has_both(run_here: Run, command: str) -> None:
    text = shown(run_here, command, "--help-all")
    for option in options(command):
        assert set(option.opts) & set(re.findall(r"--?[\w-]+", text)), option.opts
    assert not re.search(r"<\w|\blist\[|\\\[|None", text)
    if command not in SEARCHES:
        assert shown(run_here, command, "--help") == text


def test_values_are_words(run_here: Run) -> None:
    text = shown(run_here, "guided", "--help-all")
    for spelling in (
        "--zero-stages STAGE,...",
        "--batch free|keep|both",
        "--timeout SECONDS",
        "--fix KEY=VALUE",
        "--max-trials N",
        "--output-dir PATH",
        "--storage URL",
        "--min-gain SHARE",
    ):
        assert f"  {spelling} " in text or f"  {spelling}\n" in text
    words = " ".join(text.split())
    assert "[default: 64]" in words
    assert "[default: 600]" in words
    assert "[environment: OPTUNA_DSAT_STORAGE]" in words
    assert text.startswith("Usage: ")
    assert "SCRIPT [DS_CONFIG] [-- SCRIPT_ARGS]" in words
    titles = re.findall(r"^(\w.*):$", text, re.MULTILINE)
    assert titles == ["Arguments", "What to tune", "Budget", "Measuring", "Where", "Method", "Output"]


def test_nothing_is_cut_in_mid_word(run_here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = 60
    monkeypatch.setenv("COLUMNS", str(columns))
    text = shown(run_here, "asha", "--help-all")
    assert "…" not in text
    words = {word.rstrip(",") for word in text.split()}
    meanings = " ".join(f"{option.help} {' '.join(option.opts)}" for option in options("asha")).replace("\\[", "[")
    assert {word.rstrip(",") for word in meanings.split()} <= words
    alone = [line for line in text.splitlines() if len(line) > columns and len(line.split()) > 3]
    assert alone == []


def test_commands_stand_in_groups(run_here: Run) -> None:
    text = shown(run_here, "--help")
    groups = {
        title: re.findall(r"^  (\w+)  ", body, re.MULTILINE)
        for title, body in re.findall(r"^(\w[\w ]*):\n((?: .*\n)+)", text + "\n", re.MULTILINE)
    }
    assert groups["Search and train"][0] == "tune"
    assert {"show", "best", "explain", "report"} <= set(groups["Look at a result"])
    assert {"studies", "export", "delete", "db"} == set(groups["Manage studies"])
    named = [name for group in groups.values() for name in group]
    assert sorted(named) == sorted(COMMANDS)


def test_nothing_asked_for_shows_the_help_and_exits_with_2(run_here: Run) -> None:
    for arguments in ((), ("db",)):
        done = run_here(*arguments)
        assert (done.returncode, done.stderr) == (2, "")
        assert done.stdout.rstrip() == shown(run_here, *arguments, "--help").rstrip()


def test_what_the_script_is_asked_is_not_the_commands_help(run_here: Run) -> None:
    done = run_here("guided", "--help", "train.py", "--", "--help-all")
    assert "Options that matter most" in done.stdout


THIRD_PARTIES = {"torch", "deepspeed", "optuna", "sqlalchemy", "alembic", "numpy", "pandas", "plotly", "jinja2", "rich"}
TO_LAUNCH = {"torch", "deepspeed", "pandas", "plotly", "jinja2", "pygments", "scipy", "matplotlib"}
TO_MEASURE = {
    "optuna_dsat.launch.follow",
    "optuna_dsat.launch.measurement",
    "optuna_dsat.script.trial_class",
    "optuna_dsat.study.profile.profile",
    "optuna_dsat.study.result",
}
"""What only those need who launch, or hand over a result."""
OUR_OWN = {
    "optuna_dsat.launch.launcher",
    "optuna_dsat.runtime.hook",
    "optuna_dsat.guided.planner",
    "optuna_dsat.study.search.tuner",
}
NEEDLESS_TO_READ = {*TO_LAUNCH, *TO_MEASURE, *OUR_OWN, "optuna_dsat.tuning.options.tune_options"}
"""What a command that reads a study does without."""


def imported(folder: Path, *commands: Sequence[str]) -> set[str]:
    """Return the modules that commands import in a process of their own, one after the other."""
    code = (
        "import atexit, gc, sys\n"
        "from optuna_dsat.cli import main\n"
        "def report():\n"
        "    frozen = ['gc frozen'] if gc.get_freeze_count() > len(sys.modules) else []\n"
        "    names = [name for name, module in sys.modules.items() if module]\n"
        "    print(*names, *frozen, sep='\\n', file=sys.stderr)\n"
        "atexit.register(report)\n"
        f"for command in {[[*command] for command in commands]!r}:\n"
        "    try:\n"
        "        sys.argv[1:] = command\n        main()\n"
        "    except SystemExit as error:\n"
        "        assert not error.code, command\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.splitlines())


def test_help_imports_nothing_that_a_search_needs(tmp_path: Path) -> None:
    helps = [words.split() for words in ("guided --help", "tune --help-all", "--help", "plan --help")]
    result = imported(tmp_path, *helps)
    assert not THIRD_PARTIES & result
    assert not OUR_OWN & result


def test_a_command_imports_no_other_and_no_spec_of_a_search(tmp_path: Path) -> None:
    result = imported(tmp_path, ["--version"], ["studies", "--help"])
    commands = {f"optuna_dsat.cli.{module}" for _, module, _ in COMMANDS.values()}
    assert commands & result == {"optuna_dsat.cli.studies"}
    assert not {"optuna_dsat.study.spec", "optuna_dsat.tuning.options.tune_options"} & result
    assert "gc frozen" in result, "no look for garbage in all modules at the end"


def test_who_reads_a_study_or_finds_nothing_left_imports_and_starts_nothing_to_launch_with(
    bench: EntryPointBench, run_here: Run
) -> None:
    search = ("random", "train.py", "ds.json", "--cpu-ranks", "2", "--metric", "throughput", "--max-trials", "2")
    assert run_here(*search, "--confirm", "0", "--quiet").returncode == 0
    name = "train-random"
    reads = [(command, name) for command in ("show", "best", "trials", "export")]
    assert not NEEDLESS_TO_READ & imported(bench.folder, ["studies"], *reads)
    before = sorted(path for path in bench.folder.rglob("*") if path.suffix != ".lock")
    others = imported(bench.folder, ["explain", name], ["worker", name, "--trust", "--quiet"])
    assert not TO_LAUNCH & others
    left = sorted(path for path in bench.folder.rglob("*") if path.suffix != ".lock")
    assert [path for path in left if path not in before and "optuna-dsat.db" not in path.name] == []


def test_a_question_ends_in_its_own_mark(capsys: pytest.CaptureFixture[str]) -> None:
    leave("guide")
    assert "Did you mean 'guided'? See " in capsys.readouterr().err


def test_the_help_of_a_search_begins_with_the_form_that_takes_a_launcher(run_here: Run) -> None:
    """The form that users have in their shell's history was in no help."""
    lines = [line.strip() for line in run_here("guided", "--help").stdout.splitlines()]
    assert lines[0].endswith(" guided [OPTIONS] LAUNCHER [LAUNCHER_OPTIONS] SCRIPT ...")
    assert lines[1].startswith("or: ")
    assert "guided deepspeed --num_gpus 8 train.py --deepspeed_config ds_config.json" in " ".join(lines)
    assert "LAUNCHER" not in run_here("show", "--help").stdout
