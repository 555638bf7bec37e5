"""``--batch both``: after the search, the fastest configuration at the user's global batch is searched as well."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import FrozenTrial

from optuna_dsat.cli.show import show_result
from optuna_dsat.outcome import Outcome
from optuna_dsat.report.explain.explanation import explained
from optuna_dsat.study.profile.profiled import Profiled
from optuna_dsat.study.result import StudyResult
from optuna_dsat.study.space import space_of
from optuna_dsat.study.stored import read_stored
from optuna_dsat.trials import attributes
from tests.harness import present
from tests.harness.entry_points import leave
from tests.harness.landscapes import Hill
from tests.harness.simulated import SimulatedResult
from tests.harness.studies import USER_CONFIG, StudyBench

RANKS, STEPS = 2, 8
BATCH = 2 * STEPS * RANKS
"""Global batch of the user's config, whose micro-batch is 2."""
DS_CONFIG = {**USER_CONFIG, "gradient_accumulation_steps": STEPS}


def _seconds(config: Mapping[str, Any]) -> SimulatedResult:
    """Return a launch whose forward passes cost much each, so that few large ones are fastest at any global batch."""
    size, steps = config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]
    stage = config["zero_optimization"]["stage"]
    return SimulatedResult(startup_s=1, forward_s=steps * (0.2 + 0.02 * stage + 0.01 * size))


def _search(bench: StudyBench, **changes: Any) -> StudyResult:
    return bench.run(bench.spec(**{"ds_config": DS_CONFIG, "batch": "both", **changes}), Hill(override=_seconds))


def _asked(bench: StudyBench) -> list[FrozenTrial]:
    return [trial for trial in bench.study().get_trials() if attributes.SAME_BATCH in trial.user_attrs]


