"""The verdict on stored trials and rounds: what is handed over, and what is said beside it."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import FrozenTrial

from optuna_dsat.guided.joint_estimate import JointEstimate
from optuna_dsat.launch.protocol import Conditions
from optuna_dsat.outcome import Outcome
from optuna_dsat.study.confirm.confirmation import next_in_rounds, staying
from optuna_dsat.study.confirm.finalists import choose_finalists
from optuna_dsat.study.confirm.rounds import RoundLaunch, Rounds, order_of_round
from optuna_dsat.study.confirm.verdict import Verdict, VerdictKind, verdict_of
from optuna_dsat.study.confirm.words import verdict_in_words
from optuna_dsat.study.spec import StudySpec
from optuna_dsat.trials import attributes
from tests.harness import present
from tests.harness.studies import spec_of

OWN = 0
"""Number of the trial of the user's own config, at a micro-batch of 2 on 2 ranks."""


def trial(number: int, value: float, *, micro_batch: int = 2, **zero: Any) -> FrozenTrial:
    config = {"train_micro_batch_size_per_gpu": micro_batch, "zero_optimization": {"stage": 2, **zero}}
    attrs: dict[str, Any] = {attributes.CONFIG: config, attributes.OVERLAY: {}}
    if number == OWN:
        attrs[attributes.PURPOSE] = attributes.USER_CONFIG
    result = optuna.trial.create_trial(value=value, user_attrs=attrs)
    result.number = number
    return result


def launch(number: int, round_number: int, value: float | None, **changes: Any) -> RoundLaunch:
    outcome = Outcome.MEASURED if value is not None else Outcome.OUT_OF_MEMORY
    return RoundLaunch(**{
        "round": round_number, "number": number, "value": value, "low": value, "high": value, "metrics": {},
        "steps": 10, "outcome": outcome.value, "message": "", "held_s": 10.0, **changes,
    })  # fmt: skip


def rounds_of(values: Mapping[int, Sequence[float]], **changes: Any) -> Rounds:
    """Return rounds in which trials measured these values, in the order of the rounds."""
    launches = [
        launch(number, index + 1, own[index])
        for index in range(max(map(len, values.values())))
        for number, own in values.items()
        if index < len(own)
    ]
    return Rounds(chosen=tuple(values), measured=len(values), launches=tuple(launches), **changes)


def searched(found: Mapping[int, tuple[float, float]]) -> JointEstimate:
    """Return what a search says of trials: their metric and its relative standard deviation, each by itself."""
    return JointEstimate(
        numbers=tuple(found),
        means=tuple(math.log(value) for value, _ in found.values()),
        covariance=tuple(tuple(sd**2 * (row == number) for row in found) for number, (_, sd) in found.items()),
    )


def judged(trials: Sequence[FrozenTrial], rounds: Rounds, *, tie: float = 0.01, maximize: bool = True) -> Verdict:
    result = present(verdict_of(trials, rounds, spec(tie=tie, metric="throughput" if maximize else "latency")))
    assert json.dumps(result.to_json())
    return result


def spec(**changes: Any) -> StudySpec:
    return spec_of(Path("/"), **{"method": "guided", "ds_config": {}, **changes})


TRIALS = (trial(OWN, 10.0), trial(1, 16.0, micro_batch=8), trial(2, 15.9, micro_batch=4))


def test_what_is_surely_faster_is_handed_over_with_its_paired_ratio() -> None:
    result = judged(TRIALS[:2], rounds_of({OWN: [10.0, 8.0, 9.0], 1: [15.0, 12.1, 13.4]}))
    assert (result.kind, result.result.number, result.best.number) == (VerdictKind.WINNER, 1, 1)
    assert result.speed_up is not None
    assert result.speed_up.value == pytest.approx(result.result.value / present(result.baseline).value)
    assert 1.45 < present(result.speed_up.low) < 1.5 < (result.speed_up.high or 0.0) < 1.55


