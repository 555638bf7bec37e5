"""``optuna_dsat.tune``: the command's options as keywords, its result as a value."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
import pytest

import optuna_dsat
from docs.generate.options import commands
from optuna_dsat.errors import ScriptFailedError, StorageUrlError, UsageError
from optuna_dsat.launch.machine.devices import DEFAULT_CPU_RANKS
from optuna_dsat.outcome import Outcome
from optuna_dsat.runtime.adapt.ranks import wrong_number
from optuna_dsat.runtime.isolation.prepared import REMOVED
from optuna_dsat.study.options.declaration import options_in
from optuna_dsat.study.options.methods import METHODS
from optuna_dsat.study.spec import StudyRequest
from optuna_dsat.tuning import resume, tune
from optuna_dsat.tuning.options.given import Given
from optuna_dsat.tuning.options.tune_options import AutotuningOptions, TuneOptions, methods_of
from optuna_dsat.tuning.prepare import Prepared, prepare
from tests.harness import present
from tests.harness.entry_points import DS_CONFIG, EntryPointBench, bench, leave
from tests.harness.landscapes import Hill, Interrupted
from tests.harness.simulated import SimulatedResult

__all__ = ["bench"]

pytestmark = pytest.mark.usefixtures("bench")

OF_A_TERMINAL = {"json_output", "dry_run", "on_end", "price"}
"""Options that say how the command prints; a function returns."""
QUICK: dict[str, Any] = {
    "method": "random",
    "metric": "throughput",
    "cpu_ranks": 2,
    "max_trials": 4,
    "quiet": True,
    "confirm": 1,
}


def test_every_option_of_the_command_is_a_keyword_with_the_same_default() -> None:
    options = {param.name: param.default for param in dict(commands())["optuna-dsat tune"].params}
    parameters = {
        name: None if parameter.default is inspect.Parameter.empty else parameter.default
        for name, parameter in inspect.signature(optuna_dsat.tune).parameters.items()
    }
    assert parameters == {name: default for name, default in options.items() if name not in OF_A_TERMINAL}


def test_what_options_and_request_both_have_has_one_default() -> None:
    defaults = {field_.name: field_.default for field_ in dataclasses.fields(AutotuningOptions)}
    request = {field_.name: field_.default for field_ in dataclasses.fields(StudyRequest)}
    assert (defaults["profile_reuse"], defaults["check_loss"]) == (request["reuse_profile"], request["check_loss"])
    assert options_in(AutotuningOptions)["cpu_ranks"].none == str(DEFAULT_CPU_RANKS)


def test_every_option_of_methods_says_which_read_it() -> None:
    shared = {field_.name for field_ in dataclasses.fields(TuneOptions)}
    for name in {field_.name for field_ in dataclasses.fields(AutotuningOptions)} - shared - {"method"}:
        assert set(methods_of(name)) & set(METHODS), name


def test_every_keyword_is_typed_and_documented() -> None:
    hints = typing.get_type_hints(optuna_dsat.tune)
    documented = inspect.getdoc(optuna_dsat.tune) or ""
    for name in inspect.signature(optuna_dsat.tune).parameters:
        assert name in hints
        assert re.search(rf"^    {name}: \S", documented, re.MULTILINE), name
    assert "``binary``, ``asha``: Factor on the largest micro-batch" in documented


def test_a_type_checker_knows_the_keywords() -> None:
    with pytest.raises(TypeError, match=r"max_trials must be a whole number; got 'many' \(str\)\."):
        optuna_dsat.tune("train.py", "ds.json", max_trials="many", cpu_ranks=2)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"^launcher is 'cold'"):
        optuna_dsat.tune("train.py", "ds.json", launcher="cold", cpu_ranks=2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="missing a required argument: 'script'"):
        optuna_dsat.tune()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"tune\(\) got an unexpected .* 'json_output'"):
        optuna_dsat.tune("train.py", "ds.json", json_output=True)  # type: ignore[call-arg]


def test_importing_the_package_stays_light() -> None:
    code = (
        "import sys, optuna_dsat\n"
        "assert not {'torch', 'deepspeed', 'optuna', 'plotly', 'sqlalchemy', 'typer', 'rich'} & set(sys.modules)\n"
        "assert callable(optuna_dsat.tune) and set(optuna_dsat.__all__) <= set(dir(optuna_dsat))\n"
        "assert not {'torch', 'deepspeed', 'plotly'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_search_returns_what_the_command_would_print_and_reads_no_environment(
    bench: EntryPointBench, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPTUNA_DSAT_STORAGE", "sqlite:///elsewhere.db")
    (bench.folder / "pyproject.toml").write_text("[tool.optuna-dsat]\nmax-trials = 1\n")
    verbosity = optuna.logging.get_verbosity()
    result = optuna_dsat.tune("train.py", Path("ds.json"), ["--lr", "1"], **QUICK)
    assert isinstance(result, optuna_dsat.TuneResult)
    assert present(result.speed_up) > 1
    assert present(result.low) <= result.value <= present(result.high)
    assert json.loads(Path(result.config_path).read_text()) == dict(result.config)
    assert (result.study, result.storage) == ("train-random", f"sqlite:///{bench.folder / 'optuna-dsat.db'}")
    assert result.command.endswith(f"optuna-dsat train train-random --storage {result.storage}")
    assert optuna.logging.get_verbosity() == verbosity
    assert sum(result.launches.values()) == 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.study = "other"  # type: ignore[misc]
    study = result.optuna_study()
    assert study.best_trial.number == result.trial
    micro_batch = "train_micro_batch_size_per_gpu"
    assert study.trials[result.trial].params[micro_batch] == result.config[micro_batch]
    study.set_user_attr("mine", 1)
    assert result.optuna_study().user_attrs["mine"] == 1
    rows = result.trials()
    assert [row["number"] for row in rows] == [trial.number for trial in study.trials]
    assert {row["outcome"] for row in rows} == set(result.launches)
    assert capfd.readouterr() == ("", ""), "nothing is printed"
    secret = dataclasses.replace(result, storage="postgresql://me:***@host/db")
    with pytest.raises(StorageUrlError, match="give the URL again"):
        secret.optuna_study()


class OwnRanks(Hill):
    """A script that sets its number of ranks."""

    number = 1

    def run(self, ds_config: Mapping[str, Any], slots: int) -> SimulatedResult:
        if slots == self.number:
            return super().run(ds_config, slots)
        message = wrong_number("rank 0: ValueError: the script starts its ranks itself", self.number, slots)
        return SimulatedResult(outcome=Outcome.SCRIPT_ERROR, startup_s=1.0, message=message)


def test_a_script_that_sets_its_number_of_ranks_is_tuned_with_that_unless_an_option_says_otherwise(
    bench: EntryPointBench, capfd: pytest.CaptureFixture[str]
) -> None:
    bench.landscape = landscape = OwnRanks()
    options = {**QUICK, "cpu_ranks": None, "quiet": False, "max_trials": 2, "allow": ["lossy"]}
    with pytest.raises(ScriptFailedError, match="launch has 2 ranks: tune with"):
        optuna_dsat.tune("train.py", "ds.json", study="two", **{**options, "cpu_ranks": 2})
    capfd.readouterr()
    result = optuna_dsat.tune("train.py", "ds.json", **options)
    assert result.train_batch_size == result.config["train_micro_batch_size_per_gpu"], "of one rank"
    printed = capfd.readouterr().err
    assert "The script sets its number of ranks: launches have 1 rank, as by --cpu-ranks 1." in printed
    assert printed.count("Launches run with") == printed.count("Allowed, and not searched") == 1
    again = ("--metric", "throughput", "--max-trials", "3", "--confirm", "1", "--allow", "lossy")
    assert leave("random", "train.py", "ds.json", *again) == 0
    assert "The study continues: launches have 1 rank, as by --cpu-ranks 1." in capfd.readouterr().err
    assert len(result.trials()) == 3
    landscape.number = 2
    command = ("--python", sys.executable, "--study", "without", *again)
    assert leave("random", *command, "python", "train.py", "ds.json") == 0
    printed = capfd.readouterr().err
    assert "trains in one process: each trial takes 1 rank" in printed
    assert "The script sets its number of ranks: launches have 2 ranks, as by --cpu-ranks 2." in printed


@pytest.mark.postgres
def test_the_result_finds_its_study_on_a_server(postgres_url: str) -> None:
    result = optuna_dsat.tune("train.py", "ds.json", storage=postgres_url, **QUICK)
    study = result.optuna_study(None if "***" not in result.storage else postgres_url)
    assert len(study.trials) == len(result.trials(postgres_url)) == sum(result.launches.values())


def test_an_argument_that_is_given_wins_over_the_autotuning_section_even_if_it_is_the_default(
    bench: EntryPointBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = {"tuner_num_trials": 3, "tuner_type": "random", "start_profile_step": 2}
    (bench.folder / "ds.json").write_text(json.dumps({**DS_CONFIG, "autotuning": section}))
    seen: list[Prepared] = []

    def prepared(method: str | None, given: Given) -> list[Prepared]:
        seen.append(prepare(method, given))
        raise UsageError("seen enough")

    monkeypatch.setattr(tune, "prepare_each", prepared)
    with pytest.raises(UsageError, match="seen enough"):
        optuna_dsat.tune("train.py", "ds.json", max_trials=64, cpu_ranks=2)
    (result,) = seen
    spec = result.request.spec
    assert (spec.method, spec.max_trials, spec.start_profile_step) == ("random", 64, 2)


def test_a_script_that_reads_a_piped_input_is_noted_where_progress_is_shown(
    bench: EntryPointBench, capfd: pytest.CaptureFixture[str]
) -> None:
    (bench.folder / "train.py").write_text("import sys\nfiles = sys.stdin.read()\n")
    kept, (reader, writer) = os.dup(0), os.pipe()
    os.dup2(reader, 0)
    try:
        optuna_dsat.tune("train.py", "ds.json", **{**QUICK, "max_trials": 1, "quiet": False})
        (bench.folder / "train.py").write_text("import sys\n")
        optuna_dsat.tune("train.py", "ds.json", **{**QUICK, "max_trials": 1, "quiet": False, "study": "other"})
    finally:
        os.dup2(kept, 0)
        for descriptor in (kept, reader, writer):
            os.close(descriptor)
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "Trial 0" in shown.err
    assert shown.err.count("The script reads its standard input, which is empty in trials") == 1


def test_errors_are_raised_and_nothing_is_written(bench: EntryPointBench) -> None:
    before = sorted(bench.folder.iterdir())
    with pytest.raises(UsageError, match=r"gone\.py does not exist"):
        optuna_dsat.tune("gone.py", "ds.json", **QUICK)
    with pytest.raises(UsageError, match=r"^divisor is 1"):
        optuna_dsat.tune("train.py", "ds.json", divisor=1, **QUICK)
    with pytest.raises(UsageError, match=r"^device_memory: 'much' is not a size"):
        optuna_dsat.tune("train.py", "ds.json", device_memory="much", **QUICK)
    with pytest.raises(UsageError, match=r"^fix names 'bucket', which is not a knob"):
        optuna_dsat.tune("train.py", "ds.json", fix={"bucket": 1}, **QUICK)
    with pytest.raises(TypeError, match=r"script_args must be a list of texts, such as \['--lr', '1'\]; got '--lr 1'"):
        optuna_dsat.tune("train.py", "ds.json", "--lr 1", **QUICK)
    with pytest.raises(TypeError, match=r"'max_trails'\. Did you mean 'max_trials'\?"):
        optuna_dsat.tune("train.py", "ds.json", max_trails=1)  # type: ignore[call-arg]
    assert sorted(bench.folder.iterdir()) == before


@pytest.mark.parametrize(("left", "found"), [(0, False), (3, True)])
def test_ctrl_c_raises_with_what_was_found_and_a_second_call_goes_on(
    bench: EntryPointBench, left: int, found: bool
) -> None:
    bench.landscape = Interrupted()
    bench.landscape.left = left
    with pytest.raises(KeyboardInterrupt) as caught:
        optuna_dsat.tune("train.py", "ds.json", **QUICK)
    stopped = caught.value
    assert isinstance(stopped, optuna_dsat.SearchInterrupted)
    assert stopped.study == "train-random"
    assert (stopped.result is not None) is found
    bench.landscape = Hill()
    assert sum(optuna_dsat.tune("train.py", "ds.json", **QUICK).launches.values()) == 4


def test_training_at_the_end_is_part_of_the_call_and_its_failure_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = iter((0, 3))
    trained = []

    def run_full(request: Any, **_: Any) -> int:
        trained.append(request.ds_config)
        return next(codes)

    monkeypatch.setattr(resume, "run_full", run_full)
    result = optuna_dsat.tune("train.py", "ds.json", run_full_experiment=True, **QUICK)
    assert trained == [dict(result.config)]
    with pytest.raises(ScriptFailedError, match="exit code 3"):
        optuna_dsat.tune("train.py", "ds.json", run_full_experiment=True, **QUICK)


def test_files_that_the_searchs_command_had_made_are_named_where_training_lacks_them(
    bench: EntryPointBench, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    kept, gone = Path(f"{bench.folder}/kept{bench.folder}"), "by the command of the search: "
    (kept / "made").mkdir(parents=True)
    for path in (kept / "made" / "a.txt", kept / "train.py"):
        path.touch()
    (kept / "list").symlink_to(REMOVED)
    monkeypatch.setattr(resume, "run_full", lambda *_, **__: 0)
    options = {**QUICK, "prepared": str(bench.folder / "kept"), "run_full_experiment": True}
    optuna_dsat.tune("train.py", "ds.json", **options)
    assert f"{gone}{bench.folder}/made. Run its steps before" in capfd.readouterr().err
    (bench.folder / "made").mkdir()
    optuna_dsat.tune("train.py", "ds.json", **options)
    assert f"{gone}{bench.folder}/made/a.txt. Run its steps before" in capfd.readouterr().err
    (bench.folder / "made" / "a.txt").touch()
    optuna_dsat.tune("train.py", "ds.json", **options)
    assert gone not in capfd.readouterr().err
