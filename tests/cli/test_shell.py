"""What a shell sees of the command: exit codes, the two streams, colours, completion."""

from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from sqlalchemy.exc import OperationalError

from optuna_dsat import __version__
from optuna_dsat.outcome import Outcome
from optuna_dsat.store import Store
from optuna_dsat.study.conclusion import Conclusion
from optuna_dsat.study.folder import held_folder
from optuna_dsat.study.progress import Phase
from optuna_dsat.study.result import StudyResult
from optuna_dsat.study.session import Session
from tests.harness.entry_points import EntryPointBench, Run, bench, leave, run_here, searching_in
from tests.harness.landscapes import GIB, Hill, Interrupted
from tests.harness.simulated import SimulatedResult

__all__ = ["bench", "run_here"]

pytestmark = pytest.mark.usefixtures("bench")

MAIN = "from optuna_dsat.cli import main; main()"
CONFIRMED = ("random", "train.py", "ds.json", "--cpu-ranks", "2", "--metric", "throughput", "--max-trials", "3")
SEARCH = (*CONFIRMED, "--confirm", "0")
STUDY = "train-random"


class Finished(NamedTuple):
    """A folder with a finished study, which tests only read, and what the search showed."""

    folder: Path
    out: str
    err: str


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder, out, err = tmp_path_factory.mktemp("finished"), io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, searching_in(folder, patch), redirect_stdout(out), redirect_stderr(err):
        assert leave(*CONFIRMED, "--json") == 0
    return Finished(folder, out.getvalue(), err.getvalue())


@pytest.fixture
def in_finished(finished: Finished, bench: EntryPointBench, monkeypatch: pytest.MonkeyPatch) -> EntryPointBench:
    """Run commands in the folder of the finished study; return the bench of a folder to write to."""
    monkeypatch.chdir(finished.folder)
    return bench


def test_a_search_that_finds_something_exits_with_0_and_stdout_holds_the_result(finished: Finished) -> None:
    assert json.loads(finished.out)["study"] == STUDY
    assert "Trial 0" in finished.err


def test_a_usage_error_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert leave("random") == 2
    assert leave("no-such-command") == 2
    assert leave("random", "gone.py", "ds.json") == 2
    assert capsys.readouterr().out == ""


def test_nothing_that_runs_exits_with_3(bench: EntryPointBench, capsys: pytest.CaptureFixture[str]) -> None:
    full = SimulatedResult(outcome=Outcome.OUT_OF_MEMORY, startup_s=1, missing_bytes=GIB)
    bench.landscape = Hill(override=lambda _: full)
    assert leave(*SEARCH) == 3
    assert capsys.readouterr().out == ""
    assert leave("best", STUDY) == 3