@pytest.mark.parametrize(
    ("sizes", "is_sure"),
    [
        ({OWN: [None] * 3, 1: [None] * 3}, True),
        ({OWN: [40.0] * 3, 1: [40.0] * 3}, True),
        ({OWN: [40.0] * 3, 1: [50.0] * 3}, False),
        ({OWN: [40.0, 41.0, 39.0], 1: [50.0, 49.0, 52.0]}, True),
    ],
    ids=["inputs do not vary", "the same data", "other data, the same in each round", "other data in each round"],
)
def test_data_that_rounds_repeat_are_part_of_the_interval(
    sizes: Mapping[int, Sequence[float | None]], *, is_sure: bool
) -> None:
    """It was: 1.23x (1.20 to 1.26) by the short texts that each round began with, 1.15x over the whole data."""
    launches = [
        launch(number, index + 1, value, low=value / 1.2, high=value * 1.2, sample_size=sizes[number][index])
        for number, value in ((OWN, 10.0), (1, 12.3))
        for index in range(3)
    ]
    rounds = Rounds(chosen=(OWN, 1), measured=2, launches=tuple(launches))
    result = judged(TRIALS[:2], rounds)
    assert (result.kind is VerdictKind.WINNER) is is_sure
    ratio, measured = present(result.best.speed_up), present(result.baseline)
    is_repeated = len({*sizes[OWN]}) == 1 and sizes[OWN][0] is not None
    assert ratio.half_width == pytest.approx(0.0 if is_sure else math.hypot(math.log(1.2), math.log(1.2)))
    assert measured.interval.half_width == pytest.approx(math.log(1.2) if is_repeated else 0.0)
    # Further rounds would have the same data.
    assert next_in_rounds(rounds, TRIALS[:2], spec=spec(confirm_time=1e6), allowed_s=1e6) is None


def test_a_best_that_is_not_surely_faster_is_not_handed_over() -> None:
    """It was: 'the best is 0.970 times as good' with the config of that best written out."""
    result = judged(TRIALS[:2], rounds_of({OWN: [10.0, 10.0, 10.0], 1: [9.7, 9.71, 9.69]}))
    assert (result.kind, result.result.number, result.best.number) == (VerdictKind.BASELINE_IS_BEST, OWN, OWN)
    assert present(result.speed_up).value == 1.0
    text = verdict_in_words(result, metric="throughput")[0]
    assert text.startswith(
        "Nothing was confirmed to be faster than your config: 10 samples/s. The best other, trial 1 with a "
    )
    alone = verdict_in_words(judged(TRIALS[:1], rounds_of({OWN: [10.0, 10.0]})), metric="throughput")[0]
    assert alone == "Your config is all that was measured: 10 samples/s."


def test_where_the_best_is_not_sure_one_that_surely_is_better_is_handed_over() -> None:
    """It was the user's own config, though two finalists were surely faster."""
    values = {OWN: [10.0, 10.0, 10.0], 1: [28.0, 11.0, 26.0], 2: [14.0, 14.2, 13.9]}
    result = judged(TRIALS, rounds_of(values))
    assert (result.kind, result.result.number, result.best.number) == (VerdictKind.WINNER, 2, 1)
    assert not present(result.best.speed_up).surely_above_1
    assert present(result.speed_up).surely_above_1
    assert result.ties == (), "trial 1 was not a candidate"
    assert [item.number for item in result.undecided] == [1]
    words = " ".join(verdict_in_words(result, metric="throughput"))
    assert "Undecided by the rounds: trial 1 (not significantly faster than your config)." in words


def test_without_a_confirmation_the_best_measurement_is_the_result_be_it_the_users_own() -> None:
    result = judged((trial(OWN, 6.101), trial(1, 5.892)), Rounds())
    assert (result.kind, result.result.number, result.best.number) == (VerdictKind.UNCONFIRMED, OWN, OWN)
    assert result.result.value == present(result.baseline).value == 6.101
    without = verdict_in_words(judged((trial(2, 6.101), trial(1, 7.0)), Rounds()), metric="throughput")[0]
    assert without.endswith("not confirmed. Your config was not measured.")
    better = judged((trial(OWN, 6.101), trial(1, 7.0)), Rounds())
    assert (better.result.number, better.result.interval.low) == (1, None)
    assert better.speed_up is not None
    assert better.speed_up.value == pytest.approx(7 / 6.101)
    assert better.speed_up.rounds == 0


def test_a_config_that_failed_in_the_rounds_is_not_the_result_of_the_search() -> None:
    """The time of the rounds was over after the launch that failed, and its config was the result."""
    rounds = Rounds(chosen=(2, 1, OWN), measured=3, launches=(launch(1, 1, None),))
    result = judged((trial(OWN, 10.0), trial(1, 16.0), trial(2, 15.9)), rounds)
    assert (result.kind, result.result.number) == (VerdictKind.UNCONFIRMED, 2)
    assert present(result.at_user_batch).number == 2


