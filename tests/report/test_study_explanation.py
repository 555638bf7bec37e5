from __future__ import annotations

import json
import math

import pytest

from optuna_dsat.cli import main
from optuna_dsat.errors import UsageError
from optuna_dsat.report.explain.explanation import explain_study
from optuna_dsat.report.explain.why import told_of
from optuna_dsat.study.stored import read_stored
from tests.harness.landscapes import Hill
from tests.harness.studies import StudyBench


@pytest.mark.parametrize("method", ["guided", "asha"])
def test_a_stored_study_is_explained_whatever_method_searched(
    bench: StudyBench, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = bench.run(bench.spec(method=method, confirm=2, max_trials=8), Hill())
    assert result is not None
    matches, words = explain_study(read_stored(bench.store, "s"))
    assert matches.winner == result.trial
    assert matches.speed_up == pytest.approx(result.speed_up)
    assert math.prod(factor.factor for factor in matches.factors if factor.factor is not None) == pytest.approx(
        result.speed_up
    )
    assert matches.remainder is not None
    assert matches.contributions[0].knob == "train_micro_batch_size_per_gpu"
    assert matches.bound == "compute"
    storage = f"sqlite:///{bench.folder / 'study.db'}"
    for options, shown in (([], f"The result is trial {result.trial}, "), (["--json"], '"bound": "compute"')):
        with pytest.raises(SystemExit) as ended:
            main(["explain", "s", "--storage", storage, *options])
        assert ended.value.code == 0
        printed = capsys.readouterr().out
        assert shown in printed
    assert json.loads(printed)["configuration"] == words


def test_a_study_that_measured_nothing_has_nothing_to_explain(bench: StudyBench) -> None:
    bench.store.create_study("s", bench.spec().model_dump(mode="json"), direction="maximize")
    with pytest.raises(UsageError, match="nothing to explain"):
        explain_study(read_stored(bench.store, "s"))


def test_a_winner_outside_the_search_space_is_read_explained_and_reported(bench: StudyBench) -> None:
    bench.run(bench.spec(zero_stages=(1,), max_trials=1, confirm=0), Hill())
    result, words = explain_study(read_stored(bench.store, "s"))
    assert result.is_own
    assert words == "ZeRO 2, micro-batch 2"
    assert not result.contributions
    assert result.bound is None, "the fitted model does not reach there"
    assert not any("it is bound by" in line for line in told_of(result))
    storage = f"sqlite:///{bench.folder / 'study.db'}"
    for command in (["show"], ["trials"], ["best"], ["explain"], ["report", "-o", str(bench.folder / "page.html")]):
        with pytest.raises(SystemExit) as ended:
            main([command[0], "s", "--storage", storage, *command[1:]])
        assert ended.value.code == 0, command
