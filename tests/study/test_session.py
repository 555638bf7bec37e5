from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from optuna_dsat.config import ds_config
from optuna_dsat.errors import NothingRunnableError, ScriptFailedError, StudyConflictError, UsageError
from optuna_dsat.launch.protocol import LaunchRequest
from optuna_dsat.outcome import Outcome
from optuna_dsat.study.confirm.rounds import RoundLaunch, Rounds
from optuna_dsat.study.progress import FinalistMeasured, ProfileFinished, ProfileStarted, TrialFinished
from optuna_dsat.study.search.proposals import _reason
from optuna_dsat.study.stored import record_of
from optuna_dsat.trials import attributes
from optuna_dsat.trials.lineage import FIXED_ATTR, PLAN_ATTR, RETRY_ATTR
from tests.harness import present
from tests.harness.landscapes import GIB, Hill
from tests.harness.simulated import SimulatedLauncher, SimulatedResult
from tests.harness.studies import USER_CONFIG, StudyBench


def launches_of(bench: StudyBench) -> Sequence[RoundLaunch]:
    return Rounds.of(bench.study().user_attrs).launches


def ends_above(micro_batch: int, outcome: Outcome, message: str) -> Hill:
    """Return a landscape of a script that ends at any larger micro-batch."""
    end = SimulatedResult(outcome=outcome, startup_s=1, message=message)
    return Hill(override=lambda config: end if config["train_micro_batch_size_per_gpu"] > micro_batch else None)


def ends_at_first(outcome: Outcome, message: str) -> Hill:
    """Return a landscape in which only the first trial, which has the user's own micro-batch, does not run."""
    end = SimulatedResult(outcome=outcome, startup_s=1, message=message)
    return Hill(override=lambda config: end if config["train_micro_batch_size_per_gpu"] == 2 else None)


@pytest.mark.parametrize("method", ["random", "binary", "asha", "guided"])
def test_a_study_beats_the_users_config_and_leaves_what_to_train_with(bench: StudyBench, method: str) -> None:
    spec = bench.spec(method=method, max_trials=12, options={"min_gain": 0.0})
    hill = Hill()
    result = bench.run(spec, hill)
    assert result.speed_up is not None
    assert result.speed_up > 2
    config = json.loads(Path(result.config_path).read_text())
    samples = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * 2
    assert samples == result.train_batch_size
    assert "train_batch_size" not in config, "the user's config leaves it to DeepSpeed"
    assert "autotuning" not in config
    metrics = json.loads(Path(result.metrics_path).read_text())
    assert metrics["value"] == pytest.approx(result.value)
    assert metrics["confidence_interval_95"][0] <= result.value <= metrics["confidence_interval_95"][1]
    assert result.config_path in result.command
    trials = bench.study().get_trials()
    assert hill.configs[1]["train_micro_batch_size_per_gpu"] == 2, "the user's config is measured first"
    assert trials[0].user_attrs[attributes.PURPOSE] == attributes.USER_CONFIG
    assert trials[0].user_attrs[attributes.OVERHEAD_S] > 0, "what a launch takes beside its steps"
    assert 0 in {news.number for news in bench.news if isinstance(news, FinalistMeasured)}, "and in rounds"
    speed_ups = [n.speed_up for n in bench.news if isinstance(n, TrialFinished) and n.value is not None]
    assert speed_ups[0] == pytest.approx(1.0)
    simplifying = sum(attributes.SIMPLIFIES in trial.user_attrs for trial in trials)
    assert sum(result.launches.values()) == 12 + simplifying
    assert json.dumps(result.to_json())


def test_a_users_config_outside_the_space_is_still_the_baseline(bench: StudyBench) -> None:
    config = {**USER_CONFIG, "zero_optimization": {"stage": 0}}
    result = bench.run(bench.spec(ds_config=config, zero_stages=(1, 2), max_trials=3, confirm=0), Hill())
    first = bench.study().trials[0]
    assert first.params == {}
    assert first.state is TrialState.COMPLETE
    assert result.user_value == pytest.approx(first.value, rel=1e-6)