def test_where_the_time_ended_before_it_was_known_the_users_config_is_the_result() -> None:
    result = judged(TRIALS[:2], rounds_of({OWN: [10.0, 9.0, 11.0], 1: [12.0, 8.9, 11.4]}))
    assert (result.kind, result.result.number, result.best.number) == (VerdictKind.NOT_CONFIRMED, OWN, 1)
    assert result.best.speed_up is not None
    assert "--confirm-time" in verdict_in_words(result, metric="throughput")[0]


@pytest.mark.parametrize("ahead", [OWN, 1])
@pytest.mark.parametrize("whole", [1, 2, 3])
def test_a_round_that_was_begun_does_not_change_what_the_rounds_before_it_say(whole: int, ahead: int) -> None:
    values = {OWN: [10.0] * whole, 1: [16.0] * whole, 2: [12.0] * whole}
    before = judged(TRIALS, rounds_of(values))
    begun = judged(TRIALS, rounds_of({**values, ahead: [*values[ahead], values[ahead][0]]}))
    assert begun.result.number == before.result.number == 1
    assert begun.kind is before.kind is (VerdictKind.UNCONFIRMED if whole == 1 else VerdictKind.WINNER)


def test_what_took_the_place_of_a_failed_finalist_is_not_handed_over_after_one_round() -> None:
    failed = rounds_of({OWN: [10.0, 10.1, 9.9]}).with_launch(launch(1, 1, None)).with_launch(launch(2, 3, 15.0))
    assert judged(TRIALS, failed).result.number == OWN


def test_without_the_users_config_the_best_of_the_rounds_is_the_result() -> None:
    result = judged(TRIALS[1:], rounds_of({1: [16.0, 16.1, 15.9], 2: [12.0, 12.1, 11.9]}))
    assert (result.kind, result.result.number, result.speed_up) == (VerdictKind.NO_BASELINE, 1, None)
    failed = rounds_of({1: [16.0, 16.1, 15.9]}).with_launch(launch(OWN, 1, None))
    result = judged(TRIALS, failed)
    assert result.kind is VerdictKind.NO_BASELINE
    assert present(result.speed_up).rounds == 0


@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_a_config_is_not_called_slower_than_a_user_config_that_failed_in_the_rounds(rounds: int) -> None:
    trials = (trial(OWN, 10.0), trial(1, 6.35), trial(2, 15.0, micro_batch=8))
    known = rounds_of({1: [6.35] * rounds, 2: [15.0] * rounds}) if rounds else Rounds(chosen=(2, OWN), measured=2)
    failed = known.with_launch(launch(OWN, 1, None))
    again = "Your config could not be measured again; compared with its 10 samples/s in the search this is"
    both = verdict_in_words(judged(trials, failed), metric="throughput")
    assert both[0].startswith("At your global batch of 4 samples: trial 1 is the fastest that did not fail: 6.35 ")
    assert both[0].endswith(f"{again} 0.635x as fast.")
    assert both[1].endswith(f"{again} 1.50x as fast.")
    alone = verdict_in_words(judged(trials[:2], failed), metric="throughput")[0]
    assert alone.endswith(f"{again} 0.635x as fast.")
    assert ("trial 1 was the fastest in the search: 6.35" in alone) == (rounds < 2)
    all_failed = verdict_in_words(judged(trials[:1], failed), metric="throughput")[0]
    assert all_failed == "Your config is all that was measured: 10 samples/s."


def test_of_equals_the_smallest_global_batch_wins_and_the_tie_is_named() -> None:
    """It was: a global batch of 224 as '2.00 times as good', where 32 ran as fast."""
    trials = (trial(OWN, 73.0), trial(1, 147.0, micro_batch=112), trial(2, 145.0, micro_batch=16))
    values = {OWN: [73.0, 73.5, 73.2], 1: [147.0, 147.4, 146.9], 2: [146.0, 146.2, 146.1]}
    result = judged(trials, rounds_of(values))
    assert (result.kind, result.result.number, result.best.number, result.ties) == (VerdictKind.WINNER, 2, 1, (1,))
    assert "trial 1" in " ".join(verdict_in_words(result, metric="throughput"))
    assert judged(trials, rounds_of(values), tie=0.001).result.number == 1