def test_a_script_that_fails_exits_with_4_and_its_own_error(
    bench: EntryPointBench, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = SimulatedResult(outcome=Outcome.SCRIPT_ERROR, startup_s=1, message="ValueError: no data")
    bench.landscape = Hill(override=lambda _: broken)
    assert leave(*SEARCH) == 4
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "no data" in shown.err


def test_a_database_that_fails_exits_with_5(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from optuna_dsat.errors import StorageError

    def away(_: Session, **__: bool) -> None:
        raise StorageError("The database went away.") from OperationalError("", None, Exception())

    monkeypatch.setattr(Session, "run", away)
    assert leave(*SEARCH) == 5
    assert capsys.readouterr().out == ""


def test_an_interruption_exits_with_130_and_says_how_to_go_on(
    bench: EntryPointBench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.landscape = Interrupted()
    assert leave(*SEARCH) == 130
    shown = capsys.readouterr()
    assert f"Continue with: optuna-dsat resume {STUDY}" in shown.err
    assert "The search ended: interrupted" in shown.out
    bench.landscape = Hill()
    assert leave("resume", STUDY, "--quiet", "--json") == 0
    shown = capsys.readouterr()
    assert sum(json.loads(shown.out)["launches"].values()) == 3
    assert shown.err == ""


def test_a_guided_search_that_ended_by_itself_goes_on_with_a_smaller_least_gain(
    capsys: pytest.CaptureFixture[str],
) -> None:
    few = ("--zero-stages", "1", "2", "--no-tune", "reduce_bucket_size", "offload_optimizer")
    guided = ("guided", *SEARCH[1:], *few, "--max-trials", "40", "--min-gain", "0.05", "--json", "--quiet")
    assert leave(*guided) == 0
    ended = json.loads(capsys.readouterr().out)
    assert "expected to gain enough" in ended["reason"]
    launches = sum(ended["launches"].values())
    more = ("--max-trials", str(launches + 2), "--json", "--quiet")
    assert leave("resume", "train-guided", *more) == 0
    assert sum(json.loads(capsys.readouterr().out)["launches"].values()) == launches
    assert leave("resume", "train-guided", *more, "--min-gain", "0") == 0
    assert sum(json.loads(capsys.readouterr().out)["launches"].values()) == launches + 2


@pytest.mark.usefixtures("in_finished")
def test_what_reads_a_study_prints_it_to_stdout_alone_and_errors_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in ((["studies"], STUDY), (["show", STUDY], STUDY), (["trials", STUDY], "measured")):
        for form in ([], ["--json"]):
            assert leave(*arguments, *form) == 0
            shown = capsys.readouterr()
            assert shown.err == ""
            assert words in shown.out
            if form:
                json.loads(shown.out)
    for arguments in (["export", STUDY], ["db", "upgrade"]):
        assert leave(*arguments) == 0
        shown = capsys.readouterr()
        assert shown.out
        assert shown.err == ""
    assert leave("resume", STUDY, "--min-gain", "0") == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "--min-gain is an option of guided; this study is searched by random" in shown.err
    assert leave("best", STUDY) == 0
    shown = capsys.readouterr()
    assert "zero_optimization" in json.loads(shown.out)
    assert re.fullmatch(r"Config of (trial \d+|your config).*\n", shown.err)


def test_no_color_is_honoured(run_here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    colours = re.compile(r"\x1b\[[0-9;]*3[0-7]")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert colours.search(run_here("random", "--help").stdout)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not colours.search(run_here("random", "--help").stdout)


def call_as_installed(patch: pytest.MonkeyPatch) -> None:
    """Let this process be ``optuna-dsat``: typer takes the name of the command from these two."""
    patch.setattr(sys, "argv", ["optuna-dsat"])
    patch.setattr(sys.modules["__main__"], "__package__", None)


def test_completion_can_be_shown_for_each_shell_and_is_installed_where_it_reads_it(
    run_here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call_as_installed(monkeypatch)
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    monkeypatch.setenv("HOME", str(tmp_path))
    for shell in ("bash", "zsh", "fish"):
        done = run_here("--show-completion", shell)
        assert done.returncode == 0, done.stderr
        assert "_OPTUNA_DSAT_COMPLETE" in done.stdout
    done = run_here("--install-completion", "bash")
    assert done.returncode == 0, done.stderr
    assert "optuna-dsat" in (tmp_path / ".bashrc").read_text()


Complete = Callable[..., list[str]]


@pytest.fixture
def complete(run_here: Run, monkeypatch: pytest.MonkeyPatch) -> Complete:
    """Return what tells what bash is offered after some words."""

    def offered(words: str, **environ: str) -> list[str]:
        count = str(len(words.split(" ")) - 1)
        asked = {"_OPTUNA_DSAT_COMPLETE": "complete_bash", "COMP_WORDS": words.strip(), "COMP_CWORD": count}
        with monkeypatch.context() as shell:
            call_as_installed(shell)
            for name, value in {**asked, **environ}.items():
                shell.setenv(name, value)
            done = run_here()
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    return offered


def test_commands_and_options_complete(complete: Complete) -> None:
    assert complete("optuna-dsat ra") == ["random"]
    assert complete("optuna-dsat random --zero") == ["--zero-stages"]
    assert complete("optuna-dsat tune --method gu") == ["guided"]
    assert complete("optuna-dsat asha --metric thr") == ["throughput"]
    assert complete("optuna-dsat asha --no-tune offload_pa") == ["offload_param"]


def test_study_names_complete_from_the_storage_and_nothing_is_made(bench: EntryPointBench, complete: Complete) -> None:
    with Store.open("sqlite:///mine.db") as store:
        for name in (STUDY, "other"):
            store.create_study(name, {})
    assert complete("optuna-dsat show tr") == []
    assert not (bench.folder / "optuna-dsat.db").exists()
    assert complete("optuna-dsat show --storage sqlite:///mine.db tr") == [STUDY]
    assert sorted(complete("optuna-dsat show ", OPTUNA_DSAT_STORAGE="sqlite:///mine.db")) == ["other", STUDY]
    (bench.folder / "pyproject.toml").write_text('[tool.optuna-dsat]\nstorage = "sqlite:///mine.db"\n')
    assert complete("optuna-dsat resume o") == ["other"]
    (bench.folder / "o.yaml").write_text("storage: sqlite:///gone.db\n")
    assert complete("optuna-dsat --options o.yaml resume o") == []


def test_a_reader_that_has_had_enough_ends_it_without_a_traceback(finished: Finished) -> None:
    done = subprocess.run(
        f"{shlex.quote(sys.executable)} -c '{MAIN}' export {STUDY} | true; echo ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        cwd=finished.folder,
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    assert done.stdout == "1\n"


@pytest.mark.parametrize("command", ["best", "report"])
def test_a_file_of_the_user_is_not_replaced_by_output(
    command: str, in_finished: EntryPointBench, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, ours = in_finished.folder / "theirs.txt", in_finished.folder / "ours.txt"
    theirs.write_text("weights")
    assert leave(command, STUDY, "-o", str(theirs)) == 2
    assert "was not written by this command" in capsys.readouterr().err
    assert theirs.read_text() == "weights"
    assert leave(command, STUDY, "-o", str(ours)) == 0
    assert leave(command, STUDY, "-o", str(ours)) == 0


def test_resume_keeps_result_files_that_others_wrote_or_changed_and_names_edited_keys(
    bench: EntryPointBench, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, config = bench.folder / "optuna-dsat-output" / STUDY, bench.folder / "ds.json"
    folder.mkdir(parents=True)
    best, metrics = folder / "best_ds_config.json", folder / "best_ds_metrics.json"
    best.write_text("theirs")
    assert leave(*SEARCH, "--quiet") == 0
    assert (folder / "best_ds_config.json.old-1").read_text() == "theirs"
    capsys.readouterr()
    assert leave("resume", STUDY, "--max-trials", "4") == 0
    assert not (folder / "best_ds_config.json.old-2").exists(), "what the study itself wrote is replaced"
    assert "was edited" not in capsys.readouterr().err
    metrics.write_text("edited")
    config.write_text(json.dumps({**json.loads(config.read_text()), "gradient_clipping": 0.25}))
    assert leave("resume", STUDY, "--max-trials", "5") == 0
    words = " ".join(capsys.readouterr().err.split())
    assert (folder / "best_ds_metrics.json.old-1").read_text() == "edited"
    assert "best_ds_metrics.json.old-1" in words
    assert "was edited; the study keeps its config: gradient_clipping unset (file: 0.25)." in words


def test_a_study_is_not_deleted_while_it_is_searched(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []

    def delete_first(session: Session) -> StudyResult | None:
        with held_folder(session.spec.study_dir, session._context.study_uuid):
            codes.append(leave("delete", STUDY, "--yes"))  # between launches
        session._context.observer(Phase(words="searching"))
        codes.append(leave("delete", STUDY, "--yes"))
        return run(session)

    run = Session.run
    monkeypatch.setattr(Session, "run", delete_first)
    leave(*SEARCH, "--quiet")
    assert codes == [2, 2]
    assert "is being searched by" in capsys.readouterr().err
    assert leave("delete", STUDY, "--yes") == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "Deleted" in shown.err


def test_a_search_whose_study_was_deleted_ends_with_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    conclude = Conclusion.run

    def delete_first(conclusion: Conclusion, *args: Any, **kwargs: Any) -> Any:
        conclusion._context.store.delete_study(STUDY)
        return conclude(conclusion, *args, **kwargs)

    monkeypatch.setattr(Conclusion, "run", delete_first)
    assert leave(*SEARCH, "--quiet") == 5
    error = capsys.readouterr().err
    assert "was deleted while it was searched" in error
    assert "Traceback" not in error
    assert "Continue with" not in error


def test_the_command_is_a_module_too_and_its_version_goes_to_stdout(tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("raise ImportError('of the user')")
    words = [sys.executable, "-m", "optuna_dsat", "--version"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert (done.stdout, done.stderr) == (f"optuna-dsat {__version__}\n", "")