def test_out_of_memory_is_pruned_knowledge_not_a_failure(bench: StudyBench) -> None:
    bench.run(bench.spec(method="binary", max_trials=6, confirm=0, options={"search_range_factor": 3.0}), Hill())
    oom = [t for t in bench.study().trials if t.user_attrs.get(attributes.OUTCOME) == Outcome.OUT_OF_MEMORY]
    assert oom
    assert {t.state for t in oom} == {TrialState.PRUNED}


class OnePiece(Hill):
    """A pipeline's engine shows its steps, and no phase of them."""

    def run(self, ds_config: Mapping[str, Any], slots: int) -> SimulatedResult:
        result = super().run(ds_config, slots)
        return replace(result, forward_s=0.0, backward_s=0.0, step_s=0.0, other_s=result.latency_s)


def test_a_phase_that_the_engine_does_not_show_is_not_optimised(bench: StudyBench) -> None:
    with pytest.raises(UsageError, match=r"--metric forward: .* --metric latency"):
        bench.run(bench.spec(metric="forward", max_trials=4), OnePiece())


def test_concurrent_launches_share_the_slots_and_no_configuration_runs_twice(bench: StudyBench) -> None:
    hill = Hill()
    result = bench.run(bench.spec(max_trials=16, max_concurrent_trials=3, confirm=0), hill, slots=8)
    assert sum(result.launches.values()) == 16
    assert len(hill.configs) == 17, "the profile's is the first"
    assert len({ds_config.canonical_key(config) for config in hill.configs[1:]}) == 16
    assert attributes.launches_used(bench.study().trials) == 16


def test_a_study_goes_on_with_a_raised_budget_and_its_own_profile_and_with_no_other_settings(bench: StudyBench) -> None:
    bench.run(bench.spec(max_trials=2, confirm=0), Hill())
    stored = rf"zero_stages was \[1, 2, 3\], is \[1\].*`optuna-dsat resume s --storage {re.escape(bench.store.url)}`"
    with pytest.raises(StudyConflictError, match=stored):
        bench.run(bench.spec(zero_stages=(1,)), Hill())
    bench.news.clear()
    bench.run(bench.spec(name="t", max_trials=2, confirm=0), Hill())
    assert not [n for n in bench.news if isinstance(n, ProfileStarted)], "a second study of the same script"
    assert [n.reused for n in bench.news if isinstance(n, ProfileFinished)] == [True]
    (bench.folder / "helper.py").write_text("# a comment\n")
    more = Hill()
    bench.run(bench.spec(max_trials=5, confirm=0), more)
    assert len(more.configs) == 3, "exactly the difference, and no profile launch"
    assert any("keeps its profile" in text for text in bench.messages)
    assert record_of(bench.store, "s").spec["max_trials"] == 5


def test_a_script_that_fails_at_once_ends_the_study_which_takes_new_settings_then(bench: StudyBench) -> None:
    broken = SimulatedResult(outcome=Outcome.SCRIPT_ERROR, startup_s=1, message="ValueError: no data")
    hill = Hill(override=lambda _: broken)
    with pytest.raises(ScriptFailedError) as caught:
        bench.run(bench.spec(zero_stages=(1, 2, 3)), hill)
    assert [config[ds_config.MICRO_BATCH] for config in hill.configs] == [1, 2], "the least, then the user's own"
    assert "no data" in caught.value.traceback_tail
    bench.run(bench.spec(zero_stages=(1,), max_trials=3), Hill())
    assert record_of(bench.store, "s").spec["zero_stages"] == [1]


def test_the_profile_is_tried_with_less_and_less_memory_until_it_fits(bench: StudyBench) -> None:
    def needs_stage_3(config: Mapping[str, Any]) -> SimulatedResult | None:
        if config.get("zero_optimization", {}).get("stage", 0) < 3:
            return SimulatedResult(outcome=Outcome.OUT_OF_MEMORY, startup_s=5, missing_bytes=GIB)
        return None

    result = bench.run(bench.spec(max_trials=4, confirm=0), Hill(override=needs_stage_3))
    attempts = [n.words for n in bench.news if isinstance(n, ProfileStarted)]
    assert attempts == ["your own ZeRO settings", "ZeRO 2", "ZeRO 2 + optimizer offload", "ZeRO 3"]
    assert result is not None
    assert result.config["zero_optimization"]["stage"] == 3
    assert result.speed_up is None