def test_of_equals_at_one_batch_the_nearest_to_the_users_config_wins() -> None:
    far = trial(1, 15.0, micro_batch=4, overlap_comm=True, reduce_bucket_size=5e7)
    near = trial(2, 15.0, micro_batch=4)
    result = judged((TRIALS[0], far, near), rounds_of({OWN: [10.0] * 3, 1: [15.01] * 3, 2: [15.0] * 3}))
    assert result.result.number == 2
    assert {contender.number: contender.differing for contender in result.contenders} == {OWN: 0, 1: 3, 2: 1}


def test_a_gain_within_the_tie_is_not_worth_another_config() -> None:
    result = judged(TRIALS[:2], rounds_of({OWN: [10.0] * 3, 1: [10.05, 10.051, 10.049]}))
    assert (result.kind, result.result.number, result.ties) == (VerdictKind.BASELINE_IS_BEST, OWN, (1,))


@pytest.mark.parametrize(("searched_sd", "handed_over"), [(0.005, 1), (0.2, 2)])
def test_what_the_search_knows_counts_where_rounds_are_noisy(searched_sd: float, handed_over: int) -> None:
    values = {OWN: [10.0, 10.3, 9.8], 1: [19.6, 20.6, 19.5], 2: [20.3, 20.0, 20.2]}
    estimate = searched({OWN: (10.0, searched_sd), 1: (20.8, searched_sd), 2: (20.0, searched_sd)})
    result = judged(TRIALS, rounds_of(values, estimate=estimate), tie=0.001)
    assert (result.result.number, result.best.number) == (handed_over, handed_over)
    assert result.speed_up == judged(TRIALS, rounds_of(values)).measured[handed_over].speed_up, "by rounds alone"


@pytest.mark.parametrize(("second", "handed_over"), [(19.9, 2), (19.7, 1)])
def test_a_smaller_batch_is_worth_a_tie_however_noisy_the_rounds(second: float, handed_over: int) -> None:
    """What is expected to be 1.5% slower was handed over, as rounds did not tell it from the best."""
    values = {OWN: [10.0, 10.3, 9.8], 1: [20.0, 20.8, 19.4], 2: [20.6, 19.4, 20.2]}
    estimate = searched({OWN: (10.0, 0.001), 1: (20.0, 0.001), 2: (second, 0.001)})
    trials = (trial(OWN, 10.0), trial(1, 20.0, micro_batch=64), trial(2, second, micro_batch=16))
    assert judged(trials, rounds_of(values, estimate=estimate)).result.number == handed_over


@pytest.mark.parametrize(("second", "handed_over"), [(19.96, 2), (19.9, 1)])
def test_settings_nearer_to_the_users_own_are_worth_a_quarter_of_a_tie(second: float, handed_over: int) -> None:
    values = {OWN: [10.0, 10.1, 9.9], 1: [20.0, 20.1, 19.9], 2: [20.1, 20.0, 19.9]}
    estimate = searched({OWN: (10.0, 0.001), 1: (20.0, 0.001), 2: (second, 0.001)})
    trials = (trial(OWN, 10.0), trial(1, 20.0, micro_batch=16, overlap_comm=True), trial(2, second, micro_batch=16))
    assert judged(trials, rounds_of(values, estimate=estimate)).result.number == handed_over


def test_what_the_rounds_do_not_distinguish_from_the_result_is_reported_with_the_reason_why_it_is_not_equal() -> None:
    """It was 'not told from the result: trial 2' at a smaller batch, beside the rule that the smallest batch wins."""
    trials = [trial(OWN, 100), trial(1, 150, micro_batch=64), trial(2, 150, micro_batch=4)]
    rounds = rounds_of({OWN: [100, 103, 99], 1: [150, 151, 152], 2: [141, 146, 149]})
    result = judged(trials, rounds)
    assert (result.result.number, result.ties) == (1, ()), "the mean of the smaller batch is 4% lower"
    [other] = result.undecided
    assert (other.number, other.train_batch_size, other.best) == (2, 8, 1)
    assert other.below == pytest.approx(1 - (141 * 146 * 149 / (150 * 151 * 152)) ** (1 / 3))
    assert other.allowed == pytest.approx(present(result.noise).relative_sd * math.sqrt(2 / 3))
    assert 0.01 < other.allowed < other.below
    [line] = [line for line in verdict_in_words(result, metric="throughput") if "Undecided" in line]
    assert f"trial 2 ({other.below:.1%} below trial 1; up to {other.allowed:.1%} counts as equal)" in line
    assert "Equal to the result" not in line
    assert "ties" not in line


