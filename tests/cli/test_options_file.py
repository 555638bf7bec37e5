"""Options that come from elsewhere than the command line, and which of them wins."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from optuna_dsat.cli import app, search
from optuna_dsat.cli.parsing.options_file import OptionsFile, others_write
from optuna_dsat.cli.parsing.rewriting import at_home, lift_option
from optuna_dsat.study.spec import MethodOptions, StudySpec
from optuna_dsat.tuning import prepare as tuning_prepare
from optuna_dsat.tuning.options.given import Given
from optuna_dsat.tuning.options.tune_options import AshaOptions, AutotuningOptions, TuneOptions
from optuna_dsat.tuning.prepare import prepare
from tests.harness.entry_points import DS_CONFIG, EntryPointBench, bench, leave, run_here

__all__ = ["bench", "run_here"]

Seen = Callable[..., Given]


pytestmark = pytest.mark.usefixtures("bench")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Return the options that a search is started with, after all sources were read."""
    result: list[Given] = []
    monkeypatch.setattr(search, "run", lambda method, given, _: result.append(prepare(method, given).given))
    for name in ("OPTUNA_DSAT_STORAGE", "OPTUNA_DSAT_OUTPUT_DIR", "OPTUNA_DSAT_OPTIONS"):
        monkeypatch.delenv(name, raising=False)

    def options(*arguments: str) -> Given:
        assert leave(*arguments) == 0
        return result[-1]

    return options


PLAIN = ("asha", "train.py", "ds.json", "--cpu-ranks", "2")