def test_when_nothing_fits_the_message_names_what_was_tried_and_missing_memory(bench: StudyBench) -> None:
    full = SimulatedResult(outcome=Outcome.OUT_OF_MEMORY, startup_s=5, missing_bytes=3 * GIB)
    with pytest.raises(NothingRunnableError) as caught:
        bench.run(bench.spec(), Hill(override=lambda _: full))
    message = str(caught.value)
    assert "ZeRO 3 + parameter offload and optimizer offload" in message
    assert "short of 3072 MiB" in message
    assert "--zero-stages" not in message, "all were tried"
    with pytest.raises(NothingRunnableError, match="allow ZeRO 3 with --zero-stages"):
        bench.run(bench.spec(name="fewer", zero_stages=(1, 2)), Hill(override=lambda _: full))


def test_when_no_trial_is_measured_the_message_has_the_commonest_failure(bench: StudyBench) -> None:
    def failing(message: str) -> SimulatedResult:
        return SimulatedResult(outcome=Outcome.SCRIPT_ERROR, startup_s=1, message=message)

    ends = iter([None, *map(failing, ("rank 0: KeyError: 'x'", "rank 0: ValueError: no", "rank 1: ValueError: no"))])
    with pytest.raises(NothingRunnableError) as caught:
        bench.run(bench.spec(max_trials=3), Hill(override=lambda _: next(ends)))
    assert "(3 script errors). The search ended: --max-trials is reached. The commonest failure: ValueError: no." in (
        str(caught.value)
    )


@pytest.mark.parametrize("key", ["optimizer.type", "DeepSpeedConfigError in initialize: 'old'", "no.key"])
def test_a_traceback_is_shown_only_where_the_message_names_no_key_of_the_config(bench: StudyBench, key: str) -> None:
    rejected = SimulatedResult(outcome=Outcome.INVALID_CONFIG, startup_s=1, message=f"{key} is 'Adamm'")
    config = {**bench.spec().ds_config, "optimizer": {"type": "Adamm"}}
    with pytest.raises(ScriptFailedError, match=f"invalid config: {key} is 'Adamm'") as caught:
        bench.run(bench.spec(ds_config=config), Hill(override=lambda _: rejected))
    assert bool(caught.value.traceback_tail) == (key == "no.key")


def test_the_same_script_error_again_and_again_ends_the_study(bench: StudyBench) -> None:
    hill = ends_above(1, Outcome.SCRIPT_ERROR, "ValueError: batch")
    with pytest.raises(ScriptFailedError, match="Launch after launch"):
        bench.run(bench.spec(max_trials=30), hill)
    assert len(hill.configs) < 10


def test_script_errors_after_a_measured_trial_do_not_lose_the_result(bench: StudyBench) -> None:
    hill = ends_above(2, Outcome.SCRIPT_ERROR, "ended early")
    result = bench.run(bench.spec(max_trials=6, confirm=0), hill)
    assert result.config["train_micro_batch_size_per_gpu"] == 2


def test_out_of_data_bounds_the_micro_batch_of_every_lineage(bench: StudyBench) -> None:
    hill = ends_above(10, Outcome.OUT_OF_DATA, "the script ended by itself")
    result = bench.run(bench.spec(max_trials=10, method="binary", confirm=0), hill)
    assert result.config["train_micro_batch_size_per_gpu"] <= 10
    smallest = 10**9
    for trial in (t for t in bench.study().trials if attributes.OUTCOME in t.user_attrs):
        micro_batch = trial.params["train_micro_batch_size_per_gpu"]
        assert micro_batch < smallest
        if trial.user_attrs[attributes.OUTCOME] == Outcome.OUT_OF_DATA:
            assert trial.state is TrialState.PRUNED
            smallest = micro_batch
    assert smallest < 10**9