@pytest.mark.parametrize("seed", range(8))
def test_the_result_has_the_smallest_batch_of_all_that_is_reported_as_equal(seed: int) -> None:
    rng = random.Random(seed)
    trials = [trial(n, 15.0, micro_batch=2 ** (n + 1)) for n in range(6)]
    values = {n: [10.0 * (1 + (n > 0) * rng.uniform(0.3, 0.4)) * math.exp(rng.gauss(0, 0.03)) for _ in range(4)]
              for n in range(6)}  # fmt: skip
    result = judged(trials, rounds_of(values))
    batches = {contender.number: contender.train_batch_size for contender in result.contenders}
    assert all(batches[result.result.number] < batches[number] for number in result.ties)
    assert not set(result.ties) & {item.number for item in result.undecided}
    for other in result.undecided:
        ratio = present(result.measured[other.number].speed_up)
        assert other.below > other.allowed or not ratio.surely_above_1


def test_a_tie_by_search_and_rounds_is_not_told_as_if_the_rounds_had_none_ahead() -> None:
    """It was: 'Your config is the best found. The best other is 1.35 times (95% between 1.12 and 1.64) as good.'"""
    trials = [trial(OWN, 115, micro_batch=2), trial(1, 114, micro_batch=64), trial(2, 114, micro_batch=4)]
    estimate = searched({OWN: (115.0, 0.001), 1: (113.85, 0.001), 2: (113.85, 0.001)})
    values = {OWN: [100.0, 101.0, 99.0, 100.0], 1: [101.5, 102.8, 100.3, 101.6], 2: [99.0, 102.0, 98.0, 101.0]}
    rounds = rounds_of(values, estimate=estimate)
    result = judged(trials, rounds)
    assert (result.result.number, result.kind) == (OWN, VerdictKind.BASELINE_IS_BEST)
    words = verdict_in_words(result, metric="throughput")[0]
    assert "Nothing was confirmed" not in words
    assert "By the rounds alone trial 1 is 1." in words
    assert words.endswith("; search and rounds together do not confirm it.")


def test_a_search_that_the_rounds_contradict_loses_its_certainty() -> None:
    """A slow minute of the search ruled out what four rounds measured to be 1.30 times as fast."""
    trials = [trial(OWN, 115, micro_batch=2), trial(1, 112, micro_batch=64)]
    estimate = searched({OWN: (115.0, 0.005), 1: (112.0, 0.005)})
    rounds = rounds_of({OWN: [80, 95, 70, 78], 1: [105, 120, 96, 99]}, estimate=estimate)
    result = judged(trials, rounds)
    assert (result.result.number, result.kind) == (1, VerdictKind.WINNER)


def test_two_speed_ups_compare_the_same_batch_and_the_winners() -> None:
    trials = (*TRIALS[:2], trial(2, 12.0, overlap_comm=True))
    values = {OWN: [10.0, 10.1, 9.9], 1: [20.0, 20.3, 19.9], 2: [12.0, 12.1, 11.9]}
    result = judged(trials, rounds_of(values))
    assert result.at_user_batch is not None
    assert (result.at_user_batch.number, result.at_user_batch.train_batch_size) == (2, 4)
    assert present(result.at_user_batch.speed_up).value == pytest.approx(1.2, rel=0.01)
    assert (result.result.number, result.result.train_batch_size) == (1, 16)
    first, second, *_ = verdict_in_words(result, metric="throughput")
    assert first.startswith("At your global batch of 4 samples: trial 2 is 1.20x as fast as your config (95% CI ")
    assert second.startswith("At a global batch of 16 samples: trial 1 is 2.01x as fast as your config (95% CI ")