def test_the_command_line_wins_over_environment_over_file_over_autotuning_over_defaults(
    seen: Seen, bench: EntryPointBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = {"tuner_num_trials": 11, "start_profile_step": 2, "metric": "throughput"}
    (bench.folder / "ds.json").write_text(json.dumps({**DS_CONFIG, "autotuning": section}))
    file = bench.folder / "pyproject.toml"
    file.write_text('[tool.optuna-dsat]\nmax-trials = 12\noutput-dir = "f"\nstorage = "sqlite:///f.db"\nconfirm = 1\n')
    monkeypatch.setenv("OPTUNA_DSAT_OUTPUT_DIR", "e")
    monkeypatch.setenv("OPTUNA_DSAT_STORAGE", "sqlite:///e.db")
    given = seen(*PLAIN, "--storage", "sqlite:///c.db")
    options = given.options
    assert options.storage == "sqlite:///c.db"
    assert options.output_dir == Path("e")
    assert options.max_trials == 12
    assert options.start_profile_step == 2
    assert options.end_profile_step == TuneOptions.end_profile_step
    wanted = {
        "storage": "command line",
        "output_dir": "OPTUNA_DSAT_OUTPUT_DIR",
        "max_trials": str(file),
        "confirm": str(file),
        "start_profile_step": "autotuning in ds.json",
        "metric": "autotuning in ds.json",
    }
    assert {name: given.origins[name] for name in wanted} == wanted
    assert "end_profile_step" not in given.origins


def test_a_commands_own_table_wins_and_reaches_no_other(seen: Seen, bench: EntryPointBench) -> None:
    (bench.folder / "pyproject.toml").write_text(
        "[tool.optuna-dsat]\nmax-trials = 5\n[tool.optuna-dsat.asha]\nmax_trials = 6\ndivisor = 3\n"
    )
    options = seen(*PLAIN).options
    assert isinstance(options, AshaOptions)
    assert (options.max_trials, options.divisor) == (6, 3)
    other = seen("tune", *PLAIN[1:]).options
    assert isinstance(other, AutotuningOptions)
    assert (other.max_trials, other.divisor) == (5, 2)


def test_devices_on_the_command_line_take_the_place_of_the_other_kind_in_a_file(
    seen: Seen, bench: EntryPointBench
) -> None:
    (bench.folder / "pyproject.toml").write_text("[tool.optuna-dsat]\ngpus-per-trial = 8\n")
    given = seen(*PLAIN)
    assert (given.options.gpus_per_trial, given.options.cpu_ranks) == (None, 2)
    assert "gpus_per_trial" not in given.origins
    assert leave(*PLAIN, "--gpus-per-trial", "8") == 2


def test_the_nearest_table_upwards_counts(seen: Seen, bench: EntryPointBench, monkeypatch: pytest.MonkeyPatch) -> None:
    (bench.folder / "pyproject.toml").write_text("[tool.optuna-dsat]\nmax-trials = 5\n")
    below = bench.folder / "a" / "b"
    below.mkdir(parents=True)
    (bench.folder / "a" / "pyproject.toml").write_text('[project]\nname = "optuna-dsat-user"\n')
    monkeypatch.chdir(below)
    assert seen("asha", "../../train.py", "../../ds.json", "--cpu-ranks", "2").options.max_trials == 5
    (below / "pyproject.toml").write_text("[tool.optuna-dsat]\nmax-trials = 9\n")
    assert seen("asha", "../../train.py", "../../ds.json", "--cpu-ranks", "2").options.max_trials == 9


@pytest.mark.parametrize(("table", "first"), [("", True), ("[tool.optuna-dsat]\n", False)])
def test_a_file_of_ones_own_takes_the_place_of_pyproject(
    seen: Seen, bench: EntryPointBench, table: str, first: bool
) -> None:
    (bench.folder / "pyproject.toml").write_text("[tool.optuna-dsat]\nmax-trials = 5\n")
    name = "o.toml"
    text = "zero-stages = [1, 3]\nfix = {overlap_comm = true}\nprofile-reuse = false\n"
    (bench.folder / name).write_text(table + text)
    named = ("--options", name)
    given = seen(*named, *PLAIN) if first else seen(*PLAIN, *named)
    options = given.options
    assert options.max_trials == TuneOptions.max_trials
    assert options.fix == {"overlap_comm": True}
    assert options.profile_reuse is False
    assert options.zero_stages == (1, 3)
    assert given.origins["fix"] == name


def test_several_numbers_for_all_commands_reach_those_that_take_them(
    bench: EntryPointBench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in ("[1, 2]", '"1,2"'):
        (bench.folder / "pyproject.toml").write_text(f"[tool.optuna-dsat]\ncpu-ranks = {value}\n")
        monkeypatch.setattr(search, "run", lambda _, given, __: print(given.options.cpu_ranks))
        assert leave("asha", "train.py", "ds.json") == 0
        assert leave("plan", "--params", "1e9", "--gpu", "h100") == 0
        assert capsys.readouterr().out.startswith("(1, 2)\n")


BAD = {
    "unknown": ("max-trails = 3", "'max-trails' is no option of any command. Did you mean 'max-trials'?"),
    "of-another-command": ("asha = {early-stopping = 1}", "'early-stopping' is no option of `optuna-dsat asha`."),
    "type": ("max-trials = 'many'", 'max-trials is "many": '),
    "flag": ("quiet = 1", "quiet is 1; it must be true or false."),
    "number-for-flag": ("max-trials = true", "max-trials is true; it must be a value such as on the command line."),
    "table-for-value": ("metric = {a = 1}", 'metric is {"a": 1}; it must be'),
    "not-toml": ("a: [", "o.toml is not TOML: "),
    "no-table": ("tool.optuna-dsat = 5", "o.toml contains no table of options"),
}


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD.keys())
def test_what_a_file_says_wrongly_is_one_clear_line(
    bench: EntryPointBench, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (bench.folder / "o.toml").write_text(text)
    assert leave("--options", "o.toml", *PLAIN) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert message in shown.err
    assert len(shown.err.splitlines()) == 1


def test_a_file_that_is_not_toml_or_not_there_is_refused(
    bench: EntryPointBench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "o.yaml"
    (bench.folder / name).write_text('{"max-trials": 3}')
    assert leave("--options", name, *PLAIN) == 2
    assert capsys.readouterr().err.startswith(f"optuna-dsat: {name} is not TOML: ")
    monkeypatch.setenv("OPTUNA_DSAT_OPTIONS", name)
    assert leave(*PLAIN) == 2
    assert "is not TOML" in capsys.readouterr().err
    assert leave("--options", "gone.toml", "studies") == 2
    assert capsys.readouterr().err == "optuna-dsat: --options gone.toml cannot be read: No such file or directory.\n"
    (bench.folder / "pyproject.toml").write_text("[tool.optuna-dsat\n")
    monkeypatch.delenv("OPTUNA_DSAT_OPTIONS")
    assert leave("studies") == 2
    assert "pyproject.toml is not TOML" in capsys.readouterr().err


def test_a_key_for_all_commands_changes_no_setting_of_a_resumed_study() -> None:
    root = typer.main.get_command(app)
    assert isinstance(root, TyperGroup)
    context, settings = typer.Context(root), {*StudySpec.model_fields, *MethodOptions.model_fields}

    def given(table: dict[str, Any]) -> dict[str, Any]:
        return dict(OptionsFile(path=Path("pyproject.toml"), table=table).default_map(root, context)["resume"])

    limits = [
        option
        for option in root.commands["resume"].params
        if option.name in settings and f"--{option.name.replace('_', '-')}" in option.opts
    ]
    assert {"max_trials", "min_gain", "python"} <= {limit.name for limit in limits}
    for limit in limits:
        key, value = str(limit.name).replace("_", "-"), 2 if limit.name == "max_trials" else "0.5"
        assert given({key: value}) == {}
        assert given({"resume": {key: value}}) == {limit.name: value}


def test_the_file_is_named_and_the_limits_of_a_stored_study_are_not_those_of_new_ones(
    bench: EntryPointBench, capsys: pytest.CaptureFixture[str]
) -> None:
    file = bench.folder / "pyproject.toml"
    file.write_text("[tool.optuna-dsat]\nmax-trials = 2\nmin-gain = 0.5\nconfirm-time = 9\nconfirm = 0\n")
    start = ("random", "train.py", "ds.json", "--cpu-ranks", "2", "--metric", "throughput")
    assert leave(*start, "--max-trials", "3", "--confirm-time", "7") == 0
    assert f"Options from {file}: confirm." in " ".join(capsys.readouterr().err.split())
    assert leave("resume", "train-random", "--json") == 0
    assert sum(json.loads(capsys.readouterr().out)["launches"].values()) == 3
    assert leave("show", "train-random", "--json") == 0
    spec = json.loads(capsys.readouterr().out)["spec"]
    assert (spec["max_trials"], spec["confirm_time_s"]) == (3, 7.0)


def test_a_dry_run_says_where_each_option_comes_from_and_hides_a_password(
    bench: EntryPointBench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(tuning_prepare, "check_storage", lambda _: None)
    monkeypatch.setenv("OPTUNA_DSAT_STORAGE", "postgresql://me:geheim@host/db")
    (bench.folder / "pyproject.toml").write_text("[tool.optuna-dsat]\nmax-trials = 2\n")
    assert leave(*PLAIN, "--dry-run") == 0
    shown = capsys.readouterr().out
    rows = {line.split()[0]: line for line in shown.splitlines() if " │ " in line}
    assert "pyproject.toml" in rows["max-trials"]
    assert "OPTUNA_DSAT_STORAGE" in rows["storage"]
    assert "command line" in rows["cpu-ranks"]
    assert "geheim" not in shown


@pytest.mark.parametrize(
    ("given", "lifted"),
    [
        (["asha", "a", "--options", "f"], ["--options", "f", "asha", "a"]),
        (["asha", "--options=f", "a"], ["--options=f", "asha", "a"]),
        (["asha", "a", "--", "--options", "f"], ["asha", "a", "--", "--options", "f"]),
        (["asha", "--options"], ["--options", "asha"]),
        (["asha", "--options", "--", "x"], ["--options", "asha", "--", "x"]),
    ],
)
def test_the_option_for_all_commands_may_stand_anywhere_before_the_scripts_arguments(
    given: list[str], lifted: list[str]
) -> None:
    assert lift_option(given, "--options") == lifted


OTHER = 12345


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        (lambda file: os.chown(file, OTHER, OTHER), f"it belongs to another user (uid {OTHER})"),
        (lambda file: os.chown(file.parent, OTHER, OTHER), f"belongs to another user (uid {OTHER})"),
        (lambda file: file.chmod(0o666), "it can be written by every user"),
        (lambda file: file.parent.chmod(0o777), "can be written by every user"),
    ],
)
def test_a_file_that_another_user_can_write_is_seen(
    tmp_path: Path, attack: Callable[[Path], None], reason: str
) -> None:
    file = tmp_path / "pyproject.toml"
    file.touch()
    assert others_write(file) is None
    attack(file)
    assert str(others_write(file)).endswith(reason)


def test_settings_that_another_user_can_write_are_ignored_with_a_line_unless_they_are_named(
    seen: Seen, bench: EntryPointBench, capsys: pytest.CaptureFixture[str]
) -> None:
    file = bench.folder / "pyproject.toml"
    file.write_text('[tool.optuna-dsat]\nmax-trials = 12\nenv = ["PYTHONPATH=/evil"]\n')
    file.chmod(0o666)
    given = seen(*PLAIN)
    assert given.options.max_trials != 12
    assert not given.options.env
    assert f"{file} is ignored: it can be written by every user" in " ".join(capsys.readouterr().err.split())
    assert seen("--options", str(file), *PLAIN).options.max_trials == 12


def test_a_dry_run_starts_no_python_with_the_variables_of_launches(bench: EntryPointBench) -> None:
    (bench.folder / "sitecustomize.py").write_text(f"open({str(bench.folder / 'started')!r}, 'w')\n")
    assert leave(*PLAIN, "--dry-run", "--env", f"PYTHONPATH={bench.folder}") == 0
    assert not (bench.folder / "started").exists()


def test_a_tilde_that_the_shell_leaves_is_the_users_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    words = ["--output-dir=~/x", "train.py", "--fix=a=~/b", "~/c", "--", "--data=~/d"]
    assert at_home(words) == ["--output-dir=/home/me/x", *words[1:]]