def test_a_users_config_that_runs_out_of_data_ends_the_study_with_the_remedy(bench: StudyBench) -> None:
    hill = ends_above(1, Outcome.OUT_OF_DATA, "the script ended after 4 steps")
    with pytest.raises(ScriptFailedError, match=r"your config.*ended after 4 steps.*--end-profile-step"):
        bench.run(bench.spec(), hill)
    assert len(hill.configs) == 2


def test_the_profile_tries_zero_1_where_no_higher_stage_is_searched(bench: StudyBench) -> None:
    def needs_offload(config: Mapping[str, Any]) -> SimulatedResult | None:
        zero = config["zero_optimization"]
        if zero.get("offload_optimizer") and zero["reduce_bucket_size"] < 5e8:
            return None
        return SimulatedResult(outcome=Outcome.OUT_OF_MEMORY, startup_s=1, missing_bytes=2**30)

    hill = Hill(override=needs_offload)
    with pytest.raises(NothingRunnableError, match="ended: --max-trials"):  # the only trial does not fit
        bench.run(bench.spec(zero_stages=(0, 1), max_trials=1, confirm=0), hill)
    tried = [config["zero_optimization"] for config in hill.configs[:3]]
    assert [(zero["stage"], "offload_optimizer" in zero) for zero in tried] == [(2, False), (1, False), (1, True)]


@pytest.mark.parametrize(
    ("outcome", "retries", "attempts"), [(Outcome.COMMUNICATION_ERROR, 2, 3), (Outcome.KILLED, 1, 4)]
)
def test_a_launch_that_fails_by_chance_is_repeated_and_then_given_up(
    bench: StudyBench, outcome: Outcome, retries: int, attempts: int
) -> None:
    bench.run(bench.spec(max_trials=2, max_retries=retries, confirm=0), ends_at_first(outcome, "connection reset"))
    first = bench.study().trials[0]
    assert first.state is TrialState.FAIL
    assert first.user_attrs[attributes.ATTEMPTS] == attempts
    launches = [row for row in bench.store.launches(record_of(bench.store, "s").uuid) if row.trial_number == 0]
    assert [row.attempt for row in launches] == list(range(attempts))


def test_a_launch_that_others_kill_is_launched_again_whatever_it_is_for(bench: StudyBench) -> None:
    killed = SimulatedResult(outcome=Outcome.KILLED, startup_s=1, message="killed by SIGKILL from outside")
    profile, first_trial, first_round = {0, 1}, {3, 4, 5}, {9, 10}

    class Disturbed(Hill):
        def run(self, ds_config: Mapping[str, Any], slots: int) -> SimulatedResult:
            result = super().run(ds_config, slots)
            return killed if len(self.configs) - 1 in profile | first_trial | first_round else result

    bench.run(bench.spec(max_retries=0, max_trials=3, confirm=1), Disturbed())
    trials = bench.study().trials
    assert trials[0].user_attrs[attributes.ATTEMPTS] == 4
    assert all(trial.state is TrialState.COMPLETE for trial in trials)
    rounds = Rounds.of(bench.study().user_attrs)
    assert rounds.launches
    assert all(launch.value is not None for launch in rounds.launches), "rounds repeat them, too"
    assert bench.messages.count("Launched again: killed by SIGKILL from outside.") == 4


def test_early_stopping_ends_the_search_and_says_so(bench: StudyBench) -> None:
    result = bench.run(bench.spec(max_trials=60, options={"early_stopping": 2}, confirm=0), Hill())
    assert "early-stopping" in result.reason
    assert sum(result.launches.values()) < 60