def test_noise_comes_from_the_rounds_and_a_machine_that_became_busy_is_told() -> None:
    """It was: '1.56 times as good', where the user's config measured 11.47 in the search and 4.17 after it."""
    trials = (trial(OWN, 11.47), trial(1, 11.8, micro_batch=4))
    calm = rounds_of({OWN: [11.5, 11.4, 11.45], 1: [12.0, 11.8, 11.95]})
    busy = rounds_of({OWN: [11.5, 4.17, 4.2], 1: [17.0, 6.3, 6.4]})
    assert judged(trials, calm).warnings == ()
    result = judged(trials, busy)
    assert present(result.speed_up).surely_above_1, "what slows a whole round does not blur the pairs"
    drift, since = result.warnings[:2]
    assert drift.startswith("The machine changed while it was measured: in round 1 your config was 96% above")
    assert since.startswith("Your config measured 49% below its value in the search over 3 rounds")
    assert f"the noise of the rounds is {present(result.noise).relative_sd:.1%}" in drift


def test_the_noise_is_told_with_its_origin() -> None:
    result = judged(TRIALS[:2], rounds_of({OWN: [11.8, 11.9, 11.7], 1: [16.0, 16.4, 16.1]}))
    [line] = [word for word in verdict_in_words(result, metric="throughput") if word.startswith("Noise")]
    assert line == (
        f"Noise of the rounds: {present(result.noise).relative_sd:.1%}, the standard deviation of 6 launches within "
        "their rounds."
    )


def test_steady_noise_raises_no_warning() -> None:
    rng = random.Random(7)
    warned = 0
    for _ in range(100):
        values = {n: [10.0 * (1 + n) * math.exp(rng.gauss(0, 0.01)) for _ in range(6)] for n in range(3)}
        trials = [trial(n, 10.0 * (1 + n)) for n in range(3)]
        warned += bool(judged(trials, rounds_of(values)).warnings)
    assert warned <= 5


def test_other_work_on_the_machine_is_told_with_figures() -> None:
    rounds = rounds_of({OWN: [10.0] * 3, 1: [12.0] * 3})
    beside = [
        Conditions(window_s=10.0, others_cpu_s=8.0, cores=2),
        Conditions(window_s=10.0, others_cpu_s=0.2, cores=2),
        Conditions(gpu_processes=("process 7 (python, user anna)",), throttle_reasons=("power cap",)),
    ]
    launches = [launch(OWN, 4 + index, 10.0, conditions=item) for index, item in enumerate(beside)]
    words = judged(TRIALS[:2], Rounds(chosen=(OWN, 1), launches=(*rounds.launches, *launches))).warnings
    assert words == (
        "Trial 1 measured 25% below its value in the search over 3 rounds: only the rounds count.",
        "Other processes took up to 40% of the time of 2 cores during 1 of 9 launches of the confirmation.",
        "Others used the GPUs during 1 of 9 launches: process 7 (python, user anna).",
        "The GPUs' clocks were held down during 1 of 9 launches: power cap.",
    )


def test_what_fails_with_more_steps_is_not_handed_over() -> None:
    rounds = rounds_of({OWN: [10.0] * 3, 1: [16.0] * 2, 2: [15.0] * 3}).with_launch(launch(1, 3, None))
    result = judged(TRIALS, rounds)
    assert result.result.number == 2
    assert next(contender for contender in result.contenders if contender.number == 1).left.startswith("out of memory")
    slower = rounds_of({OWN: [10.0] * 3, 1: [16.0] * 2, 2: [9.0] * 3}).with_launch(launch(1, 3, None))
    assert "The best other, trial 2 with" in verdict_in_words(judged(TRIALS, slower), metric="throughput")[0]


def test_rounds_are_stored_as_plain_values() -> None:
    estimate = JointEstimate(numbers=(0, 3), means=(0.5, 0.25), covariance=((0.01, 0.0), (0.0, 0.04)))
    rounds = rounds_of({OWN: [10.0, 11.0], 1: [12.0]}, since=2, estimate=estimate)
    noted = rounds.with_launch(launch(1, 2, 12.5, conditions=Conditions(cores=2, throttle_reasons=("heat",))))
    stored = {attributes.CONFIRMATION: json.loads(json.dumps(noted.to_json()))}
    assert Rounds.of(stored) == noted
    assert Rounds.of({}) == Rounds()


def test_a_round_that_was_begun_is_finished_first() -> None:
    rounds = rounds_of({OWN: [10.0], 1: [16.0], 2: [15.0]})
    order = order_of_round([0, 1, 2], round_number=2, seed=42)
    for number in order:
        assert next_in_rounds(rounds, TRIALS, spec=spec(), allowed_s=1e9) == (2, number)
        rounds = rounds.with_launch(launch(number, 2, 10.0))


