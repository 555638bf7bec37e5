"""Settings of the best trial that have no effect are not part of the result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from optuna.trial import FrozenTrial

from optuna_dsat.config.knobs import KNOBS, NVME, ZERO_STAGE
from optuna_dsat.outcome import Outcome
from optuna_dsat.study.result import StudyResult
from optuna_dsat.study.space import space_of
from optuna_dsat.study.stored import read_stored
from optuna_dsat.trials import attributes
from tests.harness.landscapes import Hill
from tests.harness.simulated import SimulatedResult
from tests.harness.studies import StudyBench

STRUCTURE = {"stage", "offload_optimizer", "offload_param"}


def _search(bench: StudyBench, hill: Hill) -> StudyResult:
    """Search with a budget of two launches: the user's config, and ZeRO 1 with two settings that no default has."""
    bench.run(bench.spec(max_trials=1, confirm=0), Hill())
    space = space_of(bench.spec(), None)
    drawn = {**space.completed({"zero_stage": 1}), "reduce_scatter": False, "reduce_bucket_size": 10**6}
    bench.study().enqueue_trial({**drawn, "train_micro_batch_size_per_gpu": 8})
    result = bench.run(bench.spec(max_trials=2, confirm=1), hill)
    assert result is not None
    return result


def _simplifying(bench: StudyBench) -> list[FrozenTrial]:
    return [trial for trial in bench.study().get_trials() if attributes.SIMPLIFIES in trial.user_attrs]


@pytest.mark.parametrize(("gain", "is_kept"), [(0.0, False), (0.001, False), (-0.1, False), (0.2, True)])
def test_only_settings_with_an_effect_are_exported(bench: StudyBench, gain: float, is_kept: bool) -> None:
    def run(config: Mapping[str, Any]) -> SimulatedResult:
        is_plain = config["zero_optimization"].get("reduce_scatter") is not False
        seconds = 0.3 + 0.01 * config["train_micro_batch_size_per_gpu"]
        return SimulatedResult(startup_s=1, forward_s=seconds * (1 + gain if is_plain else 1))

    result = _search(bench, Hill(override=run))
    [simpler] = _simplifying(bench)
    assert (simpler.number, simpler.user_attrs[attributes.SIMPLIFIES]) == (2, 1)
    assert result.trial == (1 if is_kept else 2)
    assert ("reduce_bucket_size" in result.config["zero_optimization"]) is is_kept
    rounds = {contender.number for contender in result.verdict.contenders if contender.rounds}
    assert rounds == {0, result.trial}
    assert read_stored(bench.store, "s").launches_used == 2


def test_a_simpler_configuration_that_fails_changes_nothing(bench: StudyBench) -> None:
    def run(_: Mapping[str, Any]) -> SimulatedResult | None:
        failed = SimulatedResult(outcome=Outcome.SCRIPT_ERROR, startup_s=1)
        last = bench.study().get_trials()[-1]
        return failed if attributes.SIMPLIFIES in last.user_attrs and not last.state.is_finished() else None

    result = _search(bench, Hill(override=run))
    assert [trial.user_attrs[attributes.OUTCOME] for trial in _simplifying(bench)] == [Outcome.SCRIPT_ERROR]
    assert result.trial == 1


def test_no_launch_simplifies_a_result_that_is_not_confirmed_or_plain(bench: StudyBench) -> None:
    bench.run(bench.spec(max_trials=4, confirm=0), Hill())
    assert not _simplifying(bench)
    study = bench.spec(
        name="plain",
        max_trials=8,
        confirm=1,
        no_tune=tuple(knob.name for knob in KNOBS if knob.name not in (*STRUCTURE, ZERO_STAGE, NVME)),
    )
    assert bench.run(study, Hill()) is not None
    assert not any(attributes.SIMPLIFIES in trial.user_attrs for trial in bench.study("plain").get_trials())
