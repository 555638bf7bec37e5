"""Whole studies whose finalists are measured in rounds, over simulated landscapes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import variance
from typing import Any

import pytest

from optuna_dsat.cli.studies import result_lines
from optuna_dsat.errors import ConfigError, UsageError
from optuna_dsat.launch.measurement import GlobalStep
from optuna_dsat.launch.protocol import LaunchRequest
from optuna_dsat.outcome import Outcome
from optuna_dsat.study.confirm.confirmation import steps_worth_their_time
from optuna_dsat.study.confirm.finalists import USUAL_NOISE
from optuna_dsat.study.confirm.rounds import Rounds, order_of_round
from optuna_dsat.study.confirm.verdict import VerdictKind
from optuna_dsat.study.search.methods import Method
from optuna_dsat.study.stored import read_stored
from optuna_dsat.trials import attributes
from optuna_dsat.trials.bisection import EDGE_WIDTH
from tests.harness import present
from tests.harness.landscapes import GIB, Hill
from tests.harness.simulated import SimulatedLauncher, SimulatedResult
from tests.harness.studies import USER_CONFIG, StudyBench

STEP = GlobalStep(
    step=1, latency_s=1.0, forward_s=0.5, backward_s=0.5, step_s=0.0, samples=8.0, peak_allocated_bytes=0,
    peak_reserved_bytes=0, rss_bytes=0, loss=None,
)  # fmt: skip


def rounds_of(bench: StudyBench, name: str = "s") -> Rounds:
    return Rounds.of(bench.study(name).user_attrs)


def turns_of(bench: StudyBench, name: str = "s") -> list[tuple[int, int]]:
    return [(launch.round, launch.number) for launch in rounds_of(bench, name).launches]


def micro_batch_of(config: Mapping[str, Any]) -> int:
    return int(config["train_micro_batch_size_per_gpu"])


def step_of(seconds: float) -> SimulatedResult:
    return SimulatedResult(startup_s=5, forward_s=seconds, backward_s=0.0, step_s=0.0, peak_bytes=2**34)


class Interrupting(SimulatedLauncher):
    """Ctrl-C comes instead of the fifth launch of the confirmation."""

    def __init__(self, landscape: Hill) -> None:
        super().__init__(landscape, total_slots=2)
        self.confirmed = 0

    def start(self, request: LaunchRequest) -> None:
        self.confirmed += request.purpose == "confirm"
        if self.confirmed == 5:
            raise KeyboardInterrupt
        super().start(request)


class Fooling(SimulatedLauncher):
    """Larger micro-batches are faster in the search; the first so many that are measured again prove to be slower."""

    def __init__(self, false: int) -> None:
        super().__init__(Hill(self._result), total_slots=2, noise=0.002)
        self._false = false
        self._seen: list[str] = []
        self._again = False

    def start(self, request: LaunchRequest) -> None:
        self._again = request.purpose == "confirm"
        super().start(request)

    def _result(self, config: Mapping[str, Any]) -> SimulatedResult:
        micro_batch = micro_batch_of(config)
        key = json.dumps(config, sort_keys=True)
        if self._again and micro_batch > 2 and key not in self._seen:
            self._seen.append(key)
        is_false = self._again and key in self._seen[: self._false]
        return step_of(0.02 * micro_batch * (1.05 if is_false else 1 / (1 + micro_batch / 100)))


def test_finalists_and_the_users_config_run_in_rounds_which_a_killed_tuner_goes_on_with(bench: StudyBench) -> None:
    result = bench.run(bench.spec(), Hill())
    turns, chosen = turns_of(bench), rounds_of(bench).chosen
    assert result.verdict.rounds == 3
    for number in (1, 2, 3):
        assert sorted(item for round_number, item in turns if round_number == number) == sorted(chosen)
    assert 0 in chosen
    assert len({tuple(item for round_number, item in turns if round_number == number) for number in (1, 2, 3)}) > 1
    assert result.verdict.kind is VerdictKind.WINNER
    assert present(result.speed_up_low) > 1
    written = json.loads(Path(result.metrics_path).read_text())
    assert written["verdict"]["speed_up"]["value"] == present(result.speed_up)
    assert read_stored(bench.store, "s").verdict == result.verdict, "one definition"
    again = bench.spec(name="again")
    session = bench.session(again, Interrupting(Hill()))
    partial = present(session.run())
    assert session.interrupted
    assert partial.verdict.rounds <= 2
    assert turns_of(bench, "again") == turns[:4]
    bench.run(again, Hill())
    assert turns_of(bench, "again") == turns


def test_a_false_winner_is_followed_by_the_next_best(bench: StudyBench) -> None:
    """'Your config is the best found' was said, although nothing but one false finalist had been compared."""
    result = bench.run_by(Fooling(1), bench.spec(confirm=1))
    false, second = [number for number in dict.fromkeys(number for _, number in turns_of(bench)) if number]
    assert (result.verdict.kind, result.trial) == (VerdictKind.WINNER, second)
    counted = Counter(number for _, number in turns_of(bench))
    assert (counted[false], counted[second] >= 3) == (3, True)
    assert any("next best of the search is measured" in text for text in bench.messages)


def test_where_all_finalists_are_false_their_number_is_limited(bench: StudyBench) -> None:
    confirm = 2
    result = bench.run_by(Fooling(99), bench.spec(confirm=confirm, max_trials=12))
    assert (result.verdict.kind, result.trial) == (VerdictKind.BASELINE_IS_BEST, 0)
    heard = {number for _, number in turns_of(bench)} - {0}
    assert confirm < len(heard) <= 2 * confirm


def test_what_rounds_refuted_is_not_measured_again_when_the_study_goes_on(bench: StudyBench) -> None:
    bench.run_by(Fooling(99), bench.spec(confirm=1, max_trials=4))
    before = turns_of(bench)
    refuted = {number for _, number in before} - {0}
    result = bench.run_by(Fooling(0), bench.spec(confirm=1, max_trials=8))
    later = {number for _, number in turns_of(bench)[len(before) :]}
    assert later
    assert not later & refuted
    assert result.trial in later


def test_a_raised_budget_compares_a_new_best_in_rounds_of_its_own(bench: StudyBench) -> None:
    first = bench.run(bench.spec(max_trials=3), Hill())
    before = rounds_of(bench).last
    again = bench.run(bench.spec(max_trials=12), Hill())
    later = [launch for launch in rounds_of(bench).launches if launch.round > before]
    assert again.trial != first.trial
    assert {again.trial, 0} <= {item.number for item in later}
    assert sum(item.number == again.trial for item in later) >= 3, "not paired with rounds of another day"
    quiet = Hill()
    bench.run(bench.spec(max_trials=12), quiet)
    assert quiet.configs == []


def test_a_machine_that_slows_down_between_rounds_changes_the_warning_not_the_speed_up(bench: StudyBench) -> None:
    confirmed: list[str] = []

    class SlowingDown(SimulatedLauncher):
        def start(self, request: LaunchRequest) -> None:
            if request.purpose == "confirm":
                confirmed.append(request.launch_id)
            super().start(request)

    def slower(config: Mapping[str, Any]) -> SimulatedResult:
        busy = 2.75 if "-round-3" in "".join(confirmed[-1:]) else 1.0
        return step_of(busy * 0.01 * (micro_batch_of(config) + 4))

    launcher = SlowingDown(Hill(slower), total_slots=2, noise=0.002)
    result = bench.run_by(launcher, bench.spec(metric="latency", zero_stages=(2,)))
    calm = bench.run(bench.spec(name="calm", metric="latency", zero_stages=(2,)), Hill(
        lambda config: step_of(0.01 * (micro_batch_of(config) + 4))), noise=0.002)  # fmt: skip
    assert any("in round 3 your config was" in warning for warning in result.verdict.warnings), result.verdict.warnings
    assert calm.verdict.warnings == ()
    assert result.speed_up == pytest.approx(calm.speed_up, rel=0.01)


def test_rounds_that_are_too_few_for_the_noise_hand_over_the_users_config(bench: StudyBench) -> None:
    def alike(config: Mapping[str, Any]) -> SimulatedResult:
        return step_of(0.05 * micro_batch_of(config))

    result = bench.run(bench.spec(confirm_time_s=150.0, tie=0.0, random_seed=5), Hill(alike), noise=0.15)
    assert result.verdict.kind is VerdictKind.NOT_CONFIRMED
    assert (result.trial, result.speed_up) == (0, 1.0)
    assert rounds_of(bench).spent_s >= 150.0
    more = bench.run(bench.spec(confirm_time_s=400.0, tie=0.0, random_seed=5), Hill(alike), noise=0.1)
    assert more.verdict.rounds > result.verdict.rounds, "it goes on where more time is given"


def test_of_what_runs_as_fast_the_smaller_batch_is_found_and_wins(bench: StudyBench) -> None:
    """A global batch of 224 was handed over as '2.00 times as good', where 32 ran as fast."""

    def saturates(config: Mapping[str, Any]) -> SimulatedResult | None:
        micro_batch = micro_batch_of(config)
        return None if micro_batch > 40 else step_of(0.02 * max(micro_batch, 8) * (1.0005 if micro_batch < 20 else 1.0))

    spec = bench.spec(method="guided", max_trials=24, zero_stages=(2,))
    result = bench.run(spec, Hill(saturates))
    trials = [trial for trial in bench.study().trials if trial.value is not None]
    best = max(trials, key=lambda item: item.value or 0.0)
    assert result.train_batch_size < 40 <= 2 * micro_batch_of(best.user_attrs[attributes.CONFIG])
    assert result.verdict.ties
    assert result.value > 0.99 * (best.value or 0.0)


def test_the_users_own_global_batch_may_be_kept(bench: StudyBench) -> None:
    config = {**USER_CONFIG, "gradient_accumulation_steps": 6}
    result = bench.run(bench.spec(method="guided", ds_config=config, batch="keep", confirm=0), Hill())
    configs = bench.configs
    assert {2 * micro_batch_of(item) * item["gradient_accumulation_steps"] for item in configs} == {24}
    assert result.train_batch_size == result.user_train_batch_size == 24
    assert len({micro_batch_of(item) for item in configs}) > 1
    with pytest.raises(UsageError, match="--batch keep"):
        bench.spec(batch="keep", train_batch_size=8)


@pytest.mark.parametrize(
    ("method", "options", "most"),
    [
        ("random", {"dataset_size": 400}, 40),
        ("guided", {"dataset_size": 400, "max_train_batch_size": 60}, 60),
    ],
)
def test_no_global_batch_is_searched_beyond_a_tenth_of_the_data(
    bench: StudyBench, method: str, options: dict[str, int], most: int
) -> None:
    """A script with 4,096 samples was tried at a global batch of 6,662."""
    result = bench.run(bench.spec(method=method, confirm=0, max_trials=10, **options), Hill())
    batches = [2 * micro_batch_of(config) for config in bench.configs]
    assert most / 4 <= max(batches) <= most
    words = [text for text in bench.messages if "no global batch beyond" in text]
    expected = f"The training data have {options['dataset_size']} samples: no global batch beyond {most}"
    assert [item.startswith(expected) for item in words] == [True] * ("max_train_batch_size" not in options)
    assert result.dataset_size == options["dataset_size"]
    advice = str(result.learning_rate_advice)
    assert f"an epoch from {options['dataset_size'] // 4} to" in advice
    assert "rule of thumb" in advice


@pytest.mark.parametrize("method", ["random", "guided"])
def test_no_micro_batch_is_tried_next_to_another_where_the_data_end_them(
    bench: StudyBench, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """A search of a script with 4,000 samples on two ranks tried 199 and 198 after 200."""

    def rising(config: Mapping[str, Any]) -> SimulatedResult:
        seconds = 0.02 + 0.002 * micro_batch_of(config)
        return SimulatedResult(startup_s=10, forward_s=seconds, backward_s=0.0, step_s=0.0, peak_bytes=20 * GIB)

    small = Hill(override=rising)
    profile = replace(small.profile(2), activation_bytes_per_sample=2**24)
    monkeypatch.setattr(Hill, "profile", lambda *_: profile)
    bench.run(bench.spec(method=method, confirm=0, max_trials=30, dataset_size=4000), small, noise=0.01)
    sizes: dict[str, list[int]] = {}
    for config in bench.configs:
        lineage = json.dumps({key: value for key, value in config.items() if "batch" not in key}, sort_keys=True)
        sizes.setdefault(lineage, []).append(micro_batch_of(config))
    assert max(max(tried) for tried in sizes.values()) >= 190, "up to a tenth of the data"
    for first, second in (pair for tried in sizes.values() for pair in combinations(tried, 2)):
        assert min(first, second) < 200 / (1 + EDGE_WIDTH) or (first % 8 and not second % 8), sizes


@pytest.mark.parametrize("method", ["binary", "guided"])
def test_micro_batches_may_be_multiples_of_a_number(bench: StudyBench, method: str) -> None:
    hill = Hill()
    bench.run(bench.spec(method=method, divisible_by=8, confirm=0, max_trials=10), hill)
    sizes = [micro_batch_of(config) for config in bench.configs[1:]]
    assert all(size % 8 == 0 for size in sizes), "all but the user's own"
    assert micro_batch_of(hill.configs[0]) == 8, "the profile, too"
    listed = {**USER_CONFIG, "train_micro_batch_size_per_gpu": [2, 4]}
    impossible = bench.spec(name="t", ds_config=listed, divisible_by=8)
    with pytest.raises(ConfigError, match=r"--divisible-by"):
        bench.run(impossible, Hill())


def test_a_script_whose_batch_consists_of_groups_is_searched_at_multiples(bench: StudyBench) -> None:
    def refuse(config: Mapping[str, Any]) -> SimulatedResult | None:
        samples = 2 * config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"]
        message = f"generation_batch_size ({samples}) must be divisible by num_generations (8)."
        return SimulatedResult(outcome=Outcome.SCRIPT_ERROR, startup_s=1.0, message=message) if samples % 8 else None

    hill = Hill(refuse)
    own = {**USER_CONFIG, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    bench.run(bench.spec(method="random", ds_config=own, max_trials=6, confirm=0, batch="free"), hill)
    sizes = [config["train_micro_batch_size_per_gpu"] for config in hill.configs]
    assert sizes[0] == 1
    assert 2 in sizes[1:], "the user's own"
    assert all(size % 4 == 0 for size in sizes[4:] if size != 2)
    assert any("as by --divisible-by 4" in text for text in bench.messages)


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.03])
def test_a_launch_counts_the_steps_with_which_a_second_tells_most(noise: float) -> None:
    latencies = [0.9, 1.0, 1.1, 1.0]
    steps = [replace(STEP, latency_s=latency) for latency in latencies]
    between, within = (noise or USUAL_NOISE) ** 2, variance(latencies)

    def variance_in_a_second(count: float) -> float:
        return (between + within / count) * (30.0 + count)

    count = steps_worth_their_time(steps, noise=noise, fixed_s=30.0)
    assert variance_in_a_second(count) < min(variance_in_a_second(count * factor) for factor in (0.5, 0.9, 1.1, 2))
    assert steps_worth_their_time(steps, noise=noise, fixed_s=0.0) == 0
    assert steps_worth_their_time(steps[:1], noise=noise, fixed_s=30.0) > 1, "one step shows no variance"


def test_the_first_round_counts_steps_by_the_noise_of_the_search(
    bench: StudyBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = {}
    for noise in (0.002, 0.2):
        monkeypatch.setattr(Method, "noise", lambda *_, noise=noise: noise)
        hill = Hill(lambda _: replace(step_of(0.1), startup_s=100.0))
        bench.run(bench.spec(name=f"noise-{noise}", max_trials=3, confirm=1), hill, noise=0.05)
        launches = rounds_of(bench, f"noise-{noise}").launches
        counted[noise] = [launch.steps for launch in launches if launch.round == 1]
    assert sum(counted[0.2]) < sum(counted[0.002])


def test_the_order_of_a_round_is_drawn_anew_and_the_same_for_whoever_continues_it() -> None:
    orders = [order_of_round([3, 1, 2, 0], round_number=item, seed=42) for item in range(1, 20)]
    assert orders == [order_of_round([0, 1, 2, 3], round_number=item, seed=42) for item in range(1, 20)]
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)
    assert len({tuple(order) for order in orders}) > 10
    assert {order[0] for order in orders} == {0, 1, 2, 3}


def test_finalists_that_fail_in_the_rounds_are_named_with_their_errors(bench: StudyBench) -> None:
    class Tiring(Hill):
        def run(self, ds_config: Mapping[str, Any], slots: int) -> SimulatedResult:
            is_own = ds_config["train_micro_batch_size_per_gpu"] == 2
            if len(self.configs) >= 3 and not is_own:
                return SimulatedResult(outcome=Outcome.SCRIPT_ERROR, startup_s=1, message="ValueError: step 9")
            return super().run(ds_config, slots)

    result = bench.run(bench.spec(max_trials=3, confirm=1), Tiring())
    assert result.verdict.is_baseline
    assert result.failures.startswith("Could not be measured again, with more steps: trial ")
    assert "(ValueError: step 9)" in result.failures
    assert result.failures in result_lines(read_stored(bench.store, "s"))
