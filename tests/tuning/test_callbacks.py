"""Callbacks of a search: Optuna's protocol, and the trackers of ``--log``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState

import optuna_dsat
from optuna_dsat.errors import UsageError
from optuna_dsat.tuning.options import trackers
from optuna_dsat.tuning.options.trackers import Tracker, split_trackers
from tests.harness.entry_points import Run, bench, run_here

__all__ = ["bench", "run_here"]

pytestmark = pytest.mark.usefixtures("bench")

QUICK: dict[str, Any] = {"method": "random", "cpu_ranks": 2, "quiet": True, "confirm": 0, "max_concurrent_trials": 1}
SEARCH = ("random", "train.py", "ds.json", "--cpu-ranks", "2", "--confirm", "0", "--quiet")


def launched(result: optuna_dsat.TuneResult) -> list[int]:
    return [row["number"] for row in result.trials() if row["outcome"] is not None]


def test_callbacks_get_each_launched_trial_once_also_of_a_continued_study() -> None:
    seen: list[tuple[int, TrialState, Any]] = []

    def note(study: optuna.Study, trial: FrozenTrial) -> None:
        assert study.study_name == "train-random"
        assert study.user_attrs["metric"] == "throughput"
        trial.user_attrs["changed"] = True  # a copy, as in Optuna
        seen.append((trial.number, trial.state, trial.value))

    result = optuna_dsat.tune("train.py", "ds.json", max_trials=5, callbacks=[note], **QUICK)
    stored = {trial.number: trial for trial in result.optuna_study().trials}
    assert [number for number, *_ in seen] == launched(result)
    assert all((stored[number].state, stored[number].value) == (state, value) for number, state, value in seen)
    assert not any("changed" in trial.user_attrs for trial in stored.values())
    first = len(seen)
    result = optuna_dsat.tune("train.py", "ds.json", max_trials=8, callbacks=note, **QUICK)  # type: ignore[arg-type]
    assert [number for number, *_ in seen] == launched(result)
    assert len(seen) > first


def test_a_callback_that_stops_the_study_ends_the_search_with_a_result() -> None:
    stop = optuna.study.MaxTrialsCallback(3, states=(TrialState.COMPLETE,))
    result = optuna_dsat.tune("train.py", "ds.json", max_trials=9, callbacks=[stop], **QUICK)
    assert result.launches == {"measured": 3}
    assert result.reason == "a callback called study.stop()"
    with pytest.raises(RuntimeError, match="inside an objective function or a callback"):
        result.optuna_study().stop()


def test_an_exception_of_a_callback_ends_the_search_which_keeps_its_trials() -> None:
    def fail(_: optuna.Study, trial: FrozenTrial) -> None:
        if trial.number == 2:
            raise ZeroDivisionError("a mistake in the callback")

    with pytest.raises(ZeroDivisionError, match="a mistake in the callback"):
        optuna_dsat.tune("train.py", "ds.json", max_trials=5, callbacks=[fail], **QUICK)
    result = optuna_dsat.tune("train.py", "ds.json", max_trials=5, **QUICK)
    rows = {row["number"]: row for row in result.trials()}
    assert rows[2]["outcome"] == "measured"
    assert sum(result.launches.values()) == 5


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(TypeError, match=r"callbacks\[0\] must be a function; got 'wandb' \(str\)\."):
        optuna_dsat.tune("train.py", "ds.json", callbacks=["wandb"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"callbacks must be a list of functions; got 3 \(int\)\."):
        optuna_dsat.tune("train.py", "ds.json", callbacks=3)  # type: ignore[arg-type]


def test_a_tracker_that_is_not_installed_is_named_with_what_to_install(
    run_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("optuna_integration", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)
    done = run_here(*SEARCH, "--log", "mlflow=file:runs")
    assert done.returncode == 2
    assert done.stderr == (
        "optuna-dsat: --log mlflow needs optuna_integration and mlflow: pip install 'optuna-integration[mlflow]<6'.\n"
    )
    with pytest.raises(UsageError, match="--log is 'comet'; the trackers are wandb, mlflow, tensorboard"):
        split_trackers(["comet"])


def test_a_tracker_that_fails_warns_once_and_the_search_goes_on(run_here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(value: str, _: optuna.Study) -> Any:
        os.environ["SET_BY_A_TRACKER"] = value
        raise ConnectionError("the server does not answer")

    for name in ("optuna_integration", "wandb"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(trackers._MAKERS, "wandb", make)
    done = run_here(*SEARCH, "--max-trials", "3", "--log", "wandb=mine")
    assert done.returncode == 0
    assert done.stderr == "--log wandb=mine: trial 0 was not logged: the server does not answer.\n"
    assert "SET_BY_A_TRACKER" not in os.environ


@pytest.mark.filterwarnings("ignore")  # those of mlflow
def test_mlflow_has_a_run_for_each_trial_of_a_search_and_its_continuation(run_here: Run, tmp_path: Path) -> None:
    pytest.importorskip("optuna_integration")
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    assert run_here(*SEARCH, "--max-trials", "3", "--log", f"mlflow={uri}").returncode == 0
    more = run_here("resume", "train-random", "--max-trials", "5", "--log", f"mlflow={uri}", "--quiet")
    assert (more.returncode, more.stderr) == (0, "")
    runs = mlflow.tracking.MlflowClient(uri).search_runs(
        [mlflow.tracking.MlflowClient(uri).get_experiment_by_name("train-random").experiment_id]
    )
    assert sorted(int(run.info.run_name) for run in runs) == [0, 1, 2, 3, 4]
    assert {run.info.run_name: run.data.tags["outcome"] for run in runs}["0"] == "measured"
    assert all(run.data.metrics["throughput"] > 0 for run in runs if run.data.tags["outcome"] == "measured")


def test_a_tracker_is_shown_as_its_option_is_written() -> None:
    assert [str(Tracker("wandb")), str(Tracker("tensorboard", "runs"))] == ["wandb", "tensorboard=runs"]
    assert str(Tracker("mlflow", "https://me:geheim@host/x")) == "mlflow=https://me:***@host/x"


def test_a_run_of_wandb_is_named_by_its_study(monkeypatch: pytest.MonkeyPatch) -> None:
    """The callback puts the trial before the name; without a name a run was "trial/0/None" offline."""
    module = ModuleType("optuna_integration")
    monkeypatch.setattr(module, "WeightsAndBiasesCallback", dict, raising=False)
    monkeypatch.setitem(sys.modules, "optuna_integration", module)
    settings = trackers._wandb("mine", optuna.create_study(study_name="s"))["wandb_kwargs"]
    assert (settings["name"], settings["group"], settings["project"]) == ("s", "s", "mine")


def test_a_sweep_logs_each_of_its_studies_under_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[tuple[str, str]] = []

    def make(_: str, made_for: optuna.Study) -> Any:
        return lambda study, _: logged.append((made_for.study_name, study.study_name))

    monkeypatch.setitem(trackers._MAKERS, "wandb", make)
    tracker, trial = Tracker("wandb"), optuna.trial.create_trial(value=1.0)
    for name in ("1rank", "2rank"):
        tracker(optuna.create_study(study_name=name), trial)
    assert logged == [("1rank", "1rank"), ("2rank", "2rank")]