def test_rounds_end_once_the_speed_up_is_known_and_a_clearly_worse_one_leaves() -> None:
    precise = rounds_of({OWN: [10.0, 10.01, 9.99], 1: [16.0, 16.1, 15.9], 2: [12.0, 12.1, 11.9]})
    assert staying(precise, TRIALS, spec=spec()) == [OWN, 1]
    assert next_in_rounds(precise, TRIALS, spec=spec(), allowed_s=1e9) is None
    vague = rounds_of({OWN: [10.0, 10.5, 9.5], 1: [16.0, 15.0, 17.0], 2: [8.0, 8.1, 8.2]})
    assert staying(vague, TRIALS, spec=spec()) == [OWN, 1]
    turn = present(next_in_rounds(vague, TRIALS, spec=spec(), allowed_s=1e9))
    assert turn[0] == 4


def test_two_rounds_are_enough_for_a_winner_where_launches_of_the_search_hardly_differ() -> None:
    precise = rounds_of({OWN: [10.0, 10.01], 1: [16.0, 16.02], 2: [12.0, 12.01]})
    assert next_in_rounds(precise, TRIALS, spec=spec(), allowed_s=1e9, noise=0.005) is None
    large = rounds_of({OWN: [1.0, 1.001], 1: [16.0, 16.02], 2: [12.0, 12.01]})
    assert next_in_rounds(large, TRIALS, spec=spec(), allowed_s=1e9, noise=0.05) is None
    for rounds, noise in ((precise, None), (precise, 0.04), (large, 0.25)):
        turn = present(next_in_rounds(rounds, TRIALS, spec=spec(), allowed_s=1e9, noise=noise))
        assert turn[0] == 3
    for values in ([16.0, 14.0], [9.9, 9.91]):  # not precise; not better than the user's config
        rounds = rounds_of({OWN: [10.0, 10.01], 1: values, 2: [9.0, 9.01]})
        assert present(next_in_rounds(rounds, TRIALS, spec=spec(), allowed_s=0.0, noise=0.005))[0] == 3
    begun = rounds_of({OWN: [10.0], 1: [16.0], 2: [12.0]})
    assert present(next_in_rounds(begun, TRIALS, spec=spec(), allowed_s=1e9, noise=0.0))[0] == 2


def test_rounds_go_on_for_the_answer_that_is_not_known_alone() -> None:
    trials = (*TRIALS[:2], trial(2, 12.0, overlap_comm=True))
    vague, precise = [12.0, 10.8, 13.4], [16.0, 16.01, 15.99]
    at_user_batch = rounds_of({OWN: [10.0, 10.01, 9.99], 1: precise, 2: vague})
    assert staying(at_user_batch, trials, spec=spec(batch="both")) == [OWN, 2]
    assert not any(item.left for item in judged(trials, at_user_batch).contenders)
    verdict = judged(trials, at_user_batch.with_launch(launch(OWN, 4, 10.0)).with_launch(launch(2, 4, 12.0)))
    assert (verdict.result.number, verdict.result.left, verdict.result.rounds) == (1, "", 3)
    assert (present(verdict.same_batch).number, present(verdict.same_batch).rounds) == (2, 4)
    for second, kept in (([12.0, 12.01, 11.99], [OWN, 1]), (vague, [OWN, 1, 2])):
        at_any = rounds_of({OWN: [10.0, 10.01, 9.99], 1: [14.0, 16.0, 18.0], 2: second})
        assert staying(at_any, trials, spec=spec(batch="both")) == kept
    fastest_of_all = rounds_of({OWN: [10.0, 10.01, 9.99], 1: [11.9, 12.0, 11.8], 2: vague})
    assert staying(fastest_of_all, trials, spec=spec(batch="both")) == [OWN, 1, 2], "it has the user's batch"