def test_a_small_space_is_exhausted_and_says_so(bench: StudyBench) -> None:
    fix = dict.fromkeys(("overlap_comm", "contiguous_gradients", "reduce_scatter"), False)
    spec = bench.spec(
        zero_stages=(1,), fix={**fix, "reduce_bucket_size": 5e8, "offload_optimizer": "none"}, max_trials=60,
        method="binary", confirm=0,
    )  # fmt: skip
    result = bench.run(spec, Hill())
    assert "expected to gain enough" in result.reason
    assert sum(result.launches.values()) < 20


def test_the_users_config_is_launched_where_no_other_structure_is_searched(bench: StudyBench) -> None:
    """The enqueued trial counted as the last open configuration, and the search ended before it."""
    config = {key: value for key, value in USER_CONFIG.items() if key != "zero_optimization"}
    spec = bench.spec(method="guided", max_trials=1, confirm=0, zero_stages=(0,), ds_config=config)
    result = bench.run(spec, Hill())
    assert sum(result.launches.values()) == 1


def test_a_metric_to_minimise_picks_the_smallest(bench: StudyBench) -> None:
    result = bench.run(bench.spec(metric="latency", max_trials=5, confirm=0), Hill())
    values = [t.value for t in bench.study().trials if t.state is TrialState.COMPLETE]
    assert result.value == pytest.approx(min(v for v in values if v is not None), rel=1e-6)


@pytest.mark.parametrize("method", ["binary", "guided"])
def test_only_the_micro_batches_that_the_user_lists_are_run(bench: StudyBench, method: str) -> None:
    listed = [4, 8, 24, 100]
    config = {**USER_CONFIG, "train_micro_batch_size_per_gpu": listed}
    hill = Hill()
    result = bench.run(bench.spec(method=method, ds_config=config, max_trials=12, confirm=0), hill)
    assert result.config["train_micro_batch_size_per_gpu"] == 24
    run = {config["train_micro_batch_size_per_gpu"] for config in hill.configs[1:]}
    assert run <= set(listed)
    assert len(run) > 1


@pytest.mark.parametrize("method", ["asha", "guided"])
def test_a_global_batch_that_is_kept_is_made_up_by_accumulation(bench: StudyBench, method: str) -> None:
    hill = Hill()
    result = bench.run(bench.spec(method=method, train_batch_size=96, max_trials=12, confirm=1), hill)
    batches = [(c["train_micro_batch_size_per_gpu"], c["gradient_accumulation_steps"]) for c in bench.configs]
    assert {micro_batch * accumulation * 2 for micro_batch, accumulation in batches} == {96}
    assert batches[0] == (2, 24), "the user's config at that batch"
    assert present(result.verdict.at_user_batch).train_batch_size == 96
    assert (24, 2) in batches  # the largest divisor of 48 that fits
    assert result.train_batch_size == 96
    assert result.learning_rate_advice is not None  # the user's own global batch is 4
    assert "from 4 to 96" in result.learning_rate_advice


def test_the_largest_global_batch_of_the_autotuning_section_bounds_the_micro_batch(bench: StudyBench) -> None:
    config = {**USER_CONFIG, "gradient_accumulation_steps": 4, "autotuning": {"max_train_batch_size": 40}}
    bench.run(bench.spec(ds_config=config, max_trials=8, confirm=0), Hill())
    totals = [c["train_micro_batch_size_per_gpu"] * c["gradient_accumulation_steps"] * 2 for c in bench.configs]
    assert max(totals) <= 40
    assert max(c["train_micro_batch_size_per_gpu"] for c in bench.configs) > 5


@pytest.mark.parametrize(
    ("noise", "fewest", "most"),
    [(0.0, 3, 3), (0.3, 5, 15)],
)
def test_finalists_end_when_their_step_time_is_known(bench: StudyBench, noise: float, fewest: int, most: int) -> None:
    bench.run(bench.spec(max_trials=3, confirm=1), Hill(), noise=noise)
    steps = [launch.steps for launch in launches_of(bench) if launch.round <= 2]
    assert steps
    assert all(fewest <= count <= most for count in steps), steps