@pytest.mark.parametrize("method", ["guided", "asha"])
def test_the_fastest_config_at_the_users_batch_is_found_beside_the_fastest(bench: StudyBench, method: str) -> None:
    result = _search(bench, method=method, max_trials=18, confirm=1)  # it is a finalist beyond their number
    asked = _asked(bench)
    assert asked
    assert {attributes.train_batch_size(trial, slots=RANKS) for trial in asked} == {BATCH}
    assert all(trial.user_attrs[attributes.REASON].startswith("at your global batch: ") for trial in asked)
    assert all(trial.user_attrs[attributes.PREDICTED_VALUE] > 0 for trial in asked)
    assert read_stored(bench.store, "s").launches_used <= 18
    best = result.verdict.at_user_batch
    assert best is not None
    assert best.number in {trial.number for trial in asked}
    assert best.trial.params["train_micro_batch_size_per_gpu"] == BATCH // RANKS
    assert best.speed_up is not None
    assert best.speed_up.surely_above_1
    assert result.train_batch_size > BATCH
    same = result.same_batch
    assert same is not None
    assert same.trial == best.number
    assert not same.is_user_config
    assert same.speed_up_low is not None
    exported = json.loads(Path(same.config_path).read_text())
    assert (exported["train_micro_batch_size_per_gpu"], exported["gradient_accumulation_steps"]) == (BATCH // RANKS, 1)
    assert same.config_path in same.command
    assert result.to_json()["same_batch"]["speed_up"] == best.speed_up.value


def test_the_best_at_the_users_batch_is_explained_by_the_models_of_this_batch(bench: StudyBench) -> None:
    def run(config: Mapping[str, Any]) -> SimulatedResult:
        micro_batch, steps = config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]
        launch = _seconds(config)
        return replace(launch, forward_s=launch.forward_s + 0.02 * max(0, micro_batch * steps - BATCH // RANKS))

    bench.run(bench.spec(ds_config=DS_CONFIG, max_trials=15, method="guided", batch="both"), Hill(override=run))
    study = read_stored(bench.store, "s")
    assert present(study.best).trial.params["gradient_accumulation_steps"] < STEPS
    factors = present(explained(study)).contributions
    assert not [each.knob for each in factors if "outside" in each.note or "gradient_accumulation_steps" in each.brings]


def test_an_implied_accumulation_is_no_difference_from_the_users_config(bench: StudyBench) -> None:
    spec = bench.spec(ds_config={**USER_CONFIG, "train_batch_size": BATCH}, max_trials=2, confirm=0)
    bench.run(spec, Hill())
    words = [trial.user_attrs[attributes.CONFIGURATION] for trial in bench.study().get_trials()]
    assert not [each for each in words if "gradient_accumulation_steps" in each]


@pytest.mark.usefixtures("in_sqlite")
def test_commands_show_and_print_both_configs(
    bench: StudyBench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    size = "train_micro_batch_size_per_gpu"
    advice = staticmethod(lambda _, configs: f"loads {[config[size] for config in configs]}")
    monkeypatch.setattr(Profiled, "checkpoint_advice", advice)
    result = _search(bench, method="random", max_trials=8, confirm=0)
    assert result.same_batch is not None
    assert f"loads {[result.config[size], result.same_batch.config[size]]}" in result.advice
    leave("show", "s", "--storage", bench.store.url)
    shown = capsys.readouterr().out
    assert f"optuna-dsat train s --trial {result.same_batch.trial} --storage {bench.store.url}\n" in shown
    assert f"optuna-dsat train s --storage {bench.store.url}\n" in shown
    for options, config in ((["--same-batch"], result.same_batch.config), ([], result.config)):
        leave("best", "s", *options, "--storage", bench.store.url)
        assert json.loads(capsys.readouterr().out) == config


def test_the_users_config_stays_where_nothing_is_surely_faster_at_its_batch(
    bench: StudyBench, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(config: Mapping[str, Any]) -> SimulatedResult:
        samples = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"]
        return SimulatedResult(startup_s=1, forward_s=0.3 + 0.01 * samples)

    spec = bench.spec(ds_config=DS_CONFIG, max_trials=15, method="guided", batch="both")
    result = bench.run(spec, Hill(override=run), noise=0.02)
    assert _asked(bench)
    assert result is not None
    assert result.same_batch is not None
    assert result.same_batch.is_user_config
    assert json.loads(Path(result.same_batch.config_path).read_text())["gradient_accumulation_steps"] == STEPS
    show_result(result, as_json=False)
    assert capsys.readouterr().out.count("Train with it:") == 1


@pytest.mark.parametrize("most", [None, BATCH])
def test_a_search_of_few_trials_says_that_none_is_left_for_the_users_batch(bench: StudyBench, most: int | None) -> None:
    spec = bench.spec(ds_config=DS_CONFIG, max_trials=4, confirm=0, batch="both", max_train_batch_size=most)
    bench.run(spec, Hill(override=_seconds))
    assert not _asked(bench)
    larger_is_tried = most is None
    assert ("--max-trials 5 or more reserves a fifth." in str(bench.news)) is larger_is_tried


@pytest.mark.parametrize(
    "changes",
    [
        {"batch": "free"},
        {"batch": "keep"},
        {"fix": {"train_micro_batch_size_per_gpu": 2}},
        {"max_train_batch_size": BATCH // 2},
    ],
)
def test_one_question_is_asked_where_one_is_wanted_or_every_configuration_has_the_users_batch(
    bench: StudyBench, changes: dict[str, Any]
) -> None:
    result = _search(bench, **{"method": "random", "max_trials": 6, "confirm": 0, **changes})
    most = changes.get("max_train_batch_size")
    assert not _asked(bench)
    assert ("measured to compare with" in str(bench.messages)) is (most is not None)
    assert result.same_batch is None or (most is not None and result.same_batch.is_user_config)


@pytest.mark.parametrize("edited", [False, True])
def test_the_file_of_an_earlier_result_is_removed_unless_it_was_edited(bench: StudyBench, edited: bool) -> None:
    def run(config: Mapping[str, Any]) -> SimulatedResult:
        samples = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"]
        return SimulatedResult(startup_s=1, forward_s=1e-3 if samples * RANKS == BATCH else 10.0)

    result = _search(bench, method="random", confirm=0, max_trials=8)
    assert result.same_batch is not None
    path = Path(result.same_batch.config_path)
    if edited:
        path.write_text("{}")
    spec = bench.spec(ds_config=DS_CONFIG, max_trials=12, method="random", batch="both", confirm=0)
    later = bench.run(spec, Hill(override=run))
    assert (later.train_batch_size, later.same_batch) == (BATCH, None)
    assert path.exists() is edited


def test_enqueued_trials_that_the_search_left_are_launched(bench: StudyBench) -> None:
    spec = bench.spec(ds_config=DS_CONFIG, method="random", batch="both", confirm=0, max_trials=1)
    bench.run(spec, Hill(override=_seconds))
    stage = space_of(spec, None).completed({"zero_stage": 1})
    for size in range(3, 12):
        bench.study().enqueue_trial({**stage, "train_micro_batch_size_per_gpu": size})
    bench.run(spec.model_copy(update={"max_trials": 10}), Hill(override=_seconds))
    assert read_stored(bench.store, "s").launches_used == 10


def test_a_resumed_search_goes_on_with_both_questions(bench: StudyBench) -> None:
    spec = bench.spec(ds_config=DS_CONFIG, method="random", batch="both", confirm=0, max_trials=10)
    bench.run(spec, Hill(override=_seconds))
    before = len(_asked(bench))
    assert before
    bench.run(spec.model_copy(update={"max_trials": 20}), Hill(override=_seconds))
    assert len(_asked(bench)) > before
    assert read_stored(bench.store, "s").launches_used == 20


@pytest.mark.parametrize("confirm", [0, 3])
def test_the_best_at_the_batch_of_a_config_that_does_not_fit_is_an_answer(
    bench: StudyBench, capsys: pytest.CaptureFixture[str], confirm: int
) -> None:
    def run(config: Mapping[str, Any]) -> SimulatedResult:
        is_users = config["zero_optimization"] == USER_CONFIG["zero_optimization"]
        return SimulatedResult(outcome=Outcome.OUT_OF_MEMORY, startup_s=1) if is_users else _seconds(config)

    spec = bench.spec(ds_config=DS_CONFIG, max_trials=10, method="guided", batch="both", confirm=confirm)
    result = bench.run(spec, Hill(override=run))
    same = present(result.same_batch)
    assert result.verdict.baseline is None
    assert same.trial in {trial.number for trial in _asked(bench)}
    assert present(result.verdict.same_batch).rounds == confirm
    assert (same.config["train_micro_batch_size_per_gpu"], result.user_train_batch_size) == (BATCH // RANKS, BATCH)
    show_result(result, as_json=False)
    assert f"At your global batch of {BATCH} samples: trial {same.trial} is the fastest" in capsys.readouterr().out