def test_the_time_for_rounds_is_limited_after_three_or_as_given() -> None:
    vague = rounds_of({OWN: [10.0, 10.5, 9.5], 1: [16.0, 15.0, 17.0]})
    assert next_in_rounds(vague, TRIALS, spec=spec(), allowed_s=60.0) is None, "six launches of ten seconds"
    assert next_in_rounds(vague, TRIALS, spec=spec(), allowed_s=61.0) is not None
    begun = rounds_of({OWN: [10.0], 1: [16.0]})
    assert next_in_rounds(begun, TRIALS, spec=spec(), allowed_s=0.0) is not None, "three rounds at least"
    assert next_in_rounds(begun, TRIALS, spec=spec(confirm_time_s=20.0), allowed_s=1e9) is None
    assert next_in_rounds(vague, TRIALS, spec=spec(confirm_time_s=100.0), allowed_s=0.0) is not None
    chosen_again = rounds_of({OWN: [10.0], 1: [16.0]}, since=2)
    assert next_in_rounds(chosen_again, TRIALS, spec=spec(confirm_time_s=20.0), allowed_s=0.0) is not None


def test_rounds_take_longer_where_only_their_small_number_leaves_a_large_gain_open() -> None:
    """Launches differ by an eighth: two standard errors ahead, and the user's own config was handed over."""
    noisy = rounds_of({OWN: [65.3, 50.3, 56.1], 1: [75.6, 87.2, 88.5]})
    assert judged(TRIALS[:2], noisy).kind is VerdictKind.NOT_CONFIRMED
    assert next_in_rounds(noisy, TRIALS, spec=spec(), allowed_s=16.0) is not None, "a quarter of 64 s"
    assert next_in_rounds(noisy, TRIALS, spec=spec(), allowed_s=1.0) is not None, "six rounds, however short the search"
    six = rounds_of({OWN: [65.3, 50.3, 56.1, 80.1, 58.0, 60.1], 1: [75.6, 87.2, 88.5, 62.2, 79.9, 82.0]})
    assert judged(TRIALS[:2], six).kind is VerdictKind.NOT_CONFIRMED
    assert next_in_rounds(six, TRIALS, spec=spec(), allowed_s=31.0) is not None, "a quarter of 124 s"
    assert next_in_rounds(six, TRIALS, spec=spec(), allowed_s=30.0) is None, "no longer than the search"
    assert next_in_rounds(noisy, TRIALS, spec=spec(confirm_time_s=50.0), allowed_s=16.0) is None
    trials = (*TRIALS[:2], trial(2, 70.0, overlap_comm=True))
    at_user_batch = rounds_of({OWN: [65.3, 50.3, 56.1], 1: [1000.0, 1100.0, 1050.0], 2: [67.6, 72.2, 73.5]})
    assert present(judged(trials, at_user_batch).same_batch).number == OWN
    assert next_in_rounds(at_user_batch, trials, spec=spec(batch="both"), allowed_s=1.0) == (4, 2)
    for second, goes_on in ([12.0, 8.9, 11.4], True), ([11.6, 8.7, 11.0], False):
        rounds = rounds_of({OWN: [10.0, 9.0, 11.0], 1: second})  # faster by one standard error, or less
        assert (next_in_rounds(rounds, TRIALS, spec=spec(), allowed_s=16.0) is not None) is goes_on


def test_what_rounds_refuted_is_no_finalist_again_and_says_why_it_left() -> None:
    trials = [trial(OWN, 10.0), trial(1, 16.0), trial(2, 15.0)]
    ranked = attributes.best_trials(trials, maximize=True)
    assert choose_finalists(trials, ranked, spec=spec(confirm=1), noise=None, out={1}) == [2, OWN]
    rounds = rounds_of({OWN: [10.0] * 4, 1: [9.9, 9.95, 9.9], 2: [15.0] * 4})
    result = judged(trials, Rounds(chosen=(OWN, 2), launches=rounds.launches))
    assert [contender.left for contender in result.contenders] == ["", "", "no better than your config"]


def test_an_unfinished_round_drops_no_finalist() -> None:
    begun = judged(TRIALS, rounds_of({OWN: [10.0, 10.1, 9.9], 1: [16.0, 16.1], 2: [12.0, 12.1]}))
    assert {contender.left for contender in begun.contenders} == {""}
    dropped = judged(TRIALS, rounds_of({OWN: [10.0, 10.1, 9.9, 10.0], 1: [16.0, 16.1, 15.9], 2: [12.0, 12.1, 11.9]}))
    assert [contender.left for contender in dropped.contenders] == ["", "clearly worse than the best", ""]


def test_a_single_round_does_not_claim_that_it_decides() -> None:
    assert not judged(TRIALS[:2], rounds_of({OWN: [10.0], 1: [12.0]})).warnings