def test_finalists_end_earlier_where_launches_are_seen_to_differ_by_more_than_their_steps(bench: StudyBench) -> None:
    bench.run(bench.spec(max_trials=5, confirm=3, end_profile_step=20), Hill(), noise=0.1)
    launches = launches_of(bench)
    assert min(launch.steps for launch in launches if launch.round == 1) == 18
    best = max(launches, key=lambda launch: launch.value or 0.0).number
    assert max(launch.steps for launch in launches if launch.number == best and launch.round > 2) < 10


def test_a_trial_ends_when_its_step_time_is_known(bench: StudyBench) -> None:
    bench.run(bench.spec(max_trials=4, confirm=0, end_profile_step=12), Hill())
    measured = [t for t in bench.study().trials if t.user_attrs.get(attributes.OUTCOME) == Outcome.MEASURED]
    last_steps = {t.number: max(t.intermediate_values) for t in measured}
    assert last_steps.pop(0) == 12, "what everything is compared with is measured to its end"
    assert set(last_steps.values()) == {5}
    assert all(t.state is TrialState.COMPLETE for t in measured)


def test_a_finalist_that_fails_with_more_steps_gives_its_place_to_the_next_best(bench: StudyBench) -> None:
    class RunsOut(SimulatedLauncher):
        """The first finalist runs out of memory in its first round."""

        def start(self, request: LaunchRequest) -> None:
            if request.purpose == "confirm" and request.ds_config["train_micro_batch_size_per_gpu"] > 2 and not doomed:
                doomed.append(request.launch_id)
                request = replace(request, ds_config={**request.ds_config, "train_micro_batch_size_per_gpu": 1000})
            super().start(request)

    doomed: list[str] = []
    result = bench.run_by(RunsOut(Hill(), total_slots=2), bench.spec(max_trials=8, confirm=1))
    own = attributes.user_config_trial(bench.study().trials)
    assert own is not None
    launches = [item for item in launches_of(bench) if item.number != own.number]
    assert launches[0].outcome == Outcome.OUT_OF_MEMORY
    substitutes = {launch.number for launch in launches[1:]}
    assert len(substitutes) == 1, "as many places as there were finalists"
    assert [launch.round for launch in launches[1:]][:3] == [1, 2, 3], "it takes its place in the same round"
    assert result.trial in substitutes


@pytest.mark.parametrize(("startup_s", "step_s", "steps"), [(5000, 0.2, 15), (5000, 9.0, 5), (1, 9.0, 3)])
def test_a_finalist_of_long_steps_counts_fewer_of_them(
    bench: StudyBench, startup_s: float, step_s: float, steps: int
) -> None:
    """Three seconds and five steps are enough, or less after a short start; the time of steps is never certain."""

    def steady(_: Mapping[str, Any]) -> SimulatedResult:
        return SimulatedResult(startup_s=startup_s, forward_s=step_s, backward_s=0.0, step_s=0.0, peak_bytes=2**30)

    bench.run(bench.spec(max_trials=2, confirm=1), Hill(override=steady), noise=0.1)
    counted = [launch.steps for launch in launches_of(bench)]
    assert counted
    assert all(abs(count - steps) <= 2 for count in counted), counted


PLAN = {PLAN_ATTR: {"reason": "larger micro-batch"}}
FIXED: dict[str, Any] = {FIXED_ATTR: {}}


@pytest.mark.parametrize(
    ("system", "user", "reason"),
    [
        (PLAN, {}, "larger micro-batch"),
        ({**PLAN, **FIXED, RETRY_ATTR: 3}, {}, "larger micro-batch"),
        (FIXED, {}, "enqueued"),
        (FIXED, {attributes.PURPOSE: attributes.USER_CONFIG}, "your config"),
        (FIXED, {attributes.SIMPLIFIES: 4}, "trial 4 without settings that may have no effect"),
        ({}, {}, ""),
    ],
)
def test_a_trial_has_the_reason_of_its_plan_also_when_it_is_tried_again(
    system: dict[str, Any], user: dict[str, Any], reason: str
) -> None:
    trial = optuna.trial.create_trial(value=1.0, system_attrs=system, user_attrs=user)
    assert _reason(trial) == reason
