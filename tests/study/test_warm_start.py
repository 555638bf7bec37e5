"""What a guided search takes over from earlier studies, and what it does not."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from optuna_dsat.cost.step_time import COEFFICIENTS, LogCoefficients, StepTimeModel
from optuna_dsat.errors import UsageError
from optuna_dsat.guided.prior_knowledge import PriorKnowledge
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.trials import attributes
from tests.harness.landscapes import Hill
from tests.harness.simulated import SimulatedProfile, SimulatedResult
from tests.harness.studies import StudyBench

KEEP = (
    "contiguous_gradients", "reduce_scatter", "stage3_prefetch_bucket_size", "stage3_max_live_parameters",
    "stage3_max_reuse_distance", "stage3_param_persistence_threshold", "sub_group_size", "offload_param",
)  # fmt: skip


class Larger(Hill):
    """Another model on the same machine."""

    def profile(self, slots: int) -> SimulatedProfile:
        return replace(super().profile(slots), params=2 * 10**9, trainable_params=2 * 10**9)


def guided(bench: StudyBench, name: str, **changes: Any) -> StudySpec:
    values: dict[str, Any] = {"name": name, "method": "guided", "max_trials": 4, "confirm": 0, "no_tune": KEEP}
    return bench.spec(**{**values, **changes})


def told(bench: StudyBench) -> list[str]:
    return [text for text in bench.messages if text.startswith("Warm start")]


def configs(bench: StudyBench, name: str) -> list[tuple[Any, ...]]:
    return [tuple(sorted(trial.params.items())) for trial in bench.study(name).trials]


def test_a_second_study_of_the_same_begins_with_what_the_first_learnt(bench: StudyBench) -> None:
    bench.run(guided(bench, "first", max_trials=10), Hill())
    assert told(bench) == []
    bench.run(guided(bench, "second", max_trials=2), Hill())
    assert len(told(bench)) == 1
    assert "first (same script, config and hardware)" in told(bench)[0]
    best = max(trial.values[0] for trial in bench.study("first").trials if trial.values)
    assert bench.study("second").trials[1].values[0] >= 0.8 * best
    bench.run(guided(bench, "third", max_trials=2, options={"no_warm_start": True}), Hill())
    assert len(told(bench)) == 1
    assert bench.study("third").user_attrs[attributes.WARM_START] == {}
    assert configs(bench, "third")[1] != configs(bench, "second")[1]


def test_a_measurement_outweighs_what_an_earlier_study_says(bench: StudyBench) -> None:
    """The machine has changed since: ZeRO 3 became ten times as slow, and nothing in the fingerprint tells."""

    first, second = (Hill(override=functools.partial(ten_times_slower, stage=stage)) for stage in (2, 3))
    bench.run(guided(bench, "first", max_trials=8, zero_stages=(2, 3)), first)
    assert bench.study("first").best_params["zero_stage"] == 3
    bench.run(guided(bench, "second", max_trials=8), second)
    assert told(bench)
    assert bench.study("second").best_params["zero_stage"] != 3


def ten_times_slower(config: Any, *, stage: int) -> SimulatedResult:
    result = Hill().run(config, 2)
    times = 10 if config["zero_optimization"]["stage"] == stage else 1
    return replace(result, forward_s=times * result.forward_s, backward_s=times * result.backward_s)


def test_a_resumed_study_plans_with_the_same_knowledge_though_its_source_is_gone(bench: StudyBench) -> None:
    bench.run(guided(bench, "first"), Hill())
    bench.run(guided(bench, "whole", options={"warm_start": "first"}), Hill())
    halves = guided(bench, "halves", options={"warm_start": "first"}, max_trials=2)
    bench.run(halves, Hill())
    bench.store.delete_study("first")
    bench.run(halves.model_copy(update={"max_trials": 4}), Hill())
    assert configs(bench, "halves") == configs(bench, "whole")
    assert len(told(bench)) == 2


def test_another_model_gives_what_belongs_to_the_machine_alone(bench: StudyBench) -> None:
    bench.run(guided(bench, "first"), Hill())
    (bench.folder / "train.py").write_text("# another model\n")
    bench.run(guided(bench, "unrelated"), Larger())
    assert told(bench) == []
    bench.run(guided(bench, "other", options={"warm_start": "first"}), Larger())
    assert "its model is another" in told(bench)[0]
    stored = PriorKnowledge.from_json(bench.study("other").user_attrs[attributes.WARM_START])
    assert stored.studies == ("first",)
    assert stored.launches == ()
    assert not stored.same_model


def test_what_cannot_be_begun_with_is_refused_before_any_launch(bench: StudyBench) -> None:
    bench.run(guided(bench, "first", max_trials=2), Hill())
    others = "the other studies of this database: first"
    hill = Hill()
    for changes, words in (
        ({"options": {"warm_start": "gone"}}, others),
        ({"options": {"warm_start": "s"}}, others),
        ({"options": {"warm_start": "first", "no_warm_start": True}}, "exclude each other"),
    ):
        with pytest.raises(UsageError, match=words):
            bench.run(guided(bench, "s", **changes), hill)
    assert hill.configs == []
    assert bench.store.find_study("s") is None
    with pytest.raises(UsageError, match="on 2 x simulated; this study runs on 4 x simulated"):
        bench.run(guided(bench, "s", slots_per_trial=4, options={"warm_start": "first"}), Hill(), slots=4)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_kept_batch_starts_from_larger_micro_batches_of_an_earlier_study(bench: StudyBench) -> None:
    bench.run(guided(bench, "first", max_trials=8), Hill())
    assert max(trial.params["train_micro_batch_size_per_gpu"] for trial in bench.study("first").trials) > 4
    result = bench.run(guided(bench, "kept", max_trials=4, train_batch_size=8), Hill())
    assert told(bench)
    assert result is not None
    assert result.train_batch_size == 8


def step_time() -> StepTimeModel:
    return StepTimeModel(
        params=10**9, trainable=10**9, largest_layer=10**7, param_bytes=2, flops_per_sample=6 * 10**12, ranks=8,
        ranks_per_node=8,
    )  # fmt: skip


@pytest.mark.parametrize("same_model", [True, False])
def test_knowledge_is_discounted_and_more_so_of_another_model(same_model: bool) -> None:
    count = len(COEFFICIENTS)
    fitted = LogCoefficients(mean=np.full(count, -1.0), covariance=1e-4 * np.eye(count))
    kept = PriorKnowledge.of(fitted, studies=["a"], same_model=same_model)
    prior = PriorKnowledge.from_json(kept.to_json()).prior(step_time())
    spread = dict(zip(COEFFICIENTS, np.sqrt(np.diag(prior.covariance)), strict=True))
    own = dict(zip(COEFFICIENTS, np.sqrt(np.diag(step_time().prior_coefficients().covariance)), strict=True))
    assert (prior.mean == -1.0).all()
    assert 0.01 < spread["link"] < own["link"]
    assert (spread["idle"] >= own["idle"]) == (not same_model)
    unknown = replace(kept, coefficients=("new", *COEFFICIENTS[1:]))
    assert unknown.prior(step_time()).mean[0] == step_time().prior_coefficients().mean[0]


def test_what_no_launch_could_tell_keeps_the_new_studys_prior() -> None:
    count = len(COEFFICIENTS)
    fitted = LogCoefficients(mean=np.full(count, -1.0), covariance=1e-4 * np.eye(count))
    known = PriorKnowledge.of(fitted, studies=["a"], same_model=True, untold=("network",))
    network, own = COEFFICIENTS.index("network"), step_time().prior_coefficients()
    prior = PriorKnowledge.from_json(known.to_json()).prior(step_time())
    assert prior.mean[network] == own.mean[network]
    assert prior.covariance[network, network] == own.covariance[network, network]
    assert (np.delete(prior.mean, network) == -1.0).all()
